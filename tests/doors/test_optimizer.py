"""Own optimizers, Lion and one with different states for different parameters, train bitwise as one process does,
compiled or not, hold exactly the bytes of their states, save, load in any layout, and continue bitwise.
"""

import importlib
import json
import sys
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch._dynamo.utils import counters

from megamix import AdamW, Precision, ShardedEngine, Sharding, tuned
from megamix.builders import objects
from megamix.checkpoint.actions import verify
from megamix.checkpoint.load import load, newest_checkpoint
from megamix.checkpoint.manifest import RunRecord, read_manifest
from megamix.checkpoint.save import save
from megamix.checkpoint.snapshot import take_snapshot
from megamix.cli import main
from megamix.comm.topology import Topology
from megamix.config import ParallelismConfig, config_to_toml
from megamix.mixed_precision import fused_update
from megamix.mixed_precision.optimizers import Optimizer
from megamix.mixed_precision.update_slice import UpdateScalars
from megamix.parallel.build import build_model, drawn
from megamix.plugins import OPTIMIZERS
from megamix.tools.plan import memory_plan
from megamix.tools.verify.layouts import judge_steps
from megamix.tools.verify.layouts.judge_steps import judge
from megamix.tools.verify.layouts.observe import observe
from megamix.train.job import run_job
from tests.builders import run_on_ranks, tiny_job, write_data
from tests.checkpoint.state import all_or_none_of
from tests.parallel.layouts import Case, Owned, assemble, states
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


def _optimizer(name):
    kind = importlib.import_module(PLUGIN).Lion if name == "lion" else ByKind
    optimizer = kind(lr=LR, weight_decay=DECAY)
    return optimizer


@pytest.fixture(scope="module", autouse=True)
def plugin():
    """Imported for these tests alone."""
    yield importlib.import_module(PLUGIN)
    del OPTIMIZERS.registered["lion"], OPTIMIZERS.sections["lion"], sys.modules[PLUGIN]


def _lion(grad, master, held, update):
    """The paper's lines, one after the other."""
    decay = DECAY if master.dim() > 1 else 0.0
    momentum = held.setdefault("momentum", torch.zeros_like(master))
    direction = torch.sign(momentum.lerp(grad, 1 - 0.9))
    master.sub_(torch.tensor(LR) * (direction + decay * master))
    momentum.lerp_(grad, 1 - 0.99)


def _by_kind(grad, master, held, update):
    """The same as ByKind, on whole parameters."""
    lr, is_matrix = torch.tensor(LR), master.dim() == 2
    decayed = master - lr * (DECAY if master.dim() > 1 else 0.0) * master
    if is_matrix:
        momentum = 0.75 * held.get("momentum", torch.zeros_like(master)) + grad
        held["momentum"] = momentum.bfloat16().float()  # rounded to nearest behind the step
        master.copy_(decayed - lr * momentum)
        return
    held["mean"] = 0.75 * held.get("mean", torch.zeros_like(master)) + grad
    held["square"] = 0.5 * held.get("square", torch.zeros_like(master)) + 0.5 * grad.square()
    debias = (1 - 0.5 ** torch.tensor(float(update), dtype=torch.float64)).rsqrt().float()
    master.copy_(decayed - lr * (held["mean"] / (held["square"].sqrt() * debias + 2.0**-10)))


PLAIN = {"lion": _lion, "by kind": _by_kind}


def _build(name, tp_size=1, grad_accum_steps=1, compiled=False):
    topology = Topology.connect(tp=tp_size)
    model, placements = build_model(CASE.config(), ParallelismConfig(), topology, torch.device("cpu"))
    sharding = Sharding([*model.blocks], topology, 3000, placements=placements)
    return ShardedEngine(
        model, _optimizer(name), Precision(torch.float32), sharding, grad_accum_steps=grad_accum_steps,
        compile_update=compiled, fill=drawn(model, 0),
    )  # fmt: skip


def _step(engine, step):
    for micro_batch in range(engine.grad_accum_steps):
        number = engine.topology.dp.rank * engine.grad_accum_steps + micro_batch
        tokens = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(100 * step + number))
        engine.backward(engine(tokens[:, :-1], tokens[:, 1:]))
    engine.step()


def _train(name, tp_size=1, grad_accum_steps=1):
    """(What the rank owns: masters and states before the first step and after the last; the sums of gradients of each
    step.)
    """
    engine = _build(name, tp_size, grad_accum_steps)
    ends, gradients = [states(engine)], []
    for step in range(STEPS):
        _step(engine, step)
        gradients.append([
            Owned(piece.spec, piece.first, bucket.grad_sum[piece.elements].clone())
            for bucket in engine.buckets for piece in bucket.pieces if piece.numel
        ])  # fmt: skip
    return [*ends, states(engine)], gradients


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


