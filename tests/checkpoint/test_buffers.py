"""Persistent buffers of a module are saved once and loaded on every rank, in their own dtypes, on any layout; a buffer
that a checkpoint lacks keeps its value. Frozen parameters are saved and loaded as buffers are, in any precision;
without `frozen` a checkpoint leaves them out.
"""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from megamix import Checkpoints, Precision
from tests.builders import bf16_engine, make_engine, make_model


class Counting(nn.Module):
    """A layer that counts: in FP32, in whole numbers, by row, and what nobody saves."""

    def __init__(self, tallies=True):
        super().__init__()
        self.inner = nn.Linear(5, 3)
        if tallies:
            self.tally = nn.Buffer(torch.zeros(7))
            self.seen = nn.Buffer(torch.zeros((), dtype=torch.int64))
            self.flags = nn.Buffer(torch.zeros(3, dtype=torch.bool))
            self.rows = nn.Buffer(torch.zeros(2, 3, dtype=torch.bfloat16).T)
            self.none = nn.Buffer(torch.zeros(0, 4, dtype=torch.float64))
            self.scratch = nn.Buffer(torch.zeros(2), persistent=False)

    def forward(self, x):
        return self.inner(x)


def _engine(tallies=True):
    torch.manual_seed(0)
    return bf16_engine(Counting(tallies))


def _fill(engine, rank):
    module = engine.module
    module.tally.copy_(torch.arange(7.0) / 3 + rank)
    module.seen.fill_(2**40 + 1 + rank)
    module.flags.copy_(torch.tensor([1, rank, 1]))
    module.rows.copy_(torch.arange(6.0).view(3, 2) + rank)
    module.scratch.fill_(9.0)


def _saved(folder, beside):
    engine = _engine()
    _fill(engine, engine.topology.dp.rank)
    checkpoints = Checkpoints(engine, folder)
    checkpoints.save({}, beside=beside)
    checkpoints.wait()


def _loaded(folder):
    engine = _engine()
    assert Checkpoints(engine, folder).load() == {}
    return {name: buffer.clone() for name, buffer in engine.module.named_buffers()}


@pytest.mark.parametrize("beside", [False, True])
def test_the_first_ranks_buffers_are_loaded_on_all(run_ranks, tmp_path, beside):
    run_ranks(_saved, 2, tmp_path, beside)
    first = _engine()
    _fill(first, 0)
    want = dict(first.module.named_buffers()) | {"scratch": torch.zeros(2)}
    for held in (*run_ranks(_loaded, 3, tmp_path), _loaded(tmp_path)):
        assert held.keys() == want.keys()
        assert all(torch.equal(held[name], want[name]) for name in want)


def test_a_buffer_that_was_not_saved_stays_and_one_that_is_unknown_is_refused(tmp_path):
    without, engine = _engine(tallies=False), _engine()
    Checkpoints(without, tmp_path / "without").save({})
    _fill(engine, 0)
    Checkpoints(engine, tmp_path / "with").save({})
    Checkpoints(engine, tmp_path / "without").load()
    assert int(engine.module.seen) == 2**40 + 1
    with pytest.raises(ValueError, match="unknown tally; unknown seen"):
        Checkpoints(without, tmp_path / "with").load()


def test_a_dtype_that_no_checkpoint_holds_is_refused_with_the_buffer():
    model = Counting()
    model.register_buffer("turns", torch.ones(2, dtype=torch.complex64))
    told = r"buffer turns is torch.complex64, .*register_buffer\(..., persistent=False\)"
    with pytest.raises(ValueError, match=told):
        bf16_engine(model)
    model.register_buffer("turns", model.turns, persistent=False)
    engine = bf16_engine(model)
    assert "turns" not in [entry.name for entry in engine.plan.entries.buffers]


def _frozen_engine(seed=0, dtype=torch.bfloat16, change=lambda model: None):
    """Return an engine with a frozen table, drawn by the seed, and a frozen norm inside a wrapped block."""
    model = make_model(tied=False)
    torch.manual_seed(seed)
    nn.init.normal_(model.embedding.weight)
    model.embedding.requires_grad_(False)
    model.blocks[0] = checkpoint_wrapper(model.blocks[0]).requires_grad_(False)
    model.register_parameter("index", nn.Parameter(torch.tensor(seed), requires_grad=False))
    change(model)
    return make_engine(model, precision=Precision(dtype))


def _table(engine):
    return engine.module.embedding.weight.detach().clone()


def test_frozen_values_are_saved_and_loaded_back(tmp_path):
    engine, other = _frozen_engine(), _frozen_engine(seed=1)
    Checkpoints(engine, tmp_path).save({"step": 1}, beside=True)
    assert Checkpoints(other, tmp_path).load() == {"step": 1}
    assert torch.equal(_table(other), _table(engine))
    assert int(other.module.index) == 0
    assert torch.equal(other.module.blocks[0].norm.weight, engine.module.blocks[0].norm.weight)


@pytest.mark.parametrize(("saved", "loaded"), [(False, False), (True, False), (False, True)])
def test_without_frozen_they_stay_as_the_model_has_them(saved, loaded, tmp_path, caplog):
    """A user of a large base that each run builds alike."""
    Checkpoints(_frozen_engine(), tmp_path, frozen=saved).save({})
    other = _frozen_engine(seed=1)
    table = _table(other)
    assert Checkpoints(other, tmp_path, frozen=loaded).load() == {}
    assert torch.equal(_table(other), table) == (not saved)
    assert ("frozen parameters stay as the model has them" in caplog.text) == (not saved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: delattr(model, "index"), "unknown index"),
        (lambda model: setattr(model.embedding, "weight", nn.Parameter(_flat(model), False)), "embedding.weight"),
    ],
)
def test_what_was_not_frozen_there_or_has_another_shape_is_named(change, message, tmp_path):
    Checkpoints(_frozen_engine(), tmp_path).save({})
    with pytest.raises(ValueError, match=message):
        Checkpoints(_frozen_engine(change=change), tmp_path).load()


def _flat(model):
    return nn.Parameter(model.embedding.weight.detach().reshape(1, -1), requires_grad=False)


def test_another_precision_gets_the_values_cast(tmp_path):
    engine, other = _frozen_engine(dtype=torch.float32), _frozen_engine(seed=1)
    Checkpoints(engine, tmp_path).save({})
    Checkpoints(other, tmp_path).load()
    assert torch.equal(_table(other), _table(engine).bfloat16())
