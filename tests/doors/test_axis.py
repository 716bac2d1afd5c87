"""An axis that a plugin adds reaches a job: its mesh, losses, checkpoints, `verify` and `plan`. Replicas over dp train
as one process that adds in the same order, bit for bit, and resume.
"""

import importlib
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megamix import Sharding
from megamix.axes import AXES, AxisKind
from megamix.checkpoint.load import load, newest_checkpoint
from megamix.checkpoint.manifest import RunRecord, read_manifest
from megamix.checkpoint.save import save
from megamix.checkpoint.snapshot import take_snapshot
from megamix.comm.collectives import GlooCollectives, Pending, make_collectives
from megamix.comm.topology import Topology
from megamix.config import ConfigError, check_world_size
from megamix.plugins import MORE_AXES, Section, register_axis
from megamix.run.run_folder import job_problems
from megamix.tools.plan.memory_plan import plan_memory
from megamix.tools.verify.core.layout import parse_layout
from megamix.tools.verify.layouts.judge_steps import judge
from megamix.tools.verify.layouts.observe import observe
from tests.builders import loss_of, make_batch, make_engine, make_model, tiny_job, write_data
from tests.checkpoint.state import all_or_none_of
from tests.tools.verify.jobs import make_config
from tests.train.outcome import metrics_of
from tests.train.recorded import run_recorded

STEPS = 4
ROWS = "tests.doors.rows_axis"


@pytest.fixture
def rows(doors, run_ranks):
    """Register the plugin's axis anew, and forget it after the test, on the ranks, too."""
    sys.modules.pop(ROWS, None)
    importlib.import_module(ROWS)
    yield
    del sys.modules[ROWS]
    run_ranks.close()


def _verified(layout, dtype, **more):
    """Return a verified job with the plugin's axis; micro-batches have as many sequences as its ranks."""
    config = make_config(layout, dtype=dtype, **more)
    table = sys.modules[ROWS].RowsConfig()
    config = config.model_copy(update={"plugins": (ROWS,)}).with_keys(parallelism={"rows": table})
    return parse_layout(layout).apply(config, 2)


def _observe_all(configs):
    return [observe(config, 2, 1) for config in configs]


@pytest.mark.uncounted
def test_verify_passes_an_axis_of_parts(rows, run_ranks):
    configs = [
        _verified("rows2tp2", "fp16", packing="documents"),
        _verified("dp2rows2", "bf16", name="muon", shard="gradients"),
        _verified("dp2rows2", "fp32", packing="documents"),
    ]
    for config, *ranks in zip(configs, *run_ranks(_observe_all, 4, configs), strict=True):
        verdict = judge(config, ranks, torch.device("cpu"), 2, 1)
        assert verdict.differences == []
        assert 0 < verdict.worst["gradient"] < 1


def _losses_that_count_in_whole(config):
    """As if the plugin had said that its ranks compute one loss together."""
    kind = AXES["rows"]
    AXES["rows"] = AxisKind("sharded")
    try:
        return observe(config, 1, None)
    finally:
        AXES["rows"] = kind


def test_losses_of_parts_that_count_once_are_found(rows, run_ranks):
    config = _verified("rows2", "fp32")
    verdict = judge(config, run_ranks(_losses_that_count_in_whole, 2, config), torch.device("cpu"), 1, None)
    assert verdict.differences[0].attempt == 0


def _job(folder, sizes, steps):
    return tiny_job(
        folder, plugins=[ROWS], parallelism=sizes, steps=steps, save_interval=4,
        log_interval=1, precision_interval=0,
    )  # fmt: skip


