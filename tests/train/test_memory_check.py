"""A run says after its second update whether the memory it takes is the memory that was planned."""

import gc

import pytest
import torch

from megamix.comm.topology import Topology
from megamix.mixed_precision.engine import ShardedEngine
from megamix.model.transformer import Transformer
from megamix.train import memory_check
from megamix.train.build import build_engine
from megamix.train.memory_check import memory_line
from tests.train.test_memory_plan import SCALARS, _config


def _engine() -> ShardedEngine:
    model = Transformer(_config().model)
    return build_engine(_config(), model, [*model.blocks], 4)


def test_what_an_engine_holds_is_what_was_planned() -> None:
    gc.collect()
    others = memory_check._live_bytes()
    engine = _engine()
    gc.collect()
    held = memory_check._live_bytes() - others
    assert held == pytest.approx(sum(memory_check.held_memory(_config(), Topology(), "cpu")[0].values()), abs=SCALARS)
    assert memory_line(_config(), engine).startswith("memory | held between steps: planned 10.78 MiB, measured ")


@pytest.mark.parametrize(("extra", "warns"), [(0.08, False), (-0.08, False), (0.12, True), (-0.12, True)])
def test_more_than_a_tenth_apart_is_a_warning(monkeypatch: pytest.MonkeyPatch, extra: float, warns: bool) -> None:
    planned = sum(memory_check.held_memory(_config(), Topology(), "cpu")[0].values())
    monkeypatch.setattr(memory_check, "_live_bytes", lambda: int(planned * (1 + extra)))
    line = memory_line(_config(), _engine())
    assert f"({extra:+.1%})" in line
    assert ("WARNING" in line) == warns


def test_every_storage_counts_once_while_a_tensor_refers_to_it() -> None:
    before = memory_check._live_bytes()
    tensor = torch.zeros(1 << 18)
    view = tensor[1:]
    assert memory_check._live_bytes() - before == 1 << 20
    del tensor
    assert memory_check._live_bytes() - before == 1 << 20
    del view
    assert memory_check._live_bytes() - before == 0
