"""An axis that a plugin adds reaches a job: its mesh, losses, checkpoints, `verify` and `plan`. `verify` passes
replicas over dp, which start alike and resume.
"""

import importlib
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megamix import Sharding
from megamix.base.axes import AXES, AxisKind
from megamix.checkpoint.load import load, newest_checkpoint
from megamix.checkpoint.manifest import RunRecord, read_manifest
from megamix.checkpoint.save import save
from megamix.checkpoint.snapshot import take_snapshot
from megamix.comm.collectives import GlooCollectives, Pending
from megamix.comm.topology import Topology
from megamix.config import ConfigError, check_world_size
from megamix.plugins import MORE_AXES, Section, register_axis
from megamix.tools.plan.memory_plan import plan_memory
from megamix.tools.verify.core.layout import parse_layout
from megamix.tools.verify.layouts.judge_steps import judge
from megamix.tools.verify.layouts.observe import observe
from megamix.train.check import job_problems
from tests.builders import make_engine, tiny_job
from tests.checkpoint.state import all_or_none_of
from tests.tools.verify.jobs import make_config
from tests.train.outcome import metrics_of
from tests.train.recorded import run_recorded

ROWS = "tests.doors.rows_axis"


@pytest.fixture
def rows(doors):
    """Register the plugin's axis anew, and forget it after the test."""
    sys.modules.pop(ROWS, None)
    importlib.import_module(ROWS)
    yield
    del sys.modules[ROWS]


def _forget():
    for known in (AXES, MORE_AXES.sections, MORE_AXES.registered):
        known.pop("rows", None)
    sys.modules.pop(ROWS, None)


@pytest.fixture
def rows_on_ranks(rows, run_ranks):
    """`run_ranks`, whose ranks forget the axis, too."""
    yield run_ranks
    for size in (2, 4):
        run_ranks(_forget, size)


def _verified(layout, dtype, **more):
    """Return a verified job with the plugin's axis; micro-batches have as many sequences as its ranks."""
    config = make_config(layout, dtype=dtype, **more)
    table = sys.modules[ROWS].RowsConfig()
    config = config.model_copy(update={"plugins": (ROWS,)}).with_keys(parallelism={"rows": table})
    return parse_layout(layout).apply(config, 2)


def _observe_all(configs):
    return [observe(config, 2, 1) for config in configs]


def _assert_passes(run_ranks, configs):
    for config, *ranks in zip(configs, *run_ranks(_observe_all, 4, configs), strict=True):
        verdict = judge(config, ranks, torch.device("cpu"), 2, 1)
        assert verdict.differences == []
        assert 0 < verdict.worst["gradient"] < 1


def test_verify_passes_an_axis_of_parts(rows_on_ranks):
    configs = [
        _verified("rows2tp2", "fp16", packing="documents"),
        _verified("dp2rows2", "bf16", name="muon", shard="gradients"),
        _verified("dp2rows2", "fp32", packing="documents"),
    ]
    _assert_passes(rows_on_ranks, configs)


def _losses_that_count_in_whole(config):
    """As if the plugin had said that its ranks compute one loss together."""
    with mock.patch.dict(AXES, {"rows": AxisKind("sharded")}):
        return observe(config, 1, None)


def test_losses_of_parts_that_count_once_are_found(rows_on_ranks):
    config = _verified("rows2", "fp32")
    verdict = judge(config, rows_on_ranks(_losses_that_count_in_whole, 2, config), torch.device("cpu"), 1, None)
    assert verdict.differences[0].attempt == 0


def _job(folder, data=None, steps=2, **parallelism):
    more = {"save_interval": 2, "log_interval": 1, "precision_interval": 0}
    return tiny_job(folder, tokens=data, plugins=[ROWS], parallelism=parallelism, steps=steps, **more)


WITH_ROWS = {"rows": {"size": 2}}