def test_a_job_with_the_axis_saves_resumes_elsewhere_and_is_planned(rows, run_ranks, tmp_path):
    write_data(tmp_path / "data")
    with_rows, on_dp = {"rows": {"size": 2}}, {"dp_size": 2}
    samples = []
    for sizes, steps in ((with_rows, 4), (on_dp, 8), (with_rows, 12)):
        job = _job(tmp_path, sizes, steps)
        assert check_world_size(job, 2) == []
        samples += run_ranks(run_recorded, 2, job)[0].samples()
        manifest = read_manifest(sorted((tmp_path / "run/checkpoints").glob("step_*"))[-1] / "manifest.json")
        assert manifest.layout.axes == {"pp": 1, "replicas": 1, "dp": 1, "rows": 1, "cp": 1, "tp": 1} | (
            {"rows": 2} if sizes is with_rows else {"dp": 2}
        )
    whole = tmp_path / "whole"
    write_data(whole / "data")
    assert samples == run_ranks(run_recorded, 2, _job(whole, with_rows, 12))[0].samples()
    steps_of = [[row["step"] for row in metrics_of(folder) if "train/loss" in row] for folder in (tmp_path, whole)]
    assert steps_of[0] == steps_of[1] == [*range(1, 13)]
    plan = plan_memory(_job(tmp_path, with_rows, 4), 1, "cpu")
    assert plan.axes["rows"] == 2
    assert plan.peak < plan_memory(_job(tmp_path, {}, 4), 1, "cpu").peak


def test_mistakes_with_axes_are_named(rows, tmp_path):
    with pytest.raises(ConfigError, match=r"parallelism\.rows\.size: got 0, must be greater than 0"):
        _job(tmp_path, {"rows": {"size": 0}}, 4)
    with pytest.raises(ConfigError, match=r"parallelism\.pp_size: got 2, .* a plugin.s axis leaves; write pp_size = 1"):
        _job(tmp_path, {"rows": {"size": 2}, "pp_size": 2}, 4)
    (problem,) = check_world_size(_job(tmp_path, {"rows": {"size": 2}}, 4), 3)
    assert problem.startswith("parallelism.rows.size: got 2, rows.size 2 must divide the number of ranks, which is 3;")

    rows = sys.modules[ROWS]
    rows_config = rows.RowsConfig

    def refuse(model, collectives, **settings):
        raise ValueError(f"parallelism.rows.size: got {collectives.axis.size}, and this model has no rows")

    with mock.patch.dict(MORE_AXES.registered, {"rows": refuse}):
        assert "parallelism.rows.size: got 2, and this model has no rows" in job_problems(
            _job(tmp_path, {"rows": {"size": 2}}, 4), 2
        )

    class Sizeless(Section):
        """No size."""

    for name, section, said in (
        ("tp", rows_config, "tp means something of megamix's own there"),
        ("dp_size", rows_config, "dp_size means something of megamix's own there"),
        ("rows", rows_config, "has registered one of that name"),
        ("span", Sizeless, "its section needs the key size"),
    ):
        with pytest.raises(ValueError, match=said):
            register_axis(name, section, print, AxisKind("sharded"))
    with pytest.raises(ValueError, match="reads=True and parts=True"):
        AxisKind("sharded", reads=True, parts=True)
    with pytest.raises(ValueError, match="there is no axis 'span'; there are pp, replicas, dp, rows, cp, tp"):
        Topology.place(0, dp=2).along("span")
    with pytest.raises(ValueError, match="there is no axis 'span'; .*: megamix.plugins.register_axis adds one"):
        Topology({"span": 2})


def _engine(topology=None, shard="states", **more):
    # Clipped, so that a share that is counted twice is seen.
    return make_engine(sharding=Sharding(topology=topology, bucket_size=1111, shard=shard), clip_grad=0.5, **more)


def _reference():
    """One process: the gradients of four ranks, added within groups of two and then across them."""
    engine, seen, norms = _engine(), [], []
    params = dict(engine.module.named_parameters())
    for step in range(STEPS):
        weights = {name: param.detach().clone() for name, param in params.items()}
        grads = []
        for rank in range(4):
            plain = make_model()
            plain.load_state_dict(weights, strict=False)
            loss_of(plain, make_batch(step, rank, 0)).backward()
            grads.append({name: param.grad for name, param in plain.named_parameters()})
        sums = {name: (grads[0][name] + grads[1][name]) + (grads[2][name] + grads[3][name]) for name in params}
        # A loss that has this gradient.
        engine.backward(sum((param * sums[name]).sum() for name, param in params.items()), weight=4)
        norms.append(float(engine.step().grad_norm))
        seen.append({name: param.detach().clone() for name, param in params.items()})
    return seen, norms