@pytest.mark.parametrize("name", ["lion", "by kind"])
def test_it_trains_on_two_ranks_and_on_tp2_bitwise_as_one_process_does(run_ranks, name):
    (_, alone), _ = _train(name, grad_accum_steps=2)
    ranks = run_ranks(_train, 2, name)
    assert _equal(_whole([end for (_, end), _ in ranks]), _whole([alone]))
    # Divided products are added in another order: there, one process takes the gradients that the ranks had.
    ranks = run_ranks(_train, 2, name, 2)
    masters = _whole([start for (start, _), _ in ranks])["master"]
    held = {parameter: {} for parameter in masters}
    for step in range(STEPS):
        gradients, _ = assemble([gradients[step] for _, gradients in ranks])
        for parameter, master in masters.items():
            PLAIN[name](gradients[parameter], master, held[parameter], step + 1)
    want = {"master": masters}
    for parameter, states_held in held.items():
        for state, tensor in states_held.items():
            want.setdefault(state, {})[parameter] = tensor
    assert _equal(_whole([end for (_, end), _ in ranks]), want)


def _bytes_of_states(engine):
    return sum(
        tensor.nbytes for owned in engine.owned_ranges() for kind, tensor in owned.tensors.items() if kind != "master"
    )


def _held_bytes(engine):
    """With the padding."""
    spans = (states for bucket in engine.buckets for states in bucket.states)
    return sum(state.nbytes for states in spans for state in states.values())


def _saved_and_went_on(folder, name, tp_size):
    """(bytes of states without padding, with it; what the rank owns one step after the save)."""
    engine = _build(name, tp_size)
    for step in range(STEPS):
        _step(engine, step)
    save(folder, take_snapshot(engine, RunRecord()), all_or_none_of(engine))
    sizes = _bytes_of_states(engine), _held_bytes(engine)
    _step(engine, STEPS)
    return *sizes, states(engine)


def _loaded_and_went_on(folder, name, tp_size):
    engine = _build(name, tp_size)
    _step(engine, 7)  # something else, to be overwritten
    checkpoint = newest_checkpoint(folder, all_or_none_of(engine))
    assert checkpoint is not None
    load(checkpoint, engine, all_or_none_of(engine))
    loaded = states(engine)
    _step(engine, STEPS)
    return loaded, states(engine)


@pytest.mark.parametrize("name", ["lion", "by kind"])
def test_it_holds_its_own_bytes_saves_them_loads_in_any_layout_and_goes_on_bitwise(run_ranks, tmp_path, name):
    ranks = run_ranks(_saved_and_went_on, 2, tmp_path, name, 1)
    (path,) = tmp_path.iterdir()
    manifest = read_manifest(path / "manifest.json")
    by_kind = {True: "BF16", False: "F32"}
    for param in manifest.params:
        want = {"momentum": "F32"} if name == "lion" else {"momentum": "BF16"}
        if name == "by kind" and len(param.shape) == 1:
            want = {"mean": "F32", "square": "F32"}
        assert manifest.states[param.state_set] == {"master": "F32"} | want, by_kind
    matrices = sum(torch.Size(param.shape).numel() for param in manifest.params if len(param.shape) == 2)
    others = sum(torch.Size(param.shape).numel() for param in manifest.params if len(param.shape) == 1)
    want_bytes = 4 * (matrices + others) if name == "lion" else 2 * matrices + 8 * others
    assert sum(held for held, _, _ in ranks) == want_bytes
    assert sum(padded for _, padded, _ in ranks) < 1.1 * want_bytes  # rows of 64, buckets of 128
    (line,) = verify(path)
    assert ("each with master, momentum (BF16)" in line) == (name == "by kind")

    went_on = _whole([after for _, _, after in ranks])
    again = run_ranks(_loaded_and_went_on, 2, tmp_path, name, 1)
    assert _equal(_whole([after for _, after in again]), went_on)
    (alone, _), divided = _loaded_and_went_on(tmp_path, name, 1), run_ranks(_loaded_and_went_on, 2, tmp_path, name, 2)
    assert _equal(_whole([loaded for loaded, _ in divided]), _whole([alone]))
    assert _equal(_whole([loaded for loaded, _ in again]), _whole([alone]))


def _observed(config, name):
    """What `verify` sees of a rank; bytes of states that the rank holds, and those that are planned for it."""
    held = []

    def built(config):
        return replace(_optimizer(name), lr=objects.lr_table(config))

    def note(engine):
        held.append(_held_bytes(engine))
        return owned_ranges(engine)

    owned_ranges = ShardedEngine.owned_ranges
    with (
        mock.patch.object(objects, "build_optimizer", built),
        mock.patch.object(memory_plan, "build_optimizer", built),
        mock.patch.object(ShardedEngine, "owned_ranges", note),
    ):
        steps = observe(config, 2, 1)
        rank = torch.distributed.get_rank()
        planned, _ = memory_plan.held_memory(config, config.parallelism.dp_size or 1, rank, "cpu")
        most = memory_plan.plan_rank(config, config.parallelism.dp_size or 1, 0, "cpu").held["optimizer states"]
    assert planned["optimizer states"] == held[0]
    return steps, held[0], most


