"""Judge of Muon's directions. Each matrix's direction is compared twice.

It must equal, bit for bit, the engine's own function of the matrix that the ranks had together. And it must be within a
derived bound of the same iteration in FP64.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from megamix.mixed_precision.observer import DIRECTION, SOURCE
from megamix.mixed_precision.optim.muon import DIRECTION_SQ, Muon, with_equal_moments
from megamix.tools.verify.core.observed_step import Whole
from megamix.tools.verify.core.verdict import U32, UNIT, Tensors, Verdict, max_abs


def judge_matrices(
    verdict: Verdict, optimizer: Muon, name: str, want: Tensor, before: Whole, after: Whole, device: torch.device
) -> Tensor:
    """Check the matrices of a parameter that ranks have made orthogonal, their directions, and the states of matrices.

    Return the directions, FP64.
    `want`: the matrix by the equation in FP64, before it is made orthogonal. `device`: the device of the ranks.
    Bound: 64 FP32 roundings of the largest number, as for a state, beyond each element's rounding to the iteration's
    dtype.
    """
    if (DIRECTION, name) not in after.tensors:
        verdict.expect(DIRECTION, name, False, "there is none: no rank has made it orthogonal")
        return torch.zeros_like(want)
    rows = optimizer.matrices(name, tuple(want.shape))
    source, moves = after.tensors[SOURCE, name], after.tensors[DIRECTION, name]
    error = (source - want).abs() - UNIT[optimizer.ns_dtype] * want.abs()
    verdict.note(SOURCE, name, float(error.clamp(min=0.0).max()), 64 * U32 * max_abs(want))
    source, found = (one.view(-1, want.shape[-1]) for one in (source.to(optimizer.ns_dtype), moves))
    done = Counter[str]()
    for first, last in pairwise(accumulate(rows, initial=0)):
        own, lengths = slice(first, last), optimizer.matrix_states(last - first, want.shape[-1])
        ends = {state: (done[state], done[state] + length) for state, length in lengths.items()}
        done.update(lengths)
        was, now = ({of: whole.tensors[of, name][slice(*ends[of])] for of in ends} for whole in (before, after))
        if source[own].isfinite().all():  # otherwise the input has been reported
            where = name if len(rows) == 1 else f"{name}, rows {first} to {last - 1}"
            _judge_matrix(verdict, where, optimizer, source[own], found[own], was, now, device)
    return moves.double()


def _judge_matrix(
    verdict: Verdict, where: str, optimizer: Muon, matrix: Tensor, found: Tensor, before: Tensors, after: Tensors,
    device: torch.device,
) -> None:  # fmt: skip
    """Check one matrix that was made orthogonal.

    `found`: its direction as it moved the masters, FP32. `before`, `after`: its states.
    """
    scale, (direction, states) = optimizer.lr_scale(*found.shape), _made(optimizer, matrix, before, device)
    verdict.equal(DIRECTION, where, found, direction * scale)
    for state, want in states.items():
        verdict.equal(state, where, after[state], want)
    if type(optimizer).direction is not Muon.direction:
        return
    exact, bound = exact_direction(matrix, optimizer)
    if (beta2 := optimizer.row_beta2) is not None:
        divided, moment = with_equal_moments(exact, before[DIRECTION_SQ].double(), beta2)
        dim = 1 if len(exact) == len(moment) else 0
        norms = exact.norm(dim=dim)
        # The square of a row of n elements and norm r is off by at most 2 r times the bound and the bound's square.
        off = (1 - beta2) * (2 * float(norms.max()) + bound) * bound / exact.shape[dim]
        error = max_abs(after[DIRECTION_SQ].double() - moment)
        verdict.note(f"{DIRECTION_SQ} in FP64", where, error, off + 64 * U32 * float(moment.max()))
        # A row's error is multiplied by the row's factor. It moves this factor, too, by no more, and the norm before
        # and after the division.
        growth = float((divided.norm(dim=dim) / norms.clamp(min=1e-30)).max())
        exact, bound = divided, 4 * max(1.0, growth) * bound + UNIT[optimizer.ns_dtype] * float(divided.norm())
    verdict.note(f"{DIRECTION} in FP64", where, float((found.double() / scale - exact).norm()), bound)


def _made(optimizer: Muon, matrix: Tensor, states: Tensors, device: torch.device) -> tuple[Tensor, Tensors]:
    """Return the engine's direction of a matrix, FP32, and its next states. They are computed with one thread, as ranks
    do, for the order of sums.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        there = {name: state.to(device) for name, state in states.items()}
        direction, new = optimizer.direction(matrix.to(device).contiguous(), there)
        return direction.float().cpu(), {name: state.cpu() for name, state in new.items()}
    finally:
        torch.set_num_threads(threads)


def exact_direction(source: Tensor, optimizer: Muon) -> tuple[Tensor, float]:
    """Return the result of the iteration in FP64, and a bound of the norm by which roundings may change it.

    In FP64 the iteration is a polynomial of each singular value. A turn rounds its two inner products and its result to
    the iteration's dtype, and the sums in them to FP32. Equal rows are one rounding more before the first turn, an
    exact norm one after the last, and its factor has the error of the norm. In the basis of the singular vectors, later
    turns multiply an error by at most the quotient of two singular values' difference, or of their sum, after and
    before these turns.
    Roundings of many elements do not conspire, so these factors count by their mean square. The bound is twice that:
    few elements may conspire, and there are terms of second order.
    """
    wide = source.double()
    if optimizer.equal_rows:
        wide = wide * (wide.norm() / math.sqrt(len(wide)) / wide.norm(dim=1, keepdim=True).clamp(min=1e-6))
    left, values, right = torch.linalg.svd(wide / (wide.norm() + optimizer.ns_eps).clamp(min=1e-7), full_matrices=False)
    turns, slopes = [values], [torch.ones_like(values)]
    for a, b, c in optimizer.turns:
        x = turns[-1]
        turns.append(x * (a + b * x**2 + c * x**4))
        slopes = [slope * (a + 3 * b * x**2 + 5 * c * x**4) for slope in slopes] + [torch.ones_like(x)]
    outside = (0, max(source.shape) - len(values))  # vectors whose singular value is zero
    end, square = F.pad(turns[-1], outside), 0.0
    for number, (x, slope) in enumerate(zip(turns, slopes, strict=True)):
        rounded = x.norm() * (2 if optimizer.equal_rows and not number else 1)
        if number:
            _, b, c = optimizer.turns[number - 1]
            gram = turns[number - 1] ** 2
            inner, top = b * gram + c * gram**2, gram.max().sqrt()
            rounded = rounded + top * inner.norm() + top * (abs(b) + 2 * abs(c) * top**2) * gram.norm()
        apart, both = x[:, None] - F.pad(x, outside), (x[:, None] + F.pad(x, outside)).clamp(min=1e-30)
        of_apart = torch.where(apart.abs() > 1e-9, (turns[-1][:, None] - end) / apart, slope[:, None])
        growth = torch.maximum(of_apart.abs(), (turns[-1][:, None] + end).abs() / both)
        square += float(rounded**2 * growth.square().mean())
    unit = UNIT[source.dtype] + math.sqrt(max(source.shape)) * U32
    direction, bound = (left * turns[-1]) @ right, 2 * unit * math.sqrt(square)
    if not optimizer.exact_norm:
        return direction, bound
    factor = math.sqrt(min(source.shape)) / float(direction.norm().clamp(min=1e-6))
    return factor * direction, factor * (2 * bound + unit * float(direction.norm()))
