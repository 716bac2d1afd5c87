"""Whoever writes to weights between steps: a write to a half parameter that moves no version counter, as through
`.data`, is refused by the parameter's name on every rank in the same call: two steps after a first, second, 64th or
examined step, or after `whole_parameters()`; at once before weights are returned or saved. The engine's own writes are
never refused.
"""

import contextlib
from dataclasses import dataclass, replace
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megamix import NAG, AdamW, Checkpoints, DynamicLossScale, Muon, Precision, Sharding, StaticLossScale
from megamix.mixed_precision import unseen_writes
from megamix.mixed_precision.optimizers import Optimizer
from megamix.mixed_precision.settings import Shard
from tests.builders import BF16, bf16_engine, loss_of, make_batch, make_engine, make_model, train_step

ADAMW = AdamW(lr=0.01)
NAME = "blocks.1.up.weight"
SHARDS = get_args(Shard)


def _engine(shard="states"):
    model = make_model(tied=False)
    units = [model.embedding, *model.blocks, model.norm, model.head]
    sharding = Sharding(units=units, bucket_size=1500, shard=shard)
    return bf16_engine(model, sharding=sharding)


WRITES = {
    "clamp": lambda param: param.data.clamp_(-0.01, 0.01),
    "initialiser": lambda param: param.data.normal_(),
    "foreach": lambda param: torch._foreach_mul_([param.data], 0.5),
    "view of the storage": lambda param: param.detach().view(torch.int16).numpy().__ior__(1),
    "renormalised rows": lambda param: torch.embedding_renorm_(param.data, torch.arange(4), 0.1, 2.0),
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
    for step in range(4):
        train_step(engine, step)


def test_a_write_before_the_first_step_is_refused_two_steps_later():
    engine = _engine()
    nn.init.normal_(engine.module.get_parameter(NAME).data)
    train_step(engine)
    train_step(engine)
    with pytest.raises(RuntimeError, match=NAME):
        train_step(engine)


READERS = {
    "full_weights": lambda engine, folder: engine.full_weights(),
    "state_dict": lambda engine, folder: engine.state_dict(),
    "save": lambda engine, folder: Checkpoints(engine, folder).save({}),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS.keys())
@pytest.mark.parametrize("steps_later", [0, 1])
def test_weights_are_not_given_away_after_a_write(read, steps_later, tmp_path):
    engine = _engine()
    train_step(engine)
    engine.module.get_parameter(NAME).data.clamp_(-0.01, 0.01)
    for _ in range(steps_later):
        train_step(engine)
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
    for step in range(5):
        train_step(engine, step)
    for ends in (lambda: [train_step(engine, 5 + step) for step in range(3)], engine.full_weights):
        with engine.whole_parameters():
            engine.module.get_parameter(NAME).data.clamp_(-0.01, 0.01)
        with pytest.raises(RuntimeError, match=f"parameter {NAME} was written past"):
            ends()
        engine.discard_step()
    with engine.whole_parameters():
        largest = max(float(param.detach().abs().max()) for param in engine.module.parameters())
    assert largest > 0.01
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
        if dist.get_rank() == dist.get_world_size() - 1:
            for param in engine.module.blocks[1].parameters():
                param.data.mul_(2)

    def inside():
        with engine.whole_parameters():
            write()

    if shard == "parameters":
        call(inside)
        for step in range(3):
            call(lambda step=step: train_step(engine, step))
    else:
        engine.wait()
        write()
        call(engine.full_weights)
        engine.publish_masters()
        engine.wait()
        write()
        for step in range(3):
            call(lambda step=step: train_step(engine, step))
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
    for step in range(4):
        train_step(engine, step)
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


def _ranks_that_write():
    return [_one_rank_writes(shard) for shard in SHARDS]


def test_every_rank_raises_in_the_same_call(run_ranks):
    for states, gradients, parameters in run_ranks(_ranks_that_write, 2):
        first = "parameter blocks.1.gain was written past the engine"
        assert states == gradients == [first, "", "", first]
        assert parameters == ["", "", "", first]


@dataclass(frozen=True)
class Right:
    """A run in which nobody writes past the engine."""

    shard: Shard = "states"
    optimizer: Optimizer = ADAMW
    precision: Precision = BF16
    accumulate: Any = "local"
    overlap: bool = True
    large: bool = False  # masters whose casts are inf


FP16 = Precision(torch.float16, loss_scale=DynamicLossScale(2.0**24, growth_interval=2))
RIGHT = [
    *(Right(shard) for shard in SHARDS),
    *(Right(shard, precision=FP16) for shard in SHARDS),
    Right(precision=Precision(torch.float32)),
    Right(optimizer=NAG(lr=0.01), precision=Precision(torch.bfloat16, reduce_dtype="half_fp32_sum")),
    Right("gradients", Muon(lr=0.01), accumulate="owner"),
    Right("parameters", Muon(lr=0.01), FP16),
    Right(overlap=False, precision=replace(FP16, loss_scale=StaticLossScale(1.0)), large=True),
]


def _trains(case):
    """Train with every step checked, with all calls that write masters between the steps. Return the number
    of updates.
    """
    unseen_writes._EVERY = 1
    model = make_model()
    units = [*model.blocks]
    sharding = Sharding(units, shard=case.shard, accumulate=case.accumulate, overlap=case.overlap, bucket_size=1500)
    engine = make_engine(model, case.optimizer, case.precision, sharding, grad_accum_steps=2)
    if case.large:
        for owned in engine.owned_ranges():
            owned.tensors["master"].mul_(2.0**20)
        engine.publish_masters()
    state = engine.state_dict()

    def rest(number):
        if number == 2 and not case.large:  # load_weights refuses such values
            engine.load_weights(engine.full_weights())
        elif number == 4:
            engine.load_state_dict(state)
        elif number == 6:
            loss_of(model, make_batch(0, 0, 0))  # its last unit keeps memory
            for owned in engine.owned_ranges():
                owned.tensors["master"].mul_(0.5)
            engine.publish_masters()
        elif number == 7:
            with engine.whole_parameters():
                loss_of(model, make_batch(0, 0, 0))
        elif number == 8:
            engine.discard_step()

    for number in range(12):
        for micro_batch in range(2):
            engine.backward(loss_of(model, make_batch(number, dist.get_rank(), micro_batch)))
        engine.step()
        rest(number)
    engine.full_weights()
    return int(engine.applied_updates) + int(engine.skipped_steps)


def _all_train():
    return [_trains(case) for case in RIGHT]


def test_what_the_engine_writes_is_never_refused(run_ranks):
    state_loaded_at = 5
    assert run_ranks(_all_train, 2) == [[12 - state_loaded_at] * len(RIGHT)] * 2


def test_a_checked_step_trains_the_bits_of_one_that_is_not(monkeypatch):
    def masters(every):
        monkeypatch.setattr(unseen_writes, "_EVERY", every)
        engine = _engine()
        for step in range(6):
            train_step(engine, step)
        return torch.cat([bucket.master for bucket in engine.buckets])

    assert torch.equal(masters(1), masters(1000))
