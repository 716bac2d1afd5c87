"""Muon trains on any ranks, with matrices whole in one shard or assembled from pieces: masters, momentum and moments
are bit for bit those of a plain loop in one process that takes each matrix whole.
"""

from collections import Counter
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megamix import Precision, ShardedEngine, tuned
from megamix.comm.collectives import GlooCollectives
from megamix.mixed_precision import muon
from megamix.mixed_precision.matrix_layout import matrices_of
from megamix.mixed_precision.muon import Muon, orthogonalised
from megamix.mixed_precision.update_slice import MASTER
from tests.conftest import FULL, also_wide
from tests.distributed import test_equals_reference as plain
from tests.distributed.test_equals_reference import GROUPS, differences, draw, run_engine

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
    return mock.patch.object(tuned, "MOST_PADDING", 100.0 if uncut else -1.0)


def check_cases(cases):
    wrong = []
    for case in cases:
        with _laid_out(uncut=case.uncut):
            engine, *told = run_engine(case)
        cut = [
            piece
            for bucket in engine.plan.layout.buckets
            for matrix in matrices_of(bucket)
            for shard in range(bucket.num_shards)
            for piece in bucket.shard_pieces(shard)
            if piece.spec is matrix.spec and 0 < piece.numel < piece.spec.numel
        ]
        if cut and case.uncut:
            wrong.append(f"{case}: a matrix is cut")
        wrong += differences(case, engine, *told)
    return wrong


@pytest.mark.parametrize("dp_size", also_wide(COUNTS, 2))
def test_equals_a_plain_loop(run_ranks, dp_size):
    cases = draw(AXES, Case, dp_size, COUNTS[dp_size])
    wrong = run_ranks(check_cases, dp_size, cases, deadline_s=900.0 if FULL else 60.0)
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


@pytest.mark.parametrize("ns_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dp_size", [2, 4])
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


def _of_one_matrix(uncut):
    """Return one matrix after three steps with equal gradients on all ranks, and this rank's number of its elements."""
    drawn = torch.Generator().manual_seed(6)
    model = torch.nn.Linear(24, 40, bias=False)
    model.weight.data = torch.randn(40, 24, generator=drawn)
    with _laid_out(uncut=uncut):
        engine = ShardedEngine(model, Muon(lr=0.1), Precision(torch.float32), compile_update=False)
    for _ in range(3):
        engine.backward((model.weight * torch.randn(40, 24, generator=drawn)).sum())
        engine.step()
    return engine.full_weights()["weight"], sum(owned.tensors[MASTER].numel() for owned in engine.owned_ranges())


@pytest.mark.parametrize(("uncut", "owned"), [(True, [0, 0, 0, 960]), (False, [256, 256, 256, 192])])
def test_more_ranks_than_matrices_train_the_same(run_ranks, uncut, owned):
    """Train the same also if one rank has the whole matrix, and the others only padding."""
    alone, _ = _of_one_matrix(uncut)
    told = run_ranks(_of_one_matrix, 4, uncut)
    assert all(torch.equal(weight, alone) for weight, _ in told)
    assert sorted(numel for _, numel in told) == sorted(owned)


def _weights(uncut):
    case = Case(torch.bfloat16, torch.bfloat16, dp_size=dist.get_world_size(), clip_grad=0.05)
    with _laid_out(uncut=uncut):
        engine, *_ = run_engine(case, compile_update=True)
    assert engine.update_path == "compiled"
    return engine.full_weights()


def test_compiled_too_the_layout_changes_no_bit(run_ranks):
    whole, cut = (run_ranks(_weights, 2, uncut)[0] for uncut in (True, False))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
