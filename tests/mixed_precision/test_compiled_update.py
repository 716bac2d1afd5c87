"""The compiled update is right within rounding, equal however a shard is cut, one graph, skipped on overflow, and works
in any number of engines; all ranks agree on the fallback.

Compiling takes seconds. So this file compiles AdamW on FP16, and NAG on BF16, once each, and with --full the velocity
form on FP32.
"""

import random
import threading
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters

from megamix import NAG, AdamW, Precision, Sharding, StaticLossScale
from megamix.base import constants
from megamix.comm.collectives import make_collectives
from megamix.comm.topology import Topology
from megamix.mixed_precision import fused_update
from megamix.mixed_precision.fused_update import CompiledUpdate, LibraryUpdate, choose_kernels
from megamix.mixed_precision.row_stats import chunked_row_stats, row_stats
from megamix.mixed_precision.settings import Placement
from megamix.mixed_precision.update_slice import StepScalars, UpdateSlice
from tests.builders import make_engine
from tests.conftest import FULL
from tests.mixed_precision.one_bucket import ALONE, one_bucket

EPS = 2.0**-23
CPU = torch.device("cpu")
KINDS = {
    "adamw-fp16": (AdamW(lr=0.01), torch.float16),
    "nag-bf16": (NAG(lr=0.1), torch.bfloat16),
    "velocity-fp32": (NAG(lr=0.1, momentum_form="velocity", decoupled_weight_decay=True), torch.float32),
}
ROWS = 8192 + 3  # rows of 64 elements: more than one piece of the path without a compiler, and an odd number


def _groups(optimizer):
    group = optimizer.group_of("weight", (64, 64))
    return [group._replace(weight_decay=(0.1,)), group._replace(lr_factor=(0.5,), weight_decay=(0.0,))]


@pytest.fixture(scope="module", params=[*KINDS][: None if FULL else 2])
def kind(request):
    """Return (optimizer, dtype, compiled update, compiled statistics)."""
    optimizer, dtype = KINDS[request.param]
    torch._dynamo.reset()  # code that another test of this process compiled would be neither compiled again nor counted
    before = counters["stats"]["unique_graphs"]
    kernels = _choose_for(optimizer, dtype, ALONE)
    assert counters["stats"]["unique_graphs"] - before == 2  # otherwise nothing was compiled
    return optimizer, dtype, kernels.update, kernels.row_stats


def _choose_for(optimizer, dtype, world):
    loss_scale = StaticLossScale(1.0) if dtype == torch.float16 else None
    bucket = one_bucket(Precision(dtype, loss_scale=loss_scale), _groups(optimizer))
    return choose_kernels(optimizer, _groups(optimizer), [bucket], world, try_compiler=True)


