"""Parts that torch.compile and activation checkpointing add to names appear nowhere: groups, units, weights and
checkpoints have the plain model's names, whichever of two models is wrapped; compiling the whole model is logged once.
"""

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from megamix import Checkpoints, Muon, ParamGroup, Sharding
from megamix.comm.topology import Axis
from megamix.mixed_precision.settings import Placement
from tests.builders import BF16, bf16_engine, make_engine, make_model, train_steps

GROUPS = (ParamGroup(pattern="blocks.0.up.weight", lr_factor=0.0), ParamGroup(pattern="blocks.1.*", lr_factor=0.5))


def _wrapped():
    """Return a model with each wrapper at the end and in the middle of a path, and buffers in them."""
    model = _plain()
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    model.blocks[1].up = checkpoint_wrapper(model.blocks[1].up)
    model.blocks[2] = checkpoint_wrapper(torch.compile(model.blocks[2], backend="eager"))
    return model


def _plain():
    model = make_model()
    for number, block in enumerate(model.blocks):
        block.register_buffer("table", torch.full((2,), float(number)))
    return model


def _engine(model, shard="states"):
    optimizer = Muon(lr=0.01, groups=GROUPS, matrix=["blocks.2.down.*"])
    return make_engine(model, optimizer, BF16, shard=shard)


def _same(one, other):
    first, second = one.full_weights(), other.full_weights()
    return first.keys() == second.keys() and all(torch.equal(weight, second[name]) for name, weight in first.items())


@pytest.mark.parametrize("shard", ["states", "parameters"])
def test_a_wrapped_model_trains_and_is_kept_under_the_plain_one_s_names(shard, tmp_path):
    wrapped, plain = _engine(_wrapped(), shard), _engine(_plain(), shard)
    assert wrapped.plan.param_names == plain.plan.param_names
    train_steps(wrapped, range(2))
    train_steps(plain, range(2))
    assert _same(wrapped, plain)
    for saving, loading in ((wrapped, _plain), (plain, _wrapped)):
        folder = tmp_path / type(loading).__name__ / loading.__name__
        Checkpoints(saving, folder).save({})
        going_on = _engine(loading(), shard)
        assert Checkpoints(going_on, folder).load() == {}
        train_steps(going_on, range(2, 3))
        fresh = _engine(loading(), shard)
        fresh.load_weights(saving.full_weights())
        assert _same(fresh, saving)
        train_steps(saving, range(2, 3))
        assert _same(going_on, saving)
        assert not _same(fresh, saving)


def test_weights_are_taken_under_a_wrapped_model_s_own_names():
    engine, source = _engine(_wrapped()), _wrapped()
    with torch.no_grad():
        for param in source.parameters():
            param.add_(1)
    own = source.state_dict()
    assert any("_orig_mod" in name for name in own)
    engine.load_weights(own)
    plain = {name.replace("_orig_mod.", ""): weight for name, weight in own.items()}
    assert all(torch.equal(engine.full_weights()[name], weight) for name, weight in plain.items())
    with pytest.raises(ValueError, match=r"blocks\.0\._orig_mod\.gain.* both blocks\.0\.gain"):
        engine.load_weights({"blocks.0.gain": torch.zeros(1), **own})


def test_a_placement_may_bear_a_wrapped_name():
    placements = {"blocks.0._orig_mod.up.weight": Placement((80, 24), (40, 0), Axis())}
    engine = bf16_engine(_wrapped(), sharding=Sharding(placements=placements))
    assert {entry.name: entry.full_shape for entry in engine.plan.entries.params}["blocks.0.up.weight"] == (80, 24)


def test_a_block_may_be_compiled_after_the_engine_is_built():
    engine, plain = _engine(_plain()), _engine(_plain())
    train_steps(engine, range(1))
    engine.module.blocks[1] = torch.compile(engine.module.blocks[1], backend="eager")
    engine.module.blocks[2].compile(backend="eager")
    train_steps(engine, range(1, 3))
    train_steps(plain, range(3))
    assert _same(engine, plain)


@pytest.mark.parametrize("wraps", [True, False])
def test_a_compile_of_the_whole_model_is_told_once(wraps, caplog):
    plain, model = _engine(_plain()), _plain()
    units = [*model.blocks]
    if wraps:
        model = torch.compile(model, backend="eager")
    engine = make_engine(model, plain.optimizer, BF16, Sharding(units))
    if not wraps:
        engine.module.compile(backend="eager")  # told at the next step
    train_steps(engine, range(2))
    (told,) = [line for line in caplog.messages if "torch.compile wraps the whole model" in line]
    assert "block.compile()" in told
    train_steps(plain, range(2))
    assert _same(engine, plain)
