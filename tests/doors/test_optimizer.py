"""Own optimizers, Lion and one with different states for different parameters, train as `verify` computes, compiled or
not, hold exactly the bytes of their states, save, load in any layout, and continue bitwise.
"""

import importlib
import json
import math
import sys
from dataclasses import dataclass, replace
from functools import partial
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch._dynamo.utils import counters

from megamix import AdamW, ShardedEngine, Sharding
from megamix.base import constants
from megamix.checkpoint.actions import verify
from megamix.checkpoint.load import load, newest_checkpoint
from megamix.checkpoint.manifest import RunRecord, read_manifest
from megamix.checkpoint.save import save
from megamix.checkpoint.snapshot import take_snapshot
from megamix.cli.verbs import main
from megamix.comm.topology import Topology
from megamix.config import ParallelismConfig, resized
from megamix.mixed_precision import fused_update
from megamix.mixed_precision.optim.optimizer import Optimizer
from megamix.mixed_precision.update_slice import UpdateScalars
from megamix.parallel.build import build_model, drawn
from megamix.plugins import OPTIMIZERS
from megamix.tools.plan import memory_plan
from megamix.tools.verify.layouts import judge_steps
from megamix.tools.verify.layouts.observe import observe
from megamix.train import engine as train_engine
from tests.builders import lrs_of, make_engine, run_on_ranks, tiny_job
from tests.checkpoint.state import all_or_none_of
from tests.parallel.layouts import Case, assemble, states
from tests.tools.verify.jobs import make_config

STEPS, LR, DECAY = 3, 2.0**-6, 0.125
PLUGIN = "tests.doors.optimizer_plugin"
CASE = Case(model="llama", tied=False)


@dataclass(frozen=True, kw_only=True)
class ByKind(Optimizer):
    """Matrices have one momentum in BF16, all else two states in FP32, one of which is FP32 for nobody else."""

    def states(self, name, shape):
        if len(shape) == 2:
            return {"momentum": torch.bfloat16}
        return {"mean": torch.float32, "square": torch.float32}

    def coefficients(self, update, values):
        return ((1 - 0.5**update).rsqrt().float(),)

    def equation(self, grad, master, states, at):
        master = master - at.lr * at.weight_decay * master
        if "momentum" in states:
            momentum = 0.75 * states["momentum"] + grad
            return master - at.lr * momentum, {"momentum": momentum}
        mean, square = 0.75 * states["mean"] + grad, 0.5 * states["square"] + 0.5 * grad.square()
        step = mean / (square.sqrt() * at.coefficients[0] + 2.0**-10)
        return master - at.lr * step, {"mean": mean, "square": square}


OPTIMIZER = ByKind(lr=LR, weight_decay=DECAY)


@pytest.fixture(scope="module", autouse=True)
def plugin():
    """Imported for these tests alone."""
    yield importlib.import_module(PLUGIN)
    del OPTIMIZERS.registered["lion"], OPTIMIZERS.sections["lion"], sys.modules[PLUGIN]


def _build(tp_size=1, optimizer=OPTIMIZER, compiled=False):
    topology = Topology.connect(tp=tp_size)
    section = ParallelismConfig(**resized(ParallelismConfig(), tp=tp_size))
    model, placements = build_model(CASE.config(), section, topology, torch.device("cpu"))
    sharding = Sharding([*model.blocks], topology, 3000, placements=placements)
    return make_engine(model, optimizer, sharding=sharding, compile_update=compiled, fill=drawn(model, 0))


def _step(engine, step):
    generator = torch.Generator().manual_seed(100 * step + engine.topology.dp.rank)
    tokens = torch.randint(64, (2, 17), generator=generator)
    engine.backward(engine(tokens[:, :-1], tokens[:, 1:]))
    engine.step()


def _whole(ranks):
    kinds = dict.fromkeys(kind for rank in ranks for kind in rank)
    found = {kind: assemble([rank.get(kind, []) for rank in ranks]) for kind in kinds}
    assert not any(shared for _, shared in found.values())
    return {kind: tensors for kind, (tensors, _) in found.items()}


def _equal(some, others):
    return some.keys() == others.keys() and all(
        some[kind].keys() == others[kind].keys()
        and all(torch.equal(tensor, others[kind][name]) for name, tensor in some[kind].items())
        for kind in some
    )