def _tensors(optimizer, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    numel = ROWS * 64
    grad = (torch.randn(numel, generator=generator) * 100).to(dtype)
    master = torch.randn(numel, generator=generator)
    states = {name: torch.rand(numel, generator=generator) for name in optimizer.states("weight", (64, 64))}
    return grad, master, states, master.to(dtype)


def assert_within_rounding(optimizer, unscaled, before, ours, theirs):
    """Compare two ways to compute one update, each given as master and states by name.

    Both evaluate the same sums; a fused multiply-add rounds once where separate operations round twice. So each result
    is off by at most a few roundings of the largest term in its sums, and terms here are bounded by these magnitudes.
    """
    master, states, *_ = before
    state_terms = [
        state.abs() + (1 + weight) * unscaled.clamp(min=1) ** 2 for weight, state in enumerate(states.values())
    ]
    if isinstance(optimizer, NAG):
        (momentum,) = states.values()
        state_terms = [momentum + unscaled + 0.1 * master.abs()]
    for mine, other, terms in zip(ours[1].values(), theirs[1].values(), state_terms, strict=True):
        assert ((mine - other).abs() <= 4 * EPS * terms).all()
    moved = (ours[0] - master).abs()
    assert ((ours[0] - theirs[0]).abs() <= 4 * EPS * (master.abs() + moved) + 8 * EPS * moved).all()
    assert moved.max() > 1e-3


def _step(found_inf=False, multiplier=2.0**-7 / 3):
    update = torch.tensor(5.0)
    return StepScalars(torch.tensor(multiplier), torch.tensor(found_inf), torch.tensor(0.01), update)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_says_that_it_compiles(rank, monkeypatch):
    said = threading.Event()
    log = mock.Mock(**{"warning.side_effect": lambda *_: said.set()})
    monkeypatch.setattr(fused_update, "log", log)
    monkeypatch.setattr(fused_update, "_SILENT_S", 0.0)
    monkeypatch.setattr(fused_update, "_try_out", lambda *_: rank or said.wait(60.0))
    world = mock.Mock(**{"axis.rank": rank, "agree": lambda compiles: compiles})
    assert _choose_for(*KINDS["adamw-fp16"], world).path == "compiled"
    lines = [str(call.args[0]).partition(":")[0] for call in log.warning.call_args_list]
    assert lines == ["compiling the optimizer's update"] * (rank == 0)


def test_compiled_equals_the_library_kernels_within_rounding(kind):
    optimizer, dtype, update, _ = kind
    step, library = _step(), LibraryUpdate(optimizer, _groups(optimizer), CPU)
    for group in (0, 1):
        grad, *ours = _tensors(optimizer, dtype)
        _, *theirs = _tensors(optimizer, dtype)
        update(UpdateSlice(group, grad, *ours), step)
        library(UpdateSlice(group, grad, *theirs), step)
        _, *before = _tensors(optimizer, dtype)
        assert_within_rounding(optimizer, grad.float().abs() * step.multiplier, before, ours, theirs)
        assert torch.equal(ours[2], ours[0].to(dtype))


def test_compiled_is_bitwise_equal_on_any_cut_and_stays_one_graph(kind):
    optimizer, dtype, update, _ = kind
    step = _step()
    grad, master, states, half = _tensors(optimizer, dtype)
    update(UpdateSlice(0, grad, master, states, half), step)
    graphs = counters["stats"]["unique_graphs"]
    rng = random.Random(0)
    for _ in range(4):
        _, cut_master, cut_states, cut_half = _tensors(optimizer, dtype)
        borders = sorted({0, ROWS, *(rng.randrange(1, ROWS) for _ in range(5)), 1, ROWS - 1})
        for start, end in zip(borders, borders[1:], strict=False):
            part = slice(64 * start, 64 * end)
            part_states = {name: state[part] for name, state in cut_states.items()}
            update(UpdateSlice(0, grad[part], cut_master[part], part_states, cut_half[part]), step)
        assert torch.equal(cut_master, master)
        assert all(map(torch.equal, cut_states.values(), states.values()))
        assert torch.equal(cut_half, half)
    assert counters["stats"]["unique_graphs"] == graphs


def test_compiled_gate_leaves_every_bit(kind):
    optimizer, dtype, update, _ = kind
    grad, *after = _tensors(optimizer, dtype)
    _, *before = _tensors(optimizer, dtype)
    grad[::7], grad[3::11] = float("inf"), float("nan")
    update(UpdateSlice(0, grad, *after), _step(found_inf=True, multiplier=float("nan")))
    assert torch.equal(before[0], after[0])
    assert all(map(torch.equal, before[1].values(), after[1].values()))
    assert torch.equal(before[2], after[2])


def test_statistics_are_the_same_compiled_or_not_on_any_cut(kind):
    optimizer, dtype, _, stats = kind
    grad = _tensors(optimizer, dtype)[0]
    exact = grad.double().square().sum()
    for compute in (stats.of_shard, chunked_row_stats, row_stats):
        whole = compute(grad)
        # Within a row 64 squares are added in FP32. So each sum is off by at most 64 roundings of a sum of positive
        # terms.
        assert abs(whole[0].double().sum() - exact) <= 64 * EPS * exact
        assert whole[1].amax() == grad.abs().max()
        for cut in (64, 64 * 1000, 64 * (ROWS - 1)):
            assert torch.equal(torch.cat([compute(grad[:cut]), compute(grad[cut:])], dim=1), whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_statistics_in_place_have_the_bits_of_plain_operations(dtype):
    """Try signs, zeros of both signs, numbers too small or too large to be squared, infinities and NaN; the gradient
    stays.

    There are two whole pieces, and a part with a single row.
    """
    values = torch.randn(64 * 17, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 30, 64 * 17)
    values[::9], values[64:128], values[700] = -0.0, -values[64:128].abs(), float("-inf")
    values[900:902] = torch.tensor([float("nan"), float("inf")])
    grad = values.to(dtype)
    kept = grad.clone()
    with mock.patch.object(constants, "STATS_CHUNK", 64 * 8):
        stats = chunked_row_stats(grad)
    torch.testing.assert_close(stats, row_stats(grad), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(grad.view(torch.uint8), kept.view(torch.uint8))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_statistics_see_one_bad_element_anywhere(kind, value):
    optimizer, dtype, _, stats = kind
    for place in (0, 777, ROWS * 64 - 1):
        for compute in (stats.of_shard, chunked_row_stats):
            grad = _tensors(optimizer, dtype)[0]
            grad[place] = value
            bad = ~torch.isfinite(compute(grad))
            assert bad[:, place // 64].all()
            assert bad.sum() == 2


def _choose(fails_on):
    """Return the update that is chosen if one rank's compiler fails, and that rank's log. No rank really compiles."""

    def try_out(*_):
        if dist.get_rank() == fails_on:
            raise RuntimeError("no g++ here\nand a long trace")

    with mock.patch.object(fused_update, "_try_out", try_out), mock.patch.object(fused_update, "log") as log:
        world = make_collectives(Topology.current().world, CPU)
        kernels = _choose_for(AdamW(lr=0.1), torch.float16, world)
    return type(kernels.update).__name__, [call.args[0] % call.args[1:] for call in log.warning.call_args_list]


def test_engines_with_many_different_constants_are_all_compiled(monkeypatch):
    # The limit is on the number of graphs of one code object, no matter who makes the kernels.
    traced = {"dynamic": True, "fullgraph": True, "backend": "eager"}
    monkeypatch.setattr(fused_update, "_compile", lambda function: torch.compile(function, **traced))
    monkeypatch.setattr(constants, "TRIAL", 64)
    for number in range(10):
        optimizer = NAG(lr=0.1, momentum=0.05 * number)
        assert isinstance(_choose_for(optimizer, torch.float16, ALONE).update, CompiledUpdate)


def _tried_dtypes():
    """Return the dtypes of gradient sums that the trial meets, with one layer divided and the other with two owners."""
    world = Topology.current().world
    topology = Topology.connect(tp=world.size)
    placements = {
        "0.weight": Placement((8, 8), (0, 0), topology.stage),
        "1.weight": Placement((16, 8), (8 * topology.tp.rank, 0), topology.dp),
    }
    tried = set()

    def try_out(*arguments):
        tried.add(arguments[-1].grad_sum.dtype)

    with mock.patch.object(fused_update, "_try_out", try_out):
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
        sharding = Sharding(topology=topology, placements=placements)
        make_engine(model, NAG(lr=0.1), Precision(reduce_dtype="half_fp32_sum"), sharding, compile_update=True)
    return tried


def test_every_dtype_that_a_step_sums_in_is_tried_before_the_first_one(run_ranks):
    assert run_ranks(_tried_dtypes, 2) == [{torch.bfloat16, torch.float32}] * 2


def test_one_rank_without_a_compiler_decides_for_all_and_the_log_says_why(run_ranks):
    (name0, (message0,)), (name1, (message1,)) = run_ranks(_choose, 2, 1)
    assert name0 == name1 == "LibraryUpdate"
    assert "another rank" in message0
    assert "RuntimeError: no g++ here): using torch's own kernels" in message1
