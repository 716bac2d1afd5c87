"""After its second update a run logs planned and measured memory, and warns if they differ by 10 % or more."""

import gc

import pytest
import torch

from megamix.builders.objects import build_engine, plan_pipeline
from megamix.comm.topology import Topology
from megamix.config import axis_sizes, grad_accum_steps
from megamix.model.transformer import Transformer
from megamix.parallel.build import build_model, undrawn
from megamix.tools.plan import memory_plan
from megamix.tools.plan.memory_plan import memory_line
from tests.tools.plan.test_memory_plan import SCALARS, _config, held_by
from tests.tools.verify.jobs import make_config


def _engine():
    model = Transformer(_config().model)
    return build_engine(_config(), model, [*model.blocks], 4)


@pytest.fixture
def others():
    """Return the bytes that other tests and libraries hold.

    They are kept alive: memory freed meanwhile would hide new memory.
    """
    gc.collect()
    kept = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]
    yield memory_plan._live_bytes()
    del kept


def test_what_an_engine_holds_is_what_was_planned(others):
    engine = _engine()
    gc.collect()
    held = memory_plan._live_bytes() - others
    assert held == pytest.approx(sum(memory_plan.held_memory(_config(), 1, 0, "cpu")[0].values()), abs=SCALARS)
    assert memory_line(_config(), engine).startswith("memory | held between steps: planned 10.78 MiB, measured ")


@pytest.mark.parametrize(("extra", "warns"), [(0.08, False), (-0.08, False), (0.12, True), (-0.12, True)])
def test_more_than_a_tenth_apart_is_a_warning(monkeypatch, extra, warns):
    planned = sum(memory_plan.held_memory(_config(), 1, 0, "cpu")[0].values())
    monkeypatch.setattr(memory_plan, "_live_bytes", lambda: int(planned * (1 + extra)))
    line = memory_line(_config(), _engine())
    assert f"({extra:+.1%})" in line
    assert ("WARNING" in line) == warns


def test_every_storage_counts_once_while_a_tensor_refers_to_it(others):
    tensor = torch.zeros(1 << 18)
    view = tensor[1:]
    assert memory_plan._live_bytes() - others == 1 << 20
    del tensor
    assert memory_plan._live_bytes() - others == 1 << 20
    del view
    assert memory_plan._live_bytes() - others == 0


def _held_on_a_mesh(config):
    """Return (planned, held) by this rank of a job."""
    section, stages = config.parallelism, plan_pipeline(config)
    topology = Topology.connect(**axis_sizes(section))
    model, placements = build_model(config.model, section, topology, torch.device("cpu"), stages)
    accumulation = grad_accum_steps(config, topology.dp.size)
    engine = build_engine(config, model, [*model.blocks], accumulation, topology, placements, undrawn)
    held = held_by(engine)
    planned, _ = memory_plan.held_memory(config, topology.dp.size, topology.world.rank, "cpu")
    return {name: planned[name] for name in held}, held


@pytest.mark.parametrize("layout", ["tp2pp2", "dp2tp2", "dp2pp2", "cp2pp2", "replicas2dp2"])
@pytest.mark.parametrize("reduce_dtype", ["half", "half_fp32_sum"])
def test_what_ranks_of_a_mesh_hold_is_planned_without_them(run_ranks, layout, reduce_dtype):
    config = make_config(layout, dtype="bf16", accumulation=4, sequence_parallel="tp" in layout)
    for planned, held in run_ranks(_held_on_a_mesh, 4, config.with_keys(precision={"reduce_dtype": reduce_dtype})):
        assert planned == held