@pytest.mark.parametrize("name", ["lion", "by kind"])
@pytest.mark.parametrize("layout", ["dp2", "tp2"])
def test_verify_passes_and_plan_counts_its_bytes(run_ranks, monkeypatch, name, layout):
    config = make_config(layout, dtype="bf16")
    ranks = run_ranks(_observed, 2, config, name)
    monkeypatch.setattr(judge_steps, "build_optimizer", lambda config: _optimizer(name))
    verdict = judge(config, [steps for steps, _, _ in ranks], torch.device("cpu"), 2, 1)
    assert verdict.differences == []
    assert (verdict.attempts, verdict.skipped) == (3, 1)
    assert all(held <= most < 1.3 * max(held for _, held, _ in ranks) for _, held, most in ranks)


def test_other_states_are_refused_by_name(tmp_path):
    engine = _build("by kind")
    save(tmp_path, take_snapshot(engine, RunRecord()), all_or_none_of(engine))
    own = engine.state_dict()
    with mock.patch(f"{__name__}._optimizer", lambda name: AdamW(lr=LR)):
        other = _build("adamw")
    checkpoint = newest_checkpoint(tmp_path, all_or_none_of(other))
    assert checkpoint is not None
    told = r"of embedding.weight and \d+ more it holds master, momentum \(BF16\), the optimizer needs master, exp_avg"
    with pytest.raises(ValueError, match=told):
        load(checkpoint, other, all_or_none_of(other))
    with pytest.raises(ValueError, match="optimizer and its groups"):
        other.load_state_dict(own)


@dataclass(frozen=True, kw_only=True)
class _Wrong(Optimizer):
    state: str
    dtype: torch.dtype

    def states(self, name, shape):
        return {self.state: self.dtype}


@pytest.mark.parametrize(
    ("state", "dtype"),
    [(name, torch.float32) for name in ("master", "buffer", "gradient", "step", "a b")] + [("sum", torch.float64)],
)
def test_a_state_that_cannot_be_is_refused_with_the_parameter(state, dtype):
    with pytest.raises(ValueError, match=rf"_Wrong.states of weight has '{state}': {dtype}; a state has a Python name"):
        ShardedEngine(torch.nn.Linear(2, 2), _Wrong(lr=0.1, state=state, dtype=dtype))


def test_the_compiled_path_has_one_graph_for_each_set_of_states_and_the_same_result(monkeypatch):
    # Traced as for a compiler, whose own work would cost seconds and prove no more.
    traced = {"dynamic": True, "fullgraph": True, "backend": "eager"}
    monkeypatch.setattr(fused_update, "_compile", lambda function: torch.compile(function, **traced))
    monkeypatch.setattr(tuned, "TRIAL", 256)
    torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    library, engine = _build("by kind"), _build("by kind", compiled=True)
    assert engine.update_path == "compiled"
    for step in range(2):
        _step(library, step)
        _step(engine, step)
    assert counters["stats"]["unique_graphs"] - before == 3  # two sets of states, and the statistics
    assert sum(len(bucket.spans) for bucket in engine.buckets) > 3
    assert _equal(_whole([states(library)]), _whole([states(engine)]))


def _job(folder, run, steps=4, beta=0.95):
    return tiny_job(
        folder,
        plugins=[PLUGIN],
        num_layers=1,
        optimizer={"name": "lion", "lr": 1e-3, "lion": {"betas": [0.9, beta]}},
        dtype="fp32",
        steps=steps,
        eval_interval=0,
        decay_style="constant",
        checkpoint={"folder": str(folder / run), "save_interval": 2},
    )


def test_a_job_by_its_name_has_its_keys_is_planned_goes_on_bitwise_and_is_exported(run_ranks, tmp_path, capsys):
    write_data(tmp_path / "data")
    path = tmp_path / "job.toml"
    path.write_text(config_to_toml(_job(tmp_path, "whole")))
    assert "[optimizer.lion]" in path.read_text()
    assert main(["plan", str(path), "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["held"]
    assert planned["optimizer states"] == planned["FP32 masters"]
    run_ranks(run_on_ranks, 2, _job(tmp_path, "whole"))
    run_ranks(run_on_ranks, 2, _job(tmp_path, "halves", steps=2))
    run_ranks(run_on_ranks, 2, _job(tmp_path, "halves"))
    one, other = (load_file(tmp_path / run / "weights.safetensors") for run in ("whole", "halves"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    run_job(_job(tmp_path, "other", beta=0.5))
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