def test_a_job_with_the_axis_saves_resumes_elsewhere_and_is_planned(rows_on_ranks, data, tmp_path):
    samples = []
    for parallelism, steps in ((WITH_ROWS, 2), ({"dp_size": 2}, 4), (WITH_ROWS, 6)):
        job = _job(tmp_path, data, steps, **parallelism)
        assert check_world_size(job, 2) == []
        samples += rows_on_ranks(run_recorded, 2, job)[0].samples()
        manifest = read_manifest(sorted((tmp_path / "run/checkpoints").glob("step_*"))[-1] / "manifest.json")
        assert manifest.layout.axes == dict.fromkeys(("pp", "replicas", "dp", "rows", "cp", "tp"), 1) | (
            {"rows": 2} if parallelism is WITH_ROWS else {"dp": 2}
        )
    whole = tmp_path / "whole"
    assert samples == rows_on_ranks(run_recorded, 2, _job(whole, data, 6, **WITH_ROWS))[0].samples()
    for folder in (tmp_path, whole):
        assert [row["step"] for row in metrics_of(folder) if "train/loss" in row] == [*range(1, 7)]
    plan = plan_memory(_job(tmp_path, **WITH_ROWS), 1, "cpu")
    assert plan.axes["rows"] == 2
    assert plan.peak < plan_memory(_job(tmp_path), 1, "cpu").peak


def test_mistakes_with_axes_are_named(rows, tmp_path):
    with pytest.raises(ConfigError, match=r"parallelism\.rows\.size: got 0, must be greater than 0"):
        _job(tmp_path, rows={"size": 0})
    with pytest.raises(
        ConfigError, match=r"pipeline\.size: got 2, .* a plugin.s axis leaves; write parallelism.pipeline = f"
    ):
        _job(tmp_path, **WITH_ROWS, pipeline={"size": 2})
    job, rows_config = _job(tmp_path, **WITH_ROWS), sys.modules[ROWS].RowsConfig
    (problem,) = check_world_size(job, 3)
    assert problem.startswith("parallelism.rows.size: got 2, rows.size 2 must divide the number of ranks, which is 3;")
    refuse = mock.Mock(side_effect=ValueError("this model has no rows"))
    with mock.patch.dict(MORE_AXES.registered, {"rows": refuse}):
        assert "this model has no rows" in job_problems(job, 2)

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


def test_verify_passes_replicas(run_ranks):
    configs = [
        make_config("replicas2dp2", dtype="fp16", shard="gradients"),
        make_config("replicas2dp2", dtype="bf16", name="muon", shard="parameters"),
        make_config("replicas2tp2", dtype="fp32").with_keys(parallelism={"accumulate": "owner"}),
        make_config("replicas2pp2", dtype="fp16"),
    ]
    _assert_passes(run_ranks, configs)


def _not_summed_across(config):
    with mock.patch.object(GlooCollectives, "all_reduce", lambda *_: Pending()):
        return observe(config, 1, None)


def test_replicas_that_are_not_summed_are_found(run_ranks):
    config = make_config("replicas2dp2", loss_scale=4.0)
    verdict = judge(config, run_ranks(_not_summed_across, 4, config), torch.device("cpu"), 1, None)
    assert verdict.differences[0].attempt == 0


class _Own(nn.Linear):
    """On each rank other weights, frozen and not, and another buffer."""

    def __init__(self):
        torch.manual_seed(dist.get_rank())
        super().__init__(3, 2)
        self.bias.requires_grad_(False)
        self.register_buffer("tally", torch.rand(2))


def _on_replicas(folder):
    """(What the first and the second replica start with, and end with after a save and a load.)"""
    topology = Topology.connect(replicas=2)
    engine, again = (make_engine(_Own(), sharding=Sharding(topology=topology)) for _ in range(2))
    begun = [tensor.clone() for tensor in engine.full_weights().values()]
    all_or_none = all_or_none_of(engine)
    for number in range(2):
        engine.backward(engine(torch.full((1, 3), 1.0 + topology.data.rank + number)).sum())
        engine.step()
    save(folder, take_snapshot(engine, RunRecord()), all_or_none)
    load(newest_checkpoint(folder, all_or_none), again, all_or_none)
    return begun, [*engine.full_weights().values()], [*again.full_weights().values()]


def test_replicas_that_were_built_from_other_seeds_start_as_the_first_stay_alike_and_resume(run_ranks, tmp_path):
    first, second = run_ranks(_on_replicas, 2, tmp_path)
    assert [len(tensors) for tensors in first] == [3, 3, 3]
    begun, ended, resumed = first
    assert not torch.equal(begun[0], ended[0])
    for some, others in [*zip(first, second, strict=True), (ended, resumed)]:
        assert all(torch.equal(one, other) for one, other in zip(some, others, strict=True))
