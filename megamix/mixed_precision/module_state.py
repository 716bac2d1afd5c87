"""State of the module that forwards move outside the gradient: buffers, such as running statistics, and counts. A
skipped step leaves both as they were.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megamix.base.names import by_plain_name
from megamix.base.tally import Counts, Tally
from megamix.comm.collectives import Collectives
from megamix.mixed_precision.guards.refusals import require_equal
from megamix.mixed_precision.step import StepProgress
from megamix.mixed_precision.unit_hooks import OfModule


@dataclass(slots=True, eq=False)
class _Place:
    """A buffer's place in the model, and its state in the step under way."""

    buffers: dict[str, Tensor | None]  # all buffers of its module
    name: str
    moves: bool = True  # False: known not to change in a forward
    copy: Tensor | None = None  # its values when the step began
    seen: tuple[Tensor, int] | None = None  # tensor and version after the step's last forward

    def now(self) -> Tensor | None:
        """Return the buffer; None if there is none, or its values or versions cannot be read."""
        buffer = self.buffers.get(self.name)
        return None if buffer is None or buffer.is_inference() or buffer.layout != torch.strided else buffer

    def is_as_seen(self) -> bool:
        now = self.now()
        return now is not None and self.seen is not None and now is self.seen[0] and now._version == self.seen[1]


class MovingBuffers:
    """Copies the changing buffers when a step's first forward begins, and restores them if the step is skipped. The
    device decides this, and the host does not wait.

    The first training forward shows which buffers change, by a comparison of values: torch's norms write without
    counting versions. The host waits for this comparison. A buffer that begins to change later is noticed by its
    version; from the next step on, all buffers of its module are copied. Writes by user code between forwards show in
    the versions, and are never undone.
    """

    def __init__(self, model: nn.Module):
        self._places = [_Place(part._buffers, name) for part in model.modules() for name in part._buffers]
        self._begun = self._learned = False
        if self._places:
            model.register_forward_pre_hook(OfModule(self.before_forward, may_import=False))
            model.register_forward_hook(OfModule(self.after_forward, may_import=False), always_call=True)

    def before_forward(self, given: object, module: nn.Module, output: object) -> None:
        if torch.is_grad_enabled() and module.training and not torch.compiler.is_compiling():
            self.begin()

    def after_forward(self, given: object, module: nn.Module, output: object) -> None:
        if torch.is_grad_enabled() and module.training and not torch.compiler.is_compiling():
            self.note()

    @torch.no_grad()
    def begin(self) -> None:
        """Copy the changing buffers, unless this step has copied them and only forwards have written them since."""
        copies, values = list[Tensor](), list[Tensor]()
        for place in self._places:
            if (now := place.now()) is None or place.is_as_seen():
                continue
            place.seen = now, now._version
            if place.moves:
                if place.copy is None or not _alike(place.copy, now):
                    place.copy = torch.empty_like(now)
                copies.append(place.copy)
                values.append(now)
        if copies:
            torch._foreach_copy_(copies, values)
        self._begun = True

    @torch.no_grad()
    def note(self) -> None:
        """Note the buffers' state after a forward, or after a backward that repeats one, and learn which buffers
        change.
        """
        if not self._begun:
            return
        for place in self._places:
            if (now := place.now()) is None:
                continue
            written, place.seen = not place.is_as_seen(), (now, now._version)
            if not self._learned and place.copy is not None:
                place.moves = written or not torch.equal(_bits(place.copy), _bits(now))
                place.copy = place.copy if place.moves else None
            elif written and not place.moves:
                for other in self._places:
                    other.moves |= other.buffers is place.buffers
        self._learned = True

    @torch.no_grad()
    def put_back(self, skipped: Tensor) -> None:
        """End the step. If it is skipped, restore the buffers that forwards have changed. Shapes: skipped bool ()."""
        for place in self._places:
            now = place.now()
            if place.copy is not None and now is not None and place.is_as_seen() and _alike(place.copy, now):
                torch.where(skipped, place.copy, now, out=now)
            place.seen = None
        self._begun = False


def _alike(copy: Tensor, now: Tensor) -> bool:
    return (copy.shape, copy.dtype, copy.device) == (now.shape, now.dtype, now.device)


def _bits(buffer: Tensor) -> Tensor:
    return buffer.contiguous().view(-1).view(torch.uint8)


class Tallies:
    """The counts and tallies of a rank's model. Counts lie one behind the other, so that ranks sum them at once."""

    def __init__(self, model: nn.Module, readers: Collectives, progress: StepProgress, device: torch.device) -> None:
        """Let the model's tallies count into the step under way. `readers`: the ranks that see other tokens of the
        step. Raises: ValueError for a rule whose result is no next value, or ranks with other tallies.
        """
        counted = ((name, module) for name, module in model.named_modules() if isinstance(module, Counts))
        self._by_name, self._readers = by_plain_name(counted), readers
        self._sizes = [counts.size for counts in self._by_name.values()]
        require_equal(readers, device, [*self._by_name], self._sizes)
        self._moving = {name: tally for name, tally in self._by_name.items() if isinstance(tally, Tally)}
        for name, tally in self._moving.items():
            _check_rule(name, tally)
        self._counts = torch.zeros(sum(self._sizes), dtype=torch.float32, device=device)
        for module, counts in zip(self._by_name.values(), torch.split(self._counts, self._sizes), strict=True):
            module.connect(counts, progress)

    def reset(self) -> None:
        self._counts.zero_()

    def take(self) -> Mapping[str, Tensor]:
        """Return the counts of all ranks by name, FP32 (size,), and begin a new step. Every rank must call it."""
        if not self._by_name:
            return {}
        summed = self._readers.sum_whole(self._counts)
        self.reset()
        return dict(zip(self._by_name, torch.split(summed, self._sizes), strict=True))

    @torch.no_grad()
    def move(self, counts: Mapping[str, Tensor], skipped: Tensor) -> None:
        """Move each tally by its rule, unless the step is skipped. Shapes: skipped BOOL ()."""
        for name, tally in self._moving.items():
            moved = tally.moved(tally.value, counts[name])
            torch.where(skipped, tally.value, moved, out=tally.value)


def _check_rule(name: str, tally: Tally) -> None:
    if tally.value.dtype != torch.float32:
        raise ValueError(
            f"the value of the tally {name} is {tally.value.dtype}, and must be torch.float32; load weights without "
            "assign=True, or after a cast of this value"
        )
    moved: object = tally.moved(tally.value, torch.zeros_like(tally.value))
    wanted = tally.value.dtype, tally.value.shape
    if not isinstance(moved, Tensor) or (moved.dtype, moved.shape) != wanted:
        got = f"{moved.dtype} of shape {tuple(moved.shape)}" if isinstance(moved, Tensor) else repr(moved)
        raise ValueError(
            f"the rule of the tally {name} must return {wanted[0]} of shape {tuple(wanted[1])}, got {got}; return the "
            "next value"
        )
