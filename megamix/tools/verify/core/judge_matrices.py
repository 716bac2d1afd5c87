"""Judge of Muon's directions. Each matrix's direction is compared twice.

It must equal, bit for bit, the engine's own function of the matrix that the ranks had together. And it must be within a
derived bound of the same iteration in FP64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from megamix.mixed_precision.muon import Muon, orthogonalised
from megamix.mixed_precision.observer import DIRECTION, SOURCE
from megamix.tools.verify.core.hypotheses import factor_of, nearest
from megamix.tools.verify.core.observed_step import Whole
from megamix.tools.verify.core.verdict import U32, UNIT, Verdict


def judge_matrices(
    verdict: Verdict, attempt: int, optimizer: Muon, name: str, want: Tensor, after: Whole, device: torch.device,
    tp_size: int,
) -> Tensor:  # fmt: skip
    """Check the matrices of a parameter that ranks have made orthogonal, and their directions.

    Return the directions, FP64.
    `want`: the matrix by the equation in FP64, before it is made orthogonal. `device`: the device of the ranks.
    Bound: 64 FP32 roundings of the largest number, as for a state, beyond each element's rounding to the iteration's
    dtype.
    """
    if (DIRECTION, name) not in after.tensors:
        verdict.note(attempt, DIRECTION, name, math.inf, 0.0, "there is none: no rank has made it orthogonal")
        return torch.zeros_like(want)
    rows = optimizer.matrices(name, tuple(want.shape))
    source, moves, owners = after.tensors[SOURCE, name], after.tensors[DIRECTION, name], after.owners[SOURCE, name]
    error = (source - want).abs() - UNIT[optimizer.ns_dtype] * want.abs()
    verdict.note(attempt, SOURCE, name, float(error.clamp(min=0.0).max()), 64 * U32 * float(want.abs().max()))
    all_rows = (source.to(optimizer.ns_dtype), moves, owners)
    source, found, owners = (one.view(-1, want.shape[-1]) for one in all_rows)
    for first, last in pairwise(accumulate(rows, initial=0)):
        own = slice(first, last)
        judged = _JudgedMatrix(optimizer, source[own], source, own, found[own], owners[own], device, tp_size)
        if judged.matrix.isfinite().all():  # otherwise the input has been reported
            judged.note(verdict, attempt, name if len(rows) == 1 else f"{name}, rows {first} to {last - 1}")
    return moves.double()


@dataclass(frozen=True, slots=True)
class _JudgedMatrix:
    optimizer: Muon
    matrix: Tensor  # the matrix that was made orthogonal
    parameter: Tensor  # all matrices of the parameter, one below the other
    rows: slice  # rows of this matrix among them
    found: Tensor  # direction as it moved the masters, FP32
    owners: Tensor  # for each element, the rank that has it in its shard
    device: torch.device
    tp_size: int

    @property
    def scale(self) -> float:
        return self.optimizer.lr_scale(*self.found.shape)

    def note(self, verdict: Verdict, attempt: int, where: str) -> None:
        if not self.optimizer.batched:  # batched: the bits depend on which matrices a rank multiplies together
            want = self._direction(self.matrix) * self.scale
            verdict.equal(attempt, DIRECTION, where, self.found, want, self._explain)
        exact, bound = exact_direction(self.matrix, self.optimizer)
        error = float((self.found.double() / self.scale - exact).norm())
        verdict.note(attempt, f"{DIRECTION} in FP64", where, error, bound, self._explain)

    def _direction(self, matrix: Tensor) -> Tensor:
        """Return the engine's direction of a matrix, FP32. It uses one thread, as ranks do, for the order of sums."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return orthogonalised(matrix.to(self.device).contiguous(), self.optimizer).float().cpu()
        finally:
            torch.set_num_threads(threads)

    def _explain(self) -> str:
        """Return which kind of mistake the wrong elements look like, up to a factor; "" for no known one."""
        want, found = self._direction(self.matrix) * self.scale, self.found
        wrong, bound = found != want, 4 * UNIT[self.optimizer.ns_dtype] * float(want.abs().max())
        kinds = ((text, other, factor_of(found[wrong], other[wrong])) for text, other in self._kinds(want))
        told = ((text.format(factor), torch.where(wrong, factor * other, found)) for text, other, factor in kinds)
        return nearest(found, want, bound, told)

    def _kinds(self, want: Tensor) -> Iterator[tuple[str, Tensor]]:
        yield "{:.4g} times the right one: scaled for another shape, or by another rule", want
        yield "{:.4g} times the momentum itself: not orthogonalised", self.matrix.float()
        if len(self.matrix) < len(self.parameter):
            together = self._direction(self.parameter)[self.rows]
            yield "orthogonalised with its neighbours as one matrix: not split", together
        for text, parts in self._divisions():
            alone = torch.zeros_like(want)
            for part in parts:
                alone[part] = self._direction(self.matrix[part])
            yield text, alone

    def _divisions(self) -> Iterator[tuple[str, list[tuple[Tensor, Tensor]]]]:
        """Yield parts of the matrix, as indices of rows and columns, that may be taken for matrices."""
        rows, columns = (torch.arange(size) for size in self.found.shape)
        if self.tp_size > 1:
            text = "each tensor-parallel rank's block orthogonalised by itself"
            yield text, [(part[:, None], columns) for part in rows.chunk(self.tp_size)]
            yield text, [(rows[:, None], part) for part in columns.chunk(self.tp_size)]
        own = [self.owners == rank for rank in sorted({*self.owners.flatten().tolist()})]
        parts = [(rows[mask.any(1)][:, None], columns[mask.any(0)]) for mask in own]
        if len(parts) > 1 and all(bool(mask[part].all()) for mask, part in zip(own, parts, strict=True)):
            yield "each rank's part orthogonalised by itself", parts


