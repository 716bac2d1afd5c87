"""Whoever writes to weights between steps: a write to a half parameter that moves no version counter, as through
`.data`, is refused by the parameter's name on every rank in the same call: two steps after a first, second, 64th or
examined step, or after `whole_parameters()`; at once before weights are returned or saved. The engine's own writes are
never refused.
"""

import contextlib
from dataclasses import replace
from functools import partial
from typing import get_args
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megamix import NAG, AdamW, Checkpoints, DynamicLossScale, Muon, Precision, Sharding, StaticLossScale
from megamix.mixed_precision.guards import unseen_writes
from megamix.mixed_precision.settings import Shard
from tests.builders import (
    BF16,
    FP32,
    bf16_engine,
    loss_of,
    make_batch,
    make_engine,
    make_model,
    train_step,
    train_steps,
)

NAME = "blocks.1.up.weight"
SHARDS = get_args(Shard)


def _engine(shard="states"):
    model = make_model(tied=False)
    units = [model.embedding, *model.blocks, model.norm, model.head]
    return bf16_engine(model, sharding=Sharding(units, bucket_size=1500, shard=shard))


WRITES = {
    "view of the storage": lambda param: param.detach().view(torch.int16).numpy().__ior__(1),
    "one element": lambda param: param.data[3, 5].add_(1.0),
    "NaN": lambda param: param.data[0].fill_(float("nan")),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_a_write_that_moves_no_version_is_refused_by_name(write):
    engine = _engine()
    train_step(engine)
    write(engine.module.get_parameter(NAME))
    train_step(engine)
    train_step(engine)
    with pytest.raises(RuntimeError, match=f"parameter {NAME} was written past the engine.*engine.load_weights"):
        train_step(engine)
    engine.discard_step()
    engine.load_weights(engine.full_weights())
    train_steps(engine)


@pytest.mark.parametrize(
    "read",
    [
        lambda engine, folder: engine.full_weights(),
        lambda engine, folder: engine.state_dict(),
        lambda engine, folder: Checkpoints(engine, folder).save({}),
    ],
)
@pytest.mark.parametrize("steps_later", [0, 1])
def test_weights_are_not_given_away_after_a_write(read, steps_later, tmp_path):
    engine = _engine()
    train_step(engine)
    engine.module.get_parameter(NAME).data.clamp_(-0.01, 0.01)
    train_steps(engine, range(steps_later))
    with pytest.raises(RuntimeError, match=NAME):
        read(engine, tmp_path / "folder")
    assert not [*tmp_path.glob("folder/step_*")]
    engine.publish_masters()
    read(engine, tmp_path / "folder")


def _found_in(shard, written_in, examined):
    """Return the step that refuses a write which a hook makes in the forward of another step, counted from 0."""
    engine = _engine(shard)
    param, under_way = engine.module.get_parameter(NAME), [0]

    def write(*_):
        if under_way[0] == written_in:
            param.data.mul_(2)

    engine.module.blocks[1].register_forward_pre_hook(write)
    for under_way[0] in range(12):
        if examined and under_way[0] == written_in:
            engine.examine_next_step()
        with contextlib.suppress(RuntimeError):
            train_step(engine, under_way[0])
            continue
        return under_way[0]
    return None


@pytest.mark.parametrize("shard", SHARDS)
def test_steps_are_checked_at_the_beginning_then_rarely_and_when_examined(shard, monkeypatch):
    assert (unseen_writes._FIRST, unseen_writes._EVERY) == (2, 64)  # as docs/library.md says
    monkeypatch.setattr(unseen_writes, "_EVERY", 8)
    assert [_found_in(shard, step, False) for step in (0, 1, 4, 7)] == [2, 3, None, 9]
    assert _found_in(shard, 4, True) == 6


def test_a_write_inside_whole_parameters_is_told_two_steps_later_and_before_weights_are_given():
    engine = _engine("parameters")
    train_steps(engine, range(5))
    for ends in (lambda: train_steps(engine), engine.full_weights):
        with engine.whole_parameters():
            engine.module.get_parameter(NAME).data.clamp_(-0.01, 0.01)
        with pytest.raises(RuntimeError, match=f"parameter {NAME} was written past"):
            ends()
        engine.discard_step()
    with pytest.raises(KeyError), engine.whole_parameters():
        raise KeyError
    train_step(engine)


def _one_rank_writes(shard):
    """Return the error of each call on each rank, if the last rank alone writes elements of its share."""
    engine, told = _engine(shard), []

    def call(function):
        try:
            function()
            told.append("")
        except RuntimeError as error:
            told.append(str(error).partition(",")[0])

    def write():
        engine.wait()
        with engine.whole_parameters() if shard == "parameters" else contextlib.nullcontext():
            if dist.get_rank() == dist.get_world_size() - 1:
                for param in engine.module.blocks[1].parameters():
                    param.data.mul_(2)

    if shard == "parameters":
        call(write)
    else:
        write()
        call(engine.full_weights)
        engine.publish_masters()
        write()
    for step in range(3):
        call(partial(train_step, engine, step))
    return told


def _one_rank_differs():
    """Take steps after a call that one rank may make alone; the other ranks must not wait for its finding."""
    engine = _engine("parameters")
    try:
        with engine.whole_parameters():
            if dist.get_rank() == 0:
                with engine.whole_parameters():
                    pass
                raise KeyError
    except KeyError:
        pass
    if dist.get_rank() == 0:
        engine.examine_next_step()
    train_steps(engine, range(4))
    return [float(param.double().sum()) for param in engine.full_weights().values()]


def test_a_rank_that_nests_fails_or_examines_alone_holds_nobody_up(run_ranks):
    first, second = run_ranks(_one_rank_differs, 2)
    assert first == second


@pytest.mark.parametrize("parts", [2, 3])
def test_parameters_of_one_tensor_s_views_share_a_counter_and_train(parts):
    model = nn.Module()
    model.parts = nn.ParameterList(torch.zeros(parts, 8).unbind())
    engine = make_engine(model, AdamW(lr=0.1), BF16)
    for _ in range(3):
        engine.backward(sum(part.float().sum() for part in model.parts))
        engine.step()
    with torch.no_grad():
        model.parts[0].mul_(2)
    engine.backward(sum(part.float().sum() for part in model.parts))
    with pytest.raises(RuntimeError, match="was written in place"):
        engine.step()


@pytest.mark.parametrize("shard", SHARDS)
def test_every_rank_raises_in_the_same_call(run_ranks, shard):
    first = "parameter blocks.1.gain was written past the engine"
    told = ["" if shard == "parameters" else first, "", "", first]
    assert run_ranks(_one_rank_writes, 2, shard) == [told] * 2


FP16 = Precision(torch.float16, loss_scale=DynamicLossScale(2.0**24, growth_interval=2))
RIGHT = [
    {"shard": "parameters"},
    {"shard": "gradients", "precision": FP16},
    {"precision": FP32},
    {"optimizer": NAG(lr=0.01), "precision": Precision(reduce_dtype="half_fp32_sum")},
    {"optimizer": Muon(lr=0.01), "shard": "gradients", "accumulate": "owner"},
    {"optimizer": Muon(lr=0.01), "shard": "parameters", "precision": FP16},
    {"overlap": False, "precision": replace(FP16, loss_scale=StaticLossScale(1.0)), "large": True},
]


def _trains(optimizer=None, precision=BF16, large=False, **settings):
    """Train with every step checked, with all calls that write masters between the steps; return the number of updates.
    With `large` the masters' casts are inf.
    """
    model = make_model()
    sharding = Sharding([*model.blocks], bucket_size=1500, **settings)
    engine = make_engine(model, optimizer, precision, sharding, grad_accum_steps=2)

    def scale_masters(factor):
        for owned in engine.owned_ranges():
            owned.tensors["master"].mul_(factor)
        engine.publish_masters()

    if large:
        scale_masters(2.0**20)
    state = engine.state_dict()
    for number in range(10):
        for micro_batch in range(2):
            engine.backward(loss_of(model, make_batch(number, dist.get_rank(), micro_batch)))
        engine.step()
        if number == 2 and not large:  # load_weights refuses such values
            engine.load_weights(engine.full_weights())
        elif number == 4:
            engine.load_state_dict(state)
        elif number == 6:
            loss_of(model, make_batch(0, 0, 0))  # its last unit keeps memory
            scale_masters(0.5)
        elif number == 7:
            with engine.whole_parameters():
                loss_of(model, make_batch(0, 0, 0))
        elif number == 8:
            engine.discard_step()
    engine.full_weights()
    return int(engine.applied_updates) + int(engine.skipped_steps)


def _all_train():
    with mock.patch.object(unseen_writes, "_EVERY", 1):
        return [_trains(**case) for case in RIGHT]


def test_what_the_engine_writes_is_never_refused(run_ranks):
    state_loaded_at = 5
    assert run_ranks(_all_train, 2) == [[10 - state_loaded_at] * len(RIGHT)] * 2