def _train(engine, steps):
    seen = []
    for step in steps:
        engine.backward(loss_of(engine.module, make_batch(step, engine.topology.data.rank, 0)))
        norm = float(engine.step().grad_norm)
        seen.append(({name: param.detach().clone() for name, param in engine.module.named_parameters()}, norm))
    return seen


def _replicas(folder, shard):
    """(sizes and places, weights and norms of each step, a resumed run ends alike, the replicas are bitwise equal)."""
    topology = Topology.connect(replicas=2)
    engine = _engine(topology, shard)
    seen = _train(engine, range(2))
    all_or_none = all_or_none_of(engine)
    save(folder / shard, take_snapshot(engine, RunRecord()), all_or_none)
    seen += _train(engine, range(2, STEPS))
    again = _engine(topology, shard)
    _train(again, range(7, 8))  # other weights
    checkpoint = newest_checkpoint(folder / shard, all_or_none)
    assert checkpoint is not None
    load(checkpoint, again, all_or_none)
    resumed = _train(again, range(2, STEPS))
    alike = all(torch.equal(seen[-1][0][name], weight) for name, weight in resumed[-1][0].items())
    masters = torch.cat([tensor for owned in engine.owned_ranges() for tensor in owned.tensors.values()])
    replicas = topology.replicas
    copies = make_collectives(replicas, engine.device).table(masters)
    places = [topology.world.size, topology.data.size, topology.owners.size, replicas.rank, topology.data.rank]
    return places, seen, alike, torch.equal(copies[0], copies[1])


@pytest.mark.parametrize("shard", ["states", "gradients"])
def test_replicas_over_dp_train_as_one_process_and_resume(run_ranks, tmp_path, shard):
    weights, norms = _reference()
    for rank, (places, seen, resumed_alike, copies_equal) in enumerate(run_ranks(_replicas, 4, tmp_path, shard)):
        assert places == [4, 4, 2, rank // 2, rank]
        assert copies_equal
        assert resumed_alike
        for step, (found, norm) in enumerate(seen):
            assert norm == norms[step]
            assert all(torch.equal(found[name], weight) for name, weight in weights[step].items()), step


@pytest.mark.uncounted
def test_verify_passes_replicas(run_ranks):
    configs = [
        make_config("replicas2dp2", dtype="fp16", shard="gradients"),
        make_config("replicas2dp2", dtype="bf16", name="muon", shard="parameters"),
        make_config("replicas2tp2", dtype="fp32").with_keys(parallelism={"accumulate": "owner"}),
        make_config("replicas2pp2", dtype="fp16"),
    ]
    for config, *ranks in zip(configs, *run_ranks(_observe_all, 4, configs), strict=True):
        verdict = judge(config, ranks, torch.device("cpu"), 2, 1)
        assert verdict.differences == []
        assert 0 < verdict.worst["gradient"] < 1


def _not_summed_across(config):
    with mock.patch.object(GlooCollectives, "all_reduce", lambda *_: Pending()):
        return observe(config, 1, None)


def test_replicas_that_are_not_summed_are_found(run_ranks):
    config = make_config("replicas2dp2", loss_scale=4.0)
    first = judge(config, run_ranks(_not_summed_across, 4, config), torch.device("cpu"), 1, None).differences[0]
    assert first.attempt == 0


class _Own(nn.Linear):
    """On each rank other weights, frozen and not, and another buffer."""

    def __init__(self):
        torch.manual_seed(dist.get_rank())
        super().__init__(3, 2)
        self.bias.requires_grad_(False)
        self.register_buffer("tally", torch.rand(2))


def _start_on_two_replicas():
    engine = make_engine(_Own(), sharding=Sharding(topology=Topology.connect(replicas=2)))
    return [tensor.clone() for tensor in engine.full_weights().values()]


def test_replicas_that_were_built_from_other_seeds_start_as_the_first(run_ranks):
    first, second = run_ranks(_start_on_two_replicas, 2)
    assert len(first) == 3
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