def _held_bytes(engine):
    """With the padding."""
    spans = (states for bucket in engine.buckets for states in bucket.states)
    return sum(state.nbytes for states in spans for state in states.values())


def _saved_and_went_on(folder):
    """(bytes of states without padding, with it; what the rank owns one step after the save)."""
    engine = _build()
    for step in range(STEPS):
        _step(engine, step)
    save(folder, take_snapshot(engine, RunRecord()), all_or_none_of(engine))
    owned = [tensors for held in engine.owned_ranges() for tensors in held.tensors.items()]
    held = sum(tensor.nbytes for kind, tensor in owned if kind != "master"), _held_bytes(engine)
    _step(engine, STEPS)
    return *held, states(engine)


def _loaded_and_went_on(folder, tp_size):
    engine = _build(tp_size)
    _step(engine, 7)  # something else, to be overwritten
    load(newest_checkpoint(folder, all_or_none_of(engine)), engine, all_or_none_of(engine))
    loaded = states(engine)
    _step(engine, STEPS)
    return loaded, states(engine)


def test_it_holds_its_own_bytes_saves_them_loads_in_any_layout_and_goes_on_bitwise(run_ranks, tmp_path):
    held, padded, after = zip(*run_ranks(_saved_and_went_on, 2, tmp_path), strict=True)
    (path,) = tmp_path.iterdir()
    manifest, sizes = read_manifest(path / "manifest.json"), {1: 0, 2: 0}
    for param in manifest.params:
        sizes[len(param.shape)] += math.prod(param.shape)
        want = {"mean": "F32", "square": "F32"} if len(param.shape) == 1 else {"momentum": "BF16"}
        assert manifest.states[param.state_set] == {"master": "F32"} | want
    assert sum(held) == 2 * sizes[2] + 8 * sizes[1]
    assert sum(padded) < 1.1 * sum(held)  # rows of 64, buckets of 128
    (line,) = verify(path, lambda manifest: None)
    assert "each with master, momentum (BF16)" in line

    again, again_after = zip(*run_ranks(_loaded_and_went_on, 2, tmp_path, 1), strict=True)
    assert _equal(_whole(again_after), _whole(after))
    alone, _ = _loaded_and_went_on(tmp_path, 1)
    divided = [loaded for loaded, _ in run_ranks(_loaded_and_went_on, 2, tmp_path, 2)]
    assert _equal(_whole(divided), _whole([alone]))
    assert _equal(_whole(again), _whole([alone]))


def _observed(config):
    """What `verify` sees of a rank; bytes of states that the rank holds, and those that are planned for it."""
    held, owned_ranges = [], ShardedEngine.owned_ranges

    def built(_):
        return replace(OPTIMIZER, lr=lrs_of(config))

    def note(engine):
        held.append(_held_bytes(engine))
        return owned_ranges(engine)

    with (
        mock.patch.object(train_engine, "build_optimizer", built),
        mock.patch.object(memory_plan, "build_optimizer", built),
        mock.patch.object(ShardedEngine, "owned_ranges", note),
    ):
        steps, dp_size = observe(config, 2, 1), config.parallelism.dp_size or 1
        planned, _ = memory_plan.held_memory(config, dp_size, torch.distributed.get_rank(), "cpu")
        most = memory_plan.plan_rank(config, dp_size, 0, "cpu").held["optimizer states"]
    assert planned["optimizer states"] == held[0]
    return steps, held[0], most


@pytest.mark.parametrize("layout", ["dp2", "tp2"])
def test_verify_passes_and_plan_counts_its_bytes(run_ranks, monkeypatch, layout):
    config = make_config(layout, dtype="bf16")
    ranks, held, most = zip(*run_ranks(_observed, 2, config), strict=True)
    monkeypatch.setattr(judge_steps, "build_optimizer", lambda _: OPTIMIZER)
    verdict = judge_steps.judge(config, ranks, torch.device("cpu"), 2, 1)
    assert verdict.differences == []
    assert (verdict.attempts, verdict.skipped) == (3, 1)
    assert max(held) <= most[0] == most[1] < 1.3 * max(held)


