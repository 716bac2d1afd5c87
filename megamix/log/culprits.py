"""Causes of an overflow, which the host asks for between steps.

The statistics of every step show the parameters. An examined step also shows the ranks and micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from megamix.comm.collectives import gather_json
from megamix.mixed_precision.engine import ShardedEngine
from megamix.mixed_precision.flat_layout import ROW, Piece
from megamix.mixed_precision.headroom import FP16_MAX
from megamix.mixed_precision.step import Examination

Fault = Literal["NaN", "inf", "inf and NaN", "too large to square"]
_FAULTS: tuple[Fault, ...] = get_args(Fault)

_TOO_LARGE = 2.0**64  # the smallest number whose square is beyond FP32
_MOST_ORIGINS = 64  # most origins that one rank reports, as a scale far too high makes all its gradients inf


class ParamPeak(NamedTuple):
    """The size of one parameter's gradient, summed over ranks and micro-batches, loss scale included."""

    name: str
    sum_of_squares: float
    max_abs: float  # NaN if any element is NaN
    experts: range = range(0)  # from the first to the last one whose matrix is a reason to skip the step

    @property
    def place(self) -> str:
        """Return its name, with the experts that are at fault."""
        numbers = " to ".join(map(str, sorted({*self.experts[:1], *self.experts[-1:]})))
        return f"{self.name}, expert{'s' * (len(self.experts) > 1)} {numbers}" if self.experts else self.name

    @property
    def fault(self) -> Fault | None:
        """Return why a step with this gradient is skipped; None: this gradient is no reason. Inf beside NaN counts as
        NaN.
        """
        if math.isnan(self.max_abs):
            return "NaN"
        if math.isinf(self.max_abs):
            return "inf"
        return None if math.isfinite(self.sum_of_squares) else "too large to square"


def broken_masters(engine: ShardedEngine) -> list[str]:
    """Return the parameters whose masters hold inf or NaN on any rank. Every rank must call it: one small gather."""
    own = {owned.spec.name for owned in engine.owned_ranges() if not owned.tensors["master"].isfinite().all()}
    found = gather_json(engine.world, sorted(own), engine.device)
    return sorted({name for names in found for name in names})


def headroom(max_abs: float) -> float:
    """Return the octaves between the largest element and the end of FP16, log2(65504 / max_abs), whatever its dtype.

    inf for 0, -inf for inf, NaN for NaN.
    """
    return math.inf if max_abs == 0 else -math.inf if math.isinf(max_abs) else math.log2(FP16_MAX / max_abs)


def gather_peaks(engine: ShardedEngine, by_piece: Tensor, peak_rows: Tensor) -> list[ParamPeak]:
    """Return the peaks of all parameters of the model, in registration order. Every rank must call it: one small
    collective.

    `by_piece` and `peak_rows` are those of a step's `StepResult`, on the host or the device.
    """
    pieces, names = engine.plan.pieces, engine.plan.param_names
    experts = experts_by_param(peak_rows.cpu(), pieces, names)
    mine = torch.cat([peaks_by_param(by_piece.cpu(), pieces, names), experts], dim=1)
    table = engine.world.table(mine.flatten().to(engine.device))
    return merge_peaks(table.cpu().view(-1, *mine.shape), engine.plan.param_names)


def peaks_by_param(by_piece: Tensor, pieces: Sequence[Piece], param_names: Sequence[str]) -> Tensor:
    """Return one rank's statistics by parameter, 0 where it owns nothing. Shapes: FP64 (2, pieces) -> (params, 2)."""
    index = {name: row for row, name in enumerate(param_names)}
    peaks = torch.zeros(len(param_names), 2, dtype=torch.float64)
    peaks[[index[piece.spec.name] for piece in pieces]] = by_piece.T
    return peaks


def experts_by_param(peak_rows: Tensor, pieces: Sequence[Piece], param_names: Sequence[str]) -> Tensor:
    """Return the first expert and the one behind the last whose elements are in one rank's `peak_rows`, 0 without
    experts. Shapes: (2, pieces of experts) -> FP64 (params, 2).
    """
    experts = torch.zeros(len(param_names), 2, dtype=torch.float64)
    of_experts = [piece for piece in pieces if piece.spec.is_of_experts]
    for piece, (first, last) in zip(of_experts, peak_rows.T.tolist(), strict=True):
        elements = ROW * first, min(ROW * (last + 1), piece.numel) - 1
        begin, end = (int(piece.first + element) // math.prod(piece.spec.shape[1:]) for element in elements)
        experts[param_names.index(piece.spec.name)] = piece.spec.offset[0] + torch.tensor([begin, end + 1])
    return experts


def merge_peaks(table: Tensor, param_names: Sequence[str]) -> list[ParamPeak]:
    """Merge the `peaks_by_param` and `experts_by_param` of all ranks. Shapes: FP64 (ranks, params, 4)."""
    squares, largest, first, behind = table.unbind(-1)
    sums, peaks = squares.sum(0).tolist(), largest.amax(0).tolist()  # both keep NaN and inf
    at_fault = ~squares.isfinite() & (behind > 0)
    begin, end = first.where(at_fault, torch.inf).amin(0), behind.where(at_fault, 0).amax(0)
    experts = [range(int(min(bounds)), int(bounds[1])) for bounds in zip(begin.tolist(), end.tolist(), strict=True)]
    return [ParamPeak(*values) for values in zip(param_names, sums, peaks, experts, strict=True)]


class Origin(NamedTuple):
    """A gradient that was not finite, or too large to square, before it was added to any other."""

    param: str
    rank: int
    micro_batch: int
    fault: Fault


class Origins(NamedTuple):
    """Holds the faults that an examined step's ranks found in their own gradients."""

    found: list[Origin]  # by rank and micro-batch, in about backward's order: a fault spreads from its first
    left_out: int  # number of further faults


def gather_origins(engine: ShardedEngine, examination: Examination) -> Origins:
    """Return rank and micro-batch of every fault in an examined step. Every rank must call it: one small collective, or
    two.
    """
    mine = origins_of(examination.local.cpu(), engine.plan.param_names, engine.world.axis.rank)
    by_rank = gather_json(engine.world, mine, engine.device)
    found = [Origin(*origin) for of_rank, _ in by_rank for origin in of_rank]
    return Origins(found, sum(left_out for _, left_out in by_rank))


def origins_of(local: Tensor, param_names: Sequence[str], rank: int) -> Origins:
    """Return one rank's faults. Shapes: local FP64 (micro_batches, params, 3), an `Examination.local`."""
    inf, nan, large = local[..., 0] > 0, local[..., 1] > 0, local[..., 2] >= _TOO_LARGE
    fault = torch.where(inf & nan, 2, torch.where(nan, 0, torch.where(inf, 1, torch.where(large, 3, -1))))
    # Parameters from last to first: about the order of backward, in which a fault spreads.
    places = (fault.flip(1) >= 0).nonzero()
    found = [
        Origin(param_names[-1 - reverse], rank, micro_batch, _FAULTS[int(fault[micro_batch, -1 - reverse])])
        for micro_batch, reverse in places[:_MOST_ORIGINS].tolist()
    ]
    return Origins(found, len(places) - len(found))
