"""The search for writes that no version counter sees, such as writes through `param.data`: a rank's own half parameters
must be, bit for bit, the casts of its masters, or of their average where that is shown. Losses that are not finite
although their gradients are travel to the host with its results.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from megamix.base import constants
from megamix.comm.collectives import Collectives
from megamix.mixed_precision.bucket import Bucket
from megamix.mixed_precision.flat_layout import ROW
from megamix.mixed_precision.step import HostNumbers, StepProgress

log = logging.getLogger("megamix")

_FIRST, _EVERY = 2, 64  # checked steps besides examined ones; a pass over the shard costs as much as an update
_LAG = 2  # steps until the host reads the result of a check, so that no step waits for the device


class UnseenWrites:
    """Compares this rank's half shards with the casts of its masters, before a step's update makes them equal.

    `found` FP64 (): the first parameter that differs, as its place counted from the last one; 0: none does. It travels
    with the step's agreement. Each rank reads the answer `_LAG` steps later, so that all ranks raise in the same call.
    """

    def __init__(self, buckets: Sequence[Bucket], param_names: Sequence[str], progress: StepProgress, speaks: bool):
        """Start with nothing found. `param_names`: names of the whole model's parameters. `speaks`: this rank warns."""
        self._progress = progress
        self._names, self._speaks = param_names, speaks
        device = buckets[0].master.device
        place = {name: len(param_names) - number for number, name in enumerate(param_names)}
        number_of = partial(torch.tensor, dtype=torch.float32, device=device)
        self._places = {bucket: number_of([place[piece.spec.name] for piece in bucket.pieces]) for bucket in buckets}
        self.found = torch.zeros((), dtype=torch.float64, device=device)
        self._lost = torch.zeros_like(self.found)  # from the first step on that is applied in spite of its loss: NaN
        self._told = [HostNumbers((2,), device) for _ in range(_LAG)]
        self.asked = False  # True: calls of all ranks need the result of the next step's agreement
        self._steps = 0  # steps since masters and half parameters were written from outside

    @property
    def due(self) -> bool:
        """Return whether the step under way is checked; the answer is equal on every rank."""
        often = self._steps < _FIRST or (self._steps + 1) % _EVERY == 0
        return (often or self._progress.examined) and not self._is_captured()

    def _is_captured(self) -> bool:
        """Return whether a CUDA graph captures the step under way: a replay asks the host nothing."""
        return self.found.is_cuda and torch.cuda.is_current_stream_capturing()

    def look(self, buckets: Iterable[Bucket]) -> None:
        """Compare these buckets, which must have memory, and keep the first parameter that differs in `found`."""
        for one in buckets:
            half, master = one.param_shard, one.shown
            size = constants.HASH_CHUNK if half.is_cpu else constants.HASH_CHUNK_GPU
            both = zip(torch.split(half, size), torch.split(master, size), strict=True)
            rows = torch.cat([_rows_that_differ(*pair) for pair in both]).float()
            by_piece = torch.stack(torch._foreach_max(torch.split(rows, one.piece_rows)))
            torch.maximum(self.found, (by_piece * self._places[one]).amax(), out=self.found)

    def look_if_due(self, buckets: Iterable[Bucket]) -> None:
        """Compare these buckets in a step that is checked: before their memory is freed, or else at the step's end."""
        if self.due:
            self.look(buckets)

    def tell(self, by_rank: Tensor, loss: Tensor, found_inf: Tensor) -> None:
        """End the step under way: send the result of its agreement to the host. Shapes: by_rank FP64 (ranks,), loss
        FP64 (), found_inf bool ().
        """
        self._lost.add_(loss.masked_fill(found_inf, 0.0), alpha=0.0)  # 0 * NaN and 0 * inf are NaN
        if self.due or self.asked:
            self._told[self._steps % _LAG].write(torch.stack([by_rank.amax(), self._lost]))
            self.asked = False
        self.found.zero_()
        self._steps += 1

    def refuse_told(self) -> None:
        """Raise RuntimeError naming the parameter found `_LAG` steps ago, if there is one."""
        if not self._is_captured():
            number, lost = self._told[self._steps % _LAG].read()
            if math.isnan(lost) and self._speaks:
                self._speaks = False
                log.warning(
                    "the loss of a step was NaN or inf while its gradients were finite, so the step was applied. A "
                    "mean over no targets does so: it is 0 / 0, and its gradients are zeros. Call "
                    "engine.backward(loss, weight) with the sum over the targets that count divided by the number of "
                    "all targets, and the share that counts (docs/library.md, Accumulation)"
                )
            if number:
                self.forget()  # the steps since then have found the same write
                self._refuse(int(number))

    def refuse(self, world: Collectives | None) -> None:
        """Raise RuntimeError naming the parameter found so far, on all ranks of `world` or on this one; waits for the
        device.
        """
        found = self.found if world is None else world.table(self.found.view(1))
        number = max(int(found.max()), *(int(one.read()[0]) for one in self._told))
        if number and world is not None:  # without `world` the next step still tells all ranks
            self.forget()
        self._refuse(number)

    def forget(self) -> None:
        """Forget all results: masters were written from outside, and all half parameters are now their casts."""
        self.found.zero_()
        self._steps = 0
        for one in self._told:
            one.read().fill(0)

    def _refuse(self, number: int) -> None:
        if number:
            raise RuntimeError(
                f"parameter {self._names[len(self._names) - number]} was written past the engine, through .data, a "
                "NumPy view or torch._foreach_ calls; or its masters were written without engine.publish_masters(). "
                "The half copy is not the cast of its FP32 master, and an update overwrites it. To change weights call "
                "engine.load_weights(state_dict); after writing masters call engine.publish_masters(). If nobody "
                "wrote, memory is damaged"
            )


def _rows_that_differ(half: Tensor, master: Tensor) -> Tensor:
    """Return the rows in which any bit differs. Masters that are NaN are not compared: the bits of a NaN's cast depend
    on the kernel.

    Shapes: half (rows * ROW,), master FP32 (rows * ROW,) -> bool (rows,).
    """
    cast = master.to(half.dtype)
    bits = torch.int32 if half.itemsize == 4 else torch.int16
    differs = (half.view(bits) != cast.view(bits)).logical_and_(cast == cast)
    return differs.view(-1, ROW).any(1)