def exact_direction(source: Tensor, optimizer: Muon) -> tuple[Tensor, float]:
    """Return the result of the iteration in FP64, and a bound of the norm by which roundings may change it.

    In FP64 the iteration is a polynomial of each singular value. A turn rounds its two inner products and its result to
    the iteration's dtype, and the sums in them to FP32. In the basis of the singular vectors, later turns multiply an
    error by at most the quotient of two singular values' difference, or of their sum, after and before these turns.
    Roundings of many elements do not conspire, so these factors count by their mean square. The bound is twice that:
    few elements may conspire, and there are terms of second order.
    """
    (a, b, c), wide = optimizer.ns_coefficients, source.double()
    left, values, right = torch.linalg.svd(wide / wide.norm().clamp(min=1e-7), full_matrices=False)
    turns, slopes = [values], [torch.ones_like(values)]
    for _ in range(optimizer.ns_steps):
        x = turns[-1]
        turns.append(x * (a + b * x**2 + c * x**4))
        slopes = [slope * (a + 3 * b * x**2 + 5 * c * x**4) for slope in slopes] + [torch.ones_like(x)]
    outside = (0, max(source.shape) - len(values))  # vectors whose singular value is zero
    end, square = F.pad(turns[-1], outside), 0.0
    for number, (x, slope) in enumerate(zip(turns, slopes, strict=True)):
        rounded = x.norm()
        if number:
            gram = turns[number - 1] ** 2
            inner, top = b * gram + c * gram**2, gram.max().sqrt()
            rounded = rounded + top * inner.norm() + top * (abs(b) + 2 * abs(c) * top**2) * gram.norm()
        apart, both = x[:, None] - F.pad(x, outside), (x[:, None] + F.pad(x, outside)).clamp(min=1e-30)
        of_apart = torch.where(apart.abs() > 1e-9, (turns[-1][:, None] - end) / apart, slope[:, None])
        growth = torch.maximum(of_apart.abs(), (turns[-1][:, None] + end).abs() / both)
        square += float(rounded**2 * growth.square().mean())
    unit = UNIT[source.dtype] + math.sqrt(max(source.shape)) * U32
    return (left * turns[-1]) @ right, 2 * unit * math.sqrt(square)
