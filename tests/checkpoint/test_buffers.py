"""Persistent buffers of a module are saved once and loaded on every rank, in their own dtypes, on any layout; a buffer
that a checkpoint lacks keeps its value.
"""

import pytest
import torch
from torch import nn

from megamix import AdamW
from megamix.checkpoint.load import load, newest_checkpoint
from megamix.checkpoint.manifest import RunRecord
from megamix.checkpoint.save import save
from megamix.checkpoint.snapshot import HostCopy, take_snapshot
from tests.builders import BF16, make_engine
from tests.checkpoint.state import all_or_none_of


class Counting(nn.Module):
    """A layer that counts: in FP32, in whole numbers, by row, and what nobody saves."""

    def __init__(self, tallies=True):
        super().__init__()
        self.inner = nn.Linear(5, 3)
        if tallies:
            self.register_buffer("tally", torch.zeros(7))
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
            self.register_buffer("flags", torch.zeros(3, dtype=torch.bool))
            self.register_buffer("rows", torch.zeros(2, 3, dtype=torch.bfloat16).T)
            self.register_buffer("none", torch.zeros(0, 4, dtype=torch.float64))
            self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x):
        return self.inner(x)


def _engine(tallies=True):
    torch.manual_seed(0)
    return make_engine(Counting(tallies), AdamW(lr=0.1), BF16)


def _fill(engine, rank):
    held = dict(engine.module.named_buffers())
    held["tally"].copy_(torch.arange(7.0) / 3 + rank)
    held["seen"].fill_(2**40 + 1 + rank)
    held["flags"].copy_(torch.tensor([True, False, True]) if rank == 0 else torch.ones(3))
    held["rows"].copy_(torch.arange(6.0).view(3, 2) + rank)
    held["scratch"].fill_(9.0)


def _saved(folder, copied):
    engine = _engine()
    _fill(engine, engine.topology.dp.rank)
    snapshot = take_snapshot(engine, RunRecord())
    save(folder, HostCopy().start(snapshot) if copied else snapshot, all_or_none_of(engine))


def _loaded(folder):
    engine = _engine()
    checkpoint = newest_checkpoint(folder, all_or_none_of(engine))
    assert checkpoint is not None
    load(checkpoint, engine, all_or_none_of(engine))
    return {name: buffer.clone() for name, buffer in engine.module.named_buffers()}


@pytest.mark.parametrize("copied", [False, True])
def test_the_first_ranks_buffers_are_loaded_on_all(run_ranks, tmp_path, copied):
    run_ranks(_saved, 2, tmp_path, copied)
    first = _engine()
    _fill(first, 0)
    want = dict(first.module.named_buffers()) | {"scratch": torch.zeros(2)}
    for held in (*run_ranks(_loaded, 3, tmp_path), _loaded(tmp_path)):
        assert held.keys() == want.keys()
        assert all(torch.equal(held[name], want[name]) for name in want)


def test_a_buffer_that_was_not_saved_stays_and_one_that_is_unknown_is_refused(tmp_path):
    without, engine = _engine(tallies=False), _engine()
    all_or_none = all_or_none_of(engine)
    save(tmp_path / "without", take_snapshot(without, RunRecord()), all_or_none)
    _fill(engine, 0)
    save(tmp_path / "with", take_snapshot(engine, RunRecord()), all_or_none)
    checkpoint = newest_checkpoint(tmp_path / "without", all_or_none)
    assert checkpoint is not None
    load(checkpoint, engine, all_or_none)
    assert int(engine.module.get_buffer("seen")) == 2**40 + 1
    checkpoint = newest_checkpoint(tmp_path / "with", all_or_none)
    assert checkpoint is not None
    with pytest.raises(ValueError, match="unknown tally; unknown seen"):
        load(checkpoint, without, all_or_none)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn])
def test_a_dtype_that_no_checkpoint_holds_is_refused_with_the_buffer(dtype):
    model = Counting()
    model.register_buffer("turns", torch.ones(2).to(dtype))
    with pytest.raises(ValueError, match=rf"buffer turns is {dtype}, .*register_buffer\(..., persistent=False\)"):
        make_engine(model, AdamW(lr=0.1), BF16)
    model.register_buffer("turns", model.turns, persistent=False)
    engine = make_engine(model, AdamW(lr=0.1), BF16)
    assert "turns" not in [entry.name for entry in engine.plan.entries.buffers]
