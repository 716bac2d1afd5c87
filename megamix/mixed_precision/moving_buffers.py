"""Buffers that a training forward moves, as running statistics: a step that is skipped leaves them as they were."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megamix.mixed_precision.unit_hooks import OfModule


@dataclass(slots=True, eq=False)
class _Place:
    """A buffer's place in the model, and what is known of it in the step under way."""

    buffers: dict[str, Tensor | None]  # of its module
    name: str
    moves: bool = True  # in a forward, for all that is known
    copy: Tensor | None = None  # of its values as the step began
    seen: tuple[Tensor, int] | None = None  # as the step's last forward left it: tensor and version

    def now(self) -> Tensor | None:
        """Return the buffer; None where none is whose values and versions can be told."""
        buffer = self.buffers.get(self.name)
        return None if buffer is None or buffer.is_inference() or buffer.layout != torch.strided else buffer

    def is_as_seen(self) -> bool:
        now = self.now()
        return now is not None and self.seen is not None and now is self.seen[0] and now._version == self.seen[1]


class MovingBuffers:
    """Copies them as a step's first forward begins, and puts them back by the step's flag, on the device.

    Which ones move is learned by their values in the first training forward, since torch's norms write without
    counting: the host waits there. Those that begin to move later are known from the next step on, by their versions,
    and with them all of their modules. What user code writes between forwards, which versions tell, is never put back.
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
        """Copy what moves, unless this step has, and none but forwards have written it since."""
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
        """Note what a forward, or a backward that repeats one, has left, and learn which buffers move."""
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
        """End the step: put back what its forwards have moved, if it is skipped. Shapes: skipped bool ()."""
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
