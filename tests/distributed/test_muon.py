"""Muon trains on any ranks, with matrices whole in one shard or assembled from pieces: masters, momentum and moments
are bit for bit those of a plain loop in one process that takes each matrix whole.
"""

from collections import Counter
from dataclasses import dataclass
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megamix.base import constants
from megamix.comm.collectives import GlooCollectives
from megamix.mixed_precision import fused_update
from megamix.mixed_precision.optim import muon
from megamix.mixed_precision.optim.matrix_layout import matrices_of
from megamix.mixed_precision.optim.muon import Muon, orthogonalised
from tests.conftest import FULL, also_wide
from tests.distributed import test_equals_reference as plain
from tests.distributed.test_equals_reference import GROUPS, draw, run_engine

COUNTS = {1: 20, 2: 50, 3: 25, 4: 40, 8: 15, 16: 3} if FULL else {1: 3, 2: 5, 3: 2, 4: 4, 8: 1}


RELATIVES = {
    "plain": {},
    "normuon": {"row_beta2": 0.9},
    "all": {
        "row_beta2": 0.95, "equal_rows": True, "exact_norm": True, "cautious_weight_decay": True,
        "ns_table": ((8.0, -22.0, 15.5), (4.0, -2.8, 0.5), (2.3, -1.7, 0.4)),
    },
}  # fmt: skip


@dataclass(frozen=True)
class Case(plain.Case):
    ns_dtype: torch.dtype = torch.bfloat16
    nesterov: bool = True
    adjust_lr: str = "match_rms_adamw"
    relative: str = "plain"
    fused: bool = False  # `up` holds three matrices
    uncut: bool = True

    def make_optimizer(self):
        return Muon(
            lr=0.02, groups=GROUPS, ns_dtype=self.ns_dtype, nesterov=self.nesterov, adjust_lr=self.adjust_lr,
            adamw_lr_factor=0.5, fused={"*.up.weight": (13, 20, 7)} if self.fused else {}, **RELATIVES[self.relative],
        )  # fmt: skip

    def run(self):
        with _laid_out(uncut=self.uncut):
            engine, *told = run_engine(self)
        for bucket in engine.plan.layout.buckets if self.uncut else ():
            pieces = [piece for shard in range(bucket.num_shards) for piece in bucket.shard_pieces(shard)]
            matrices = [matrix.spec for matrix in matrices_of(bucket)]
            assert all(piece.numel in (0, piece.spec.numel) for piece in pieces if piece.spec in matrices), self
        return engine, *told


AXES = {axis: values for axis, values in plain.AXES.items() if axis not in ("optimizer", "units", "frozen")} | {
    "ns_dtype": [torch.bfloat16, torch.float32],
    "nesterov": [True, False],
    "adjust_lr": ["match_rms_adamw", "original", "spectral_norm"],
    "relative": [*RELATIVES, "all"],
    "fused": [False, True],
    "uncut": [True, False],
}


def _laid_out(*, uncut):
    """Make matrices lie whole in one shard at any cost, or anyhow."""
    return mock.patch.object(constants, "MOST_PADDING", 100.0 if uncut else -1.0)


@pytest.mark.parametrize("dp_size", also_wide(COUNTS, 2))
def test_equals_a_plain_loop(run_ranks, dp_size):
    cases = draw(AXES, Case, dp_size, COUNTS[dp_size])
    wrong = run_ranks(plain.check_cases, dp_size, cases, deadline_s=900.0 if FULL else 60.0)
    assert not any(wrong), "\n".join(sum(wrong, [])[:5])


def _counted(uncut, ns_dtype, overflow):
    """Return this rank's number of directions, the number for all ranks, and the bytes that it sent per
    matrix element.
    """
    case = Case(torch.float16, torch.float16, dp_size=dist.get_world_size(), ns_dtype=ns_dtype, overflow=overflow)
    counts, exchange = Counter(), GlooCollectives.exchange

    def counted(matrix, optimizer):
        counts["directions"] += 1
        return orthogonalised(matrix, optimizer)

    def sent(own, values, arrived, to, of):
        counts["bytes"] += values.element_size() * (sum(to) - to[own.axis.rank])
        return exchange(own, values, arrived, to, of)

    with (
        _laid_out(uncut=uncut),
        mock.patch.object(muon, "orthogonalised", counted),
        mock.patch.object(GlooCollectives, "exchange", sent),
    ):
        engine, *_ = run_engine(case)
    matrices = [matrix for bucket in engine.plan.layout.buckets for matrix in matrices_of(bucket)]
    elements = sum(matrix.rows * matrix.columns for matrix in matrices)
    attempts = case.steps + case.overflow
    return counts["directions"], attempts * len(matrices), counts["bytes"] / (attempts * elements)


@pytest.mark.parametrize(("dp_size", "ns_dtype"), [(2, torch.float32), (4, torch.bfloat16)])
def test_each_direction_is_computed_once_and_little_travels(run_ranks, dp_size, ns_dtype):
    """Send nothing of whole matrices. An element of another matrix travels at most once there and once back, from the d
    - 1 of d ranks that do not compute with it.
    """
    for uncut, overflow in ((True, False), (False, True)):
        told = run_ranks(_counted, dp_size, uncut, ns_dtype, overflow)
        assert sum(directions for directions, *_ in told) == told[0][1]
        sent = sum(each for *_, each in told)
        most = 0 if uncut else 2 * ns_dtype.itemsize * (dp_size - 1) / dp_size
        assert most / 5 <= sent <= most


def _weights(uncut):
    case = Case(torch.bfloat16, torch.bfloat16, dp_size=dist.get_world_size(), clip_grad=0.05)
    # Traced as for a compiler, whose own work would cost seconds and prove no more.
    traced = partial(torch.compile, dynamic=True, fullgraph=True, backend="eager")
    with _laid_out(uncut=uncut), mock.patch.object(fused_update, "_compile", traced):
        engine, *_ = run_engine(case, compile_update=True)
    assert engine.update_path == "compiled"
    return engine.full_weights()


def test_traced_too_the_layout_changes_no_bit(run_ranks):
    whole, cut = (run_ranks(_weights, 2, uncut)[0] for uncut in (True, False))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