def test_other_states_are_refused_by_name(tmp_path):
    engine, other = _build(), _build(optimizer=AdamW(lr=LR))
    save(tmp_path, take_snapshot(engine, RunRecord()), all_or_none_of(engine))
    told = r"of embedding.weight and \d+ more it holds master, momentum \(BF16\), the optimizer needs master, exp_avg"
    with pytest.raises(ValueError, match=told):
        load(newest_checkpoint(tmp_path, all_or_none_of(other)), other, all_or_none_of(other))
    with pytest.raises(ValueError, match="optimizer and its groups"):
        other.load_state_dict(engine.state_dict())


@dataclass(frozen=True, kw_only=True)
class _Wrong(Optimizer):
    state: str
    dtype: torch.dtype

    def states(self, name, shape):
        return {self.state: self.dtype}


@pytest.mark.parametrize(
    ("state", "dtype"), [("master", torch.float32), ("a b", torch.float32), ("sum", torch.float64)]
)
def test_a_state_that_cannot_be_is_refused_with_the_parameter(state, dtype):
    with pytest.raises(ValueError, match=rf"_Wrong.states of weight has '{state}': {dtype}; a state has a Python name"):
        ShardedEngine(torch.nn.Linear(2, 2), _Wrong(lr=0.1, state=state, dtype=dtype))


def test_the_compiled_path_has_one_graph_for_each_set_of_states_and_the_same_result(monkeypatch):
    # Traced as for a compiler, whose own work would cost seconds and prove no more.
    traced = {"dynamic": True, "fullgraph": True, "backend": "eager"}
    monkeypatch.setattr(fused_update, "_compile", lambda function: torch.compile(function, **traced))
    monkeypatch.setattr(constants, "TRIAL", 256)
    torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    library, engine = _build(), _build(compiled=True)
    assert engine.update_path == "compiled"
    for step in range(2):
        _step(library, step)
        _step(engine, step)
    assert counters["stats"]["unique_graphs"] - before == 3  # two sets of states, and the statistics
    assert sum(len(bucket.spans) for bucket in engine.buckets) > 3
    assert _equal(_whole([states(library)]), _whole([states(engine)]))


def _job(folder, data, run, steps=4, beta=0.95):
    return tiny_job(
        folder,
        tokens=data,
        plugins=[PLUGIN],
        num_layers=1,
        optimizer={"name": "lion", "lr": 1e-3, "lion": {"betas": [0.9, beta]}},
        dtype="fp32",
        training={"steps": steps, "eval_interval": 0},
        decay_style="constant",
        checkpoint={"folder": str(folder / run), "save_interval": 2},
    )


def test_a_job_by_its_name_has_its_keys_is_planned_goes_on_bitwise_and_is_exported(run_ranks, data, tmp_path, capsys):
    job = partial(_job, tmp_path, data)
    path = tmp_path / "job.toml"
    path.write_text(job("whole").text)
    assert "[optimizer.lion]" in path.read_text()
    assert main(["plan", str(path), "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["held"]
    assert planned["optimizer states"] == planned["FP32 masters"]
    for one in (job("whole"), job("halves", steps=2), job("halves")):
        run_ranks(run_on_ranks, 2, one)
    one, other = (load_file(tmp_path / run / "weights.safetensors") for run in ("whole", "halves"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    run_on_ranks(job("other", beta=0.5))
    other = load_file(tmp_path / "other" / "weights.safetensors")
    assert not all(torch.equal(one[name], other[name]) for name in one)
    capsys.readouterr()
    assert main(["checkpoint", "verify", str(tmp_path / "halves")]) == 0
    assert "each with master, momentum" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "whole"), "--to", "hf", str(tmp_path / "hf"), "--plugins", PLUGIN]) == 0
    exported = load_file(tmp_path / "hf/model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(exported, one["embedding.weight"])


def test_a_function_that_is_lacking_is_named():
    lacking = Optimizer(lr=LR)
    with pytest.raises(NotImplementedError, match=r"Optimizer lacks states\(name, shape\); return \{\} where"):
        lacking.group_of("a", (2,))
    with pytest.raises(NotImplementedError, match=r"Optimizer lacks equation"):
        lacking.equation(torch.ones(1), torch.ones(1), {}, UpdateScalars(torch.ones(()), 0.0, ()))
