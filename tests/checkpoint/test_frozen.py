"""Frozen parameters are saved and loaded as buffers are, on any ranks and in any precision; without `frozen` a
checkpoint leaves them out; those that an earlier version kept beside its checkpoints are loaded, too.
"""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from megamix import Checkpoints, Precision
from megamix.checkpoint.folder import checkpoints
from megamix.checkpoint.snapshot import frozen_params
from tests.builders import make_engine, make_model
from tests.checkpoint.seal import edit


def _engine(seed=0, dtype=torch.bfloat16, change=None):
    """Return an engine with a frozen table, drawn by the seed, and a frozen norm inside a wrapped block."""
    model = make_model(tied=False)
    torch.manual_seed(seed)
    nn.init.normal_(model.embedding.weight)
    model.embedding.requires_grad_(False)
    model.blocks[0] = checkpoint_wrapper(model.blocks[0]).requires_grad_(False)
    model.register_parameter("index", nn.Parameter(torch.tensor(seed), requires_grad=False))
    if change is not None:
        change(model)
    return make_engine(model, precision=Precision(dtype))


def _table(engine):
    return engine.module.embedding.weight.detach().clone()


def test_frozen_values_are_saved_and_loaded_back(tmp_path):
    engine, other = _engine(), _engine(seed=1)
    Checkpoints(engine, tmp_path).save({"step": 1}, beside=True)
    assert Checkpoints(other, tmp_path).load() == {"step": 1}
    assert torch.equal(_table(other), _table(engine))
    assert int(other.module.index) == 0
    assert torch.equal(other.module.blocks[0].norm.weight, engine.module.blocks[0].norm.weight)


@pytest.mark.parametrize("kept", [False, True])
def test_without_frozen_they_stay_as_the_model_has_them(kept, tmp_path, caplog):
    """A user of a large base that each run builds alike."""
    Checkpoints(_engine(), tmp_path, frozen=kept).save({})
    other = _engine(seed=1)
    table = _table(other)
    assert Checkpoints(other, tmp_path, frozen=False).load() == {}
    assert torch.equal(_table(other), table) == (not kept)
    assert ("frozen parameters stay as the model has them" in caplog.text) == (not kept)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: delattr(model, "index"), "unknown index"),
        (lambda model: setattr(model.embedding, "weight", nn.Parameter(_flat(model), False)), "embedding.weight"),
    ],
)
def test_what_was_not_frozen_there_or_has_another_shape_is_named(change, message, tmp_path):
    Checkpoints(_engine(), tmp_path).save({})
    with pytest.raises(ValueError, match=message):
        Checkpoints(_engine(change=change), tmp_path).load()


def _flat(model):
    return nn.Parameter(model.embedding.weight.detach().reshape(1, -1), requires_grad=False)


def test_another_precision_gets_the_values_cast(tmp_path):
    engine, other = _engine(dtype=torch.float32), _engine(seed=1)
    Checkpoints(engine, tmp_path).save({})
    Checkpoints(other, tmp_path).load()
    assert torch.equal(_table(other), _table(engine).bfloat16())


def _of_two_ranks(folder):
    Checkpoints(_engine(), folder).save({})
    engine = _engine(seed=5 + torch.distributed.get_rank())
    Checkpoints(engine, folder).load()
    return float(_table(engine).double().sum())


def test_all_ranks_load_the_same(run_ranks, tmp_path):
    first, second = run_ranks(_of_two_ranks, 2, tmp_path)
    assert first == second == float(_table(_engine()).double().sum())


def test_a_teacher_that_moves_is_saved_as_it_is(tmp_path):
    engine, other = _engine(), _engine(seed=1)
    saving = Checkpoints(engine, tmp_path)
    for number in range(3):
        engine.module.embedding.weight.data.mul_(0.5)
        saving.save({"number": number})
    assert Checkpoints(other, tmp_path).load() == {"number": 2}
    assert torch.equal(_table(other), _table(engine))


def test_a_transposed_mask_with_infinities_is_saved_and_loaded(tmp_path):
    def with_mask(model):
        mask = torch.zeros(3, 4).fill_diagonal_(-torch.inf)
        model.register_parameter("mask", nn.Parameter(mask.t(), requires_grad=False))

    engine, other = _engine(change=with_mask), _engine(seed=1, change=with_mask)
    engine.load_weights(engine.full_weights())
    Checkpoints(engine, tmp_path).save({})
    assert Checkpoints(other, tmp_path).load() == {}
    assert torch.equal(other.module.mask, engine.module.mask)


def test_a_checkpoint_without_them_loads_and_the_log_says_that_they_stay(tmp_path, caplog):
    """A user whose run began when checkpoints held digests of frozen parameters."""
    engine, other = _engine(), _engine(seed=1)
    Checkpoints(engine, tmp_path, frozen=False).save({"step": 1})
    digests = {name: f"{param.dtype} {'0' * 64}" for name, param in frozen_params(engine).items()}
    edit(checkpoints(tmp_path)[0], lambda fields: fields.update(frozen=digests))
    before = _table(other).clone()
    assert Checkpoints(other, tmp_path).load() == {"step": 1}
    assert torch.equal(_table(other), before)
    assert "frozen parameters stay as the model has them" in caplog.text
