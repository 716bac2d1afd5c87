"""A step's counts and the vectors that they move (megamix/base/tally.py): counted by each rank, moved once a step."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from megamix.base.names import by_plain_name
from megamix.base.tally import Counts, Tally
from megamix.comm.collectives import Collectives
from megamix.mixed_precision.guards.refusals import require_equal
from megamix.mixed_precision.step import StepProgress


class Tallies:
    """The counts and tallies of a rank's model. Counts lie one behind the other, so that ranks sum them at once."""

    def __init__(self, model: nn.Module, readers: Collectives, progress: StepProgress, device: torch.device) -> None:
        """Let the model's tallies count into the step under way. `readers`: the ranks that see other tokens of the
        step. Raises: ValueError for a rule whose result is no next value, or ranks with other tallies.
        """
        counted = {name: module for name, module in model.named_modules() if isinstance(module, Counts)}
        self._by_name, self._readers = by_plain_name(counted.items()), readers
        self._sizes = [counts.size for counts in counted.values()]
        require_equal(readers, device, [*self._by_name], self._sizes)
        self._moving = {name: tally for name, tally in self._by_name.items() if isinstance(tally, Tally)}
        for name, tally in self._moving.items():
            _check_rule(name, tally)
        self._counts = torch.zeros(sum(self._sizes), dtype=torch.float32, device=device)
        for module, counts in zip(counted.values(), torch.split(self._counts, self._sizes), strict=True):
            module.connect(counts, progress)

    def reset(self) -> None:
        """Forget what the step has counted."""
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
