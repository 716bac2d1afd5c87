"""Every side of a comparison trains, on every layout, and all train the same thing."""

import os
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megamix.base.machine import CPU_HALVES
from megamix.mixed_precision.optim.muon import Muon
from megamix.tools.bench.ranks import Side, TrainRank
from megamix.tools.bench.sides import Ddp, ForwardBackward, Fsdp, Ours, Zero, how_multiplied, plain
from megamix.tools.bench.train_bench import LAYOUTS
from tests.distributed.late_gather import late_gathers
from tests.tools.bench.tiny import MODEL, WORK

SIDES = {
    "ours": Ours,
    "gradients": partial(Ours, shard="gradients"),
    "parameters": partial(Ours, shard="parameters"),
    "ddp": Ddp,
    "zero": Zero,
    "fsdp2": Fsdp,
    "resharded": partial(Fsdp, reshard_after_forward=True),
}
HALF = {name: SIDES[name] for name in ("ours", "parameters", "ddp", "zero", "fsdp2")}
FP16 = {name: SIDES[name] for name in ("ours", "ddp", "fsdp2")}


def _losses(builds, work, steps, dtype=None):
    """Return the mean over the ranks that know it, the number that all of them minimise: others of a pipeline say 0."""
    traces = {}
    for name, build in builds.items():
        rank = TrainRank(Side(name, build), replace(work, dtype=dtype))
        losses = torch.tensor(rank.losses(steps), dtype=torch.float64)
        known = (losses != 0).double()
        dist.all_reduce(losses)
        dist.all_reduce(known)
        traces[name] = (losses / known).tolist()
    return traces


UNTIED = replace(WORK, model=MODEL.model_copy(update={"tie_embeddings": False}), shared=True)
LAYOUT_WORK = {"tp2": UNTIED, "pp2": replace(UNTIED, micro_batches=4), "cp2": UNTIED}


def _builds(layout):
    bench = LAYOUTS[layout]
    return {side.name: side.build for side in (bench.ours, *bench.peers, *bench.others)}


@pytest.mark.parametrize("layout", ["dp2", *LAYOUTS])
def test_all_sides_agree_on_the_losses_in_fp32_and_nearly_in_half_precision(run_ranks, layout):
    whole = layout == "dp2"
    builds, work = (SIDES, WORK) if whole else (_builds(layout), LAYOUT_WORK[layout])
    traces, other = run_ranks(_losses, 2, builds, work, 4, torch.float32)
    assert traces == other
    ours = traces["ours"]
    for name, losses in traces.items():
        assert losses == pytest.approx(ours, abs=1e-5), name
    assert abs(ours[3] - ours[0]) > 1e-3  # otherwise a side that never updates would agree as well
    halves = [(HALF, torch.bfloat16), (FP16, torch.float16)] if whole else [(builds, torch.bfloat16)]
    for of_half, dtype in halves:
        for name, losses in run_ranks(_losses, 2, of_half, work, 2, dtype)[0].items():
            assert losses == pytest.approx(ours[:2], abs=2e-2), (name, dtype)


def _turns():
    ours = TrainRank(Side("ours", Ours, steps=2), WORK)
    alone = TrainRank(Side("alone", ForwardBackward, steps=2, warm_up_steps=0), WORK)
    turns = [ours.turn(), alone.turn()]
    grads = {param.grad for param in alone.engine.model.parameters()}
    return [*turns, ours._step, alone._step, grads]


def test_a_turn_times_its_steps_after_the_warm_up(run_ranks):
    ours, alone, ours_steps, alone_steps, grads = run_ranks(_turns, 2)[0]
    assert (ours_steps, alone_steps) == (3, 2)
    assert {"update", "exposed_reduce_scatter"} <= set(ours.details_ms)
    assert 0 < ours.details_ms["update"] < ours.optimizer_ms < 1e3 * ours.seconds
    assert 0 < ours.optimizer_cpu_s < ours.busy * ours.seconds
    assert 0.1 < alone.busy < 2
    assert alone.details_ms == {}
    assert alone.optimizer_ms < 1e3 * alone.seconds
    assert grads == {None}
    assert ours.max_rss_bytes > 50e6  # torch alone is larger


def _under_way():
    """Return the number of gathers that nobody has awaited yet: after a step, and after a turn."""
    rank = TrainRank(Side("ours", Ours), WORK)
    with late_gathers() as begun:
        rank._train_step()
        after_step = sum(not gather.done for gather in begun)
        rank.turn()
    return after_step, sum(not gather.done for gather in begun)


def test_a_side_takes_no_traffic_into_the_next_sides_turn(run_ranks):
    assert run_ranks(_under_way, 2) == [(1, 0), (1, 0)]


PEAKS = {"ours": Ours, "ddp": Ddp, "zero": Zero, "fsdp2": Fsdp, "alone": ForwardBackward}


def _peaks():
    ranks = {name: TrainRank(Side(name, build), replace(WORK, compile_update=True)) for name, build in PEAKS.items()}
    return {name: rank.peak_live_bytes(2) for name, rank in ranks.items()}


def test_peak_live_bytes_are_counted_on_every_side(run_ranks):
    params = sum(param.numel() for param in ForwardBackward(WORK).model.parameters())
    for peaks in run_ranks(_peaks, 2):
        assert peaks["alone"] > 4 * params  # half weights and gradients
        assert peaks["ddp"] > 16 * params  # FP32 weights, gradients and two states
        assert peaks["ddp"] > peaks["zero"] > 12 * params
        # No closer bound holds: the first use in a process makes some 400 kB of its own.
        assert peaks["fsdp2"] > 8 * params
        assert peaks["ours"] > 10 * params


class _Products(TorchDispatchMode):
    """Mode that notes the dtypes of matrix products' inputs."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("mm", "addmm", "addmm_", "bmm", "baddbmm", "linear"):
            self.dtypes |= {arg.dtype for arg in args if isinstance(arg, Tensor)}
        return func(*args, **(kwargs or {}))


def _products(builds, work):
    found = {}
    for name, build in builds.items():
        with mock.patch.dict(os.environ, {CPU_HALVES: "wide"}), _Products() as products:
            TrainRank(Side(name, build), replace(work, compile_update=False)).losses(1)
        found[name] = products.dtypes
    return found


def test_plain_torch_multiplies_in_half_alone_where_blocks_are_compiled(monkeypatch):
    monkeypatch.setenv(CPU_HALVES, "native")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    work = replace(WORK, model=WORK.model.model_copy(update={"compile": True}))
    with _Products() as products:
        losses = TrainRank(Side("plain", plain), work).losses(2)
    assert products.dtypes == {torch.bfloat16}
    ours = TrainRank(Side("ours", Ours), replace(WORK, dtype=torch.float32)).losses(2)
    assert losses == pytest.approx(ours, abs=2e-2)


def test_without_bf16_arithmetic_no_side_multiplies_in_bf16(run_ranks, monkeypatch):
    monkeypatch.setenv(CPU_HALVES, "wide")
    sides = HALF | {"forward and backward": ForwardBackward, "muon": partial(Ours, optimizer=Muon)}
    cases = [(sides, WORK)]
    cases += [(_builds(layout), replace(bench.work, model=UNTIED.model)) for layout, bench in LAYOUTS.items()]
    for builds, work in cases:
        assert run_ranks(_products, 2, builds, work) == [{key: {torch.float32} for key in builds}] * 2
    assert "every side computes wide" in how_multiplied("cpu")[0]
    assert how_multiplied("cuda") == []
