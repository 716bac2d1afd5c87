"""The average of the weights is, bit for bit, that of torch's own loop over FP32 masters, on any ranks, in every
`shard`, over skipped steps, with tied, frozen and grouped parameters, Muon's matrices and replicas. Inside `weights()`
every read gets it, and nothing that trains or saves is taken. The weights come back bit for bit, also after an
exception, and writes inside are found.
"""

import itertools
import random
import re
from collections import namedtuple
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.optim.swa_utils import get_ema_multi_avg_fn

from megamix import NAG, AdamW, Checkpoints, DynamicLossScale, Muon, ParamGroup, Precision, Sharding, WeightAverage
from megamix.comm.topology import Topology
from tests.builders import bf16_engine, loss_of, make_batch, make_engine, make_model, train_steps
from tests.checkpoint.state import fp16_engine
from tests.conftest import FULL

DECAY, DECAYS = 0.7, [0.3, 0.6, 0.9]  # of each update; the last one stays
STEPS = 5
COUNTS = {1: 100, 2: 100, 4: 30} if FULL else {1: 6, 2: 5, 4: 3}
GROUPS = (ParamGroup(pattern="blocks.1.*", lr_factor=0.5), ParamGroup(pattern="*.gain", weight_decay=0.3))
OPTIMIZERS = {
    "adamw": AdamW(lr=0.01, groups=GROUPS),
    "nag": NAG(lr=0.1, momentum_form="velocity", groups=GROUPS),
    "muon": Muon(lr=0.01, groups=GROUPS),
}


AXES = {
    "shard": ["states", "gradients", "parameters"],
    "dtype": [torch.float16, torch.bfloat16],
    "optimizer": [*OPTIMIZERS],
    "units": [True, False],
    "tied": [False, True],
    "frozen": [False, True],
    "bucket_size": [None, 1111],
    "decay": [DECAY, DECAYS],
}
Case = namedtuple("Case", (*AXES, "replicas"), defaults=(1,))


def _cases(dp_size, count):
    """Return seeded picks from the product of all axes: the first ones have every `shard`."""
    product = [Case(*values) for values in itertools.product(*AXES.values())]
    product = [case for case in product if case.units or case.shard != "parameters"]
    random.Random(dp_size).shuffle(product)
    each = [next(case for case in product if case.shard == shard) for shard in AXES["shard"]]
    return [*each, *(case for case in product if case not in each)][:count]


def _build(case):
    model = make_model(case.tied)
    model.blocks[1].up.requires_grad_(not case.frozen)
    scale = DynamicLossScale(init_scale=2.0**20, growth_interval=2) if case.dtype == torch.float16 else None
    topology = Topology.connect(replicas=case.replicas) if case.replicas > 1 else None
    units = [*model.blocks] if case.units else []
    sharding = Sharding(units, topology, bucket_size=case.bucket_size, shard=case.shard)
    return make_engine(model, OPTIMIZERS[case.optimizer], Precision(case.dtype, loss_scale=scale), sharding)


def _padded(weights, trained):
    """Return the trained weights flat, and padded to whole vectors, whose kernels have no scalar tail."""
    return [F.pad(weights[name].flatten(), (0, -weights[name].numel() % 64)) for name in trained]


def _halves(engine):
    with engine.whole_parameters():
        return [param.detach().clone() for param in engine.module.parameters()]


def _check(case):
    """Compare with torch's average of the masters. Return the number of skipped steps."""
    engine = _build(case)
    average = WeightAverage(engine, case.decay)
    trained = [name for name, param in engine.module.named_parameters() if param.requires_grad]
    own = _padded(engine.full_weights(), trained)
    decays = iter([*DECAYS, DECAYS[-1], DECAYS[-1]] if case.decay == DECAYS else [DECAY] * STEPS)
    for step in range(STEPS):
        engine.backward(loss_of(engine.module, make_batch(step, engine.topology.data.rank, 0)))
        if not engine.step().found_inf:
            get_ema_multi_avg_fn(next(decays))(own, _padded(engine.full_weights(), trained), None)
    masters, halves = engine.full_weights(), _halves(engine)
    with average.weights(), torch.no_grad():
        shown, shown_halves, logits = engine.full_weights(), _halves(engine), engine(make_batch(99, 0, 0))
    want = {**masters}
    for name, flat in zip(trained, own, strict=True):
        want[name] = flat[: masters[name].numel()].view(masters[name].shape)
        want |= {"head.weight": want["embedding.weight"]} if case.tied else {}
    plain = make_model(case.tied).to(case.dtype)
    plain.load_state_dict(want)
    with torch.no_grad():
        assert torch.equal(logits, plain(make_batch(99, 0, 0))), case
    assert all(map(torch.equal, shown_halves, plain.parameters())), case
    assert all(map(torch.equal, _halves(engine), halves)), case
    for got, right in ((shown, want), (engine.full_weights(), masters)):
        assert [name for name in right if not torch.equal(got[name], right[name])] == [], case
    return int(engine.skipped_steps)


def _check_all(cases):
    for case in cases:
        assert _check(case) or case.dtype != torch.float16


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_the_average_is_that_of_torchs_loop(run_ranks, dp_size):
    replicas = Case("states", torch.bfloat16, "adamw", True, True, False, 1111, DECAYS, replicas=2)
    run_ranks(_check_all, dp_size, _cases(dp_size, COUNTS[dp_size]) + [replicas] * (dp_size == 4), deadline_s=600.0)


def _trained(shard="states"):
    engine = bf16_engine(make_model(tied=False), shard=shard, bucket_size=1111)
    average = WeightAverage(engine, DECAY)
    train_steps(engine, range(2))
    return engine, average


def _reads_without_a_wait():
    """Read plainly at once, inside the block and behind it."""
    engine, average = _trained()
    masters = engine.full_weights()
    with average.weights():
        at_once = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
        averages = engine.full_weights()
    for values, read in ((averages, at_once), (masters, dict(engine.module.named_parameters()))):
        assert all(torch.equal(values[name].bfloat16(), got) for name, got in read.items())


def test_no_read_is_stale(run_ranks):
    run_ranks(_reads_without_a_wait, 2)


@pytest.mark.parametrize("shard", ["states", "parameters"])
def test_an_exception_brings_the_weights_back(shard):
    engine, average = _trained(shard)
    masters, halves = engine.full_weights(), _halves(engine)
    interrupted = mock.patch.object(engine.module.blocks[1], "forward", side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt), average.weights(), interrupted:
        engine.module(make_batch(0, 0, 0))
    assert all(map(torch.equal, _halves(engine), halves))
    assert all(torch.equal(value, masters[name]) for name, value in engine.full_weights().items())
    engine.backward(loss_of(engine.module, make_batch(2, 0, 0)))
    assert not engine.step().found_inf


CALLS = {  # methods of the engine, and what they are given
    "step": (), "load_weights": ({},), "state_dict": (), "load_state_dict": ({},), "owned_ranges": (),
    "publish_masters": (), "examine_next_step": (),
}  # fmt: skip


@pytest.mark.parametrize("shard", ["states", "parameters"])
def test_what_trains_or_saves_is_refused_inside(shard, tmp_path):
    engine, average = _trained(shard)
    saved = Checkpoints(engine, tmp_path)
    calls = {f"{name}()": partial(getattr(engine, name), *given) for name, given in CALLS.items()} | {
        "engine.backward": lambda: engine.backward(torch.ones((), requires_grad=True)),
        "Checkpoints.save()": lambda: saved.save({}),
        "Checkpoints.load()": saved.load,
        "WeightAverage.weights()": lambda: engine.averaged_weights().__enter__(),
    }
    with average.weights():
        for name, call in calls.items():
            with pytest.raises(RuntimeError, match=rf"^{re.escape(name)} inside WeightAverage.weights\(\).*end the"):
                call()
    engine.backward(loss_of(engine.module, make_batch(2, 0, 0)))
    with pytest.raises(RuntimeError, match=r"WeightAverage.weights\(\) after 1 backward"):
        engine.averaged_weights().__enter__()
    engine.step()


def test_it_is_not_shown_where_another_block_shows_the_masters():
    engine, average = _trained("parameters")
    with engine.whole_parameters(), pytest.raises(RuntimeError, match=r"inside engine.whole_parameters\(\)"):
        average.weights().__enter__()


def test_an_earlier_graph_is_refused():
    engine, average = _trained()
    loss = loss_of(engine.module, make_batch(2, 0, 0))
    with average.weights():
        pass
    with pytest.raises(RuntimeError, match="step"):
        engine.backward(loss)


def test_writes_inside_the_block_and_before_it_are_found():
    past = r"parameter head.weight was written past the engine"
    engine, average = _trained()
    with pytest.raises(RuntimeError, match=r"head.weight was written in place"), average.weights(), torch.no_grad():
        engine.module.head.weight.add_(1.0)
    with average.weights():
        engine.module.head.weight.data.add_(1.0)
    with pytest.raises(RuntimeError, match=past):
        train_steps(engine)
    engine, average = _trained()
    engine.module.head.weight.data.add_(1.0)
    with pytest.raises(RuntimeError, match=past):
        average.weights().__enter__()


@pytest.mark.parametrize("loaded", [False, True])
def test_a_skipped_step_changes_no_bit(loaded):
    engine, plain = fp16_engine(), fp16_engine()
    plain.load_weights({name: torch.full_like(value, -0.0) for name, value in plain.full_weights().items()})
    if loaded:
        WeightAverage(engine, DECAY)
    engine.load_state_dict(plain.state_dict())  # which has no average
    if not loaded:
        WeightAverage(engine, DECAY)
    before = [owned.tensors["average"].clone().view(torch.int32) for owned in engine.owned_ranges()]
    engine.backward(loss_of(engine.module, make_batch(0, 0, 0)) * float("inf"))
    assert engine.step().found_inf
    after = [owned.tensors["average"].view(torch.int32) for owned in engine.owned_ranges()]
    assert all(map(torch.equal, before, after))


def test_a_decay_by_update_goes_on_where_it_was():
    state, averages = None, []
    for loads in (False, True):
        engine = bf16_engine()
        WeightAverage(engine, DECAYS)
        if loads:
            engine.load_state_dict(state)
        else:
            train_steps(engine, range(1))
            state = engine.state_dict()
        train_steps(engine, range(1, 3))
        averages.append([owned.tensors["average"].clone() for owned in engine.owned_ranges()])
    assert all(map(torch.equal, *averages))


def test_loaded_weights_start_it_anew():
    engine, average = _trained()
    weights = {name: 2 * value for name, value in engine.full_weights().items()}
    engine.load_weights(weights)
    with average.weights():
        shown = engine.full_weights()
    assert all(torch.equal(shown[name], weights[name]) for name in weights)


def test_what_cannot_be_kept_is_refused():
    class TakesTheName(NAG):
        def states(self, name, shape):
            return {"average": torch.float32}

    engine = bf16_engine()
    with pytest.raises(TypeError, match="engine is a TinyModel; pass the ShardedEngine"):
        WeightAverage(engine.module, 0.9)
    with pytest.raises(ValueError, match=r"decay of WeightAverage must be less than 1, got 1.0"):
        WeightAverage(engine, 1.0)
    WeightAverage(engine, 0.9)
    with pytest.raises(ValueError, match=r"keeps an average already, with decay 0.9"):
        WeightAverage(engine, 0.99)
    with pytest.raises(ValueError, match=r"states of embedding.weight has 'average'"):
        bf16_engine(optimizer=TakesTheName(lr=0.1))


def _another_decay():
    engine = bf16_engine()
    with pytest.raises(ValueError, match="decay of WeightAverage must be equal") as raised:
        WeightAverage(engine, 0.5 + 0.25 * dist.get_rank())
    return str(raised.value)


def test_ranks_that_differ_are_refused(run_ranks):
    told = "decay of WeightAverage must be equal on every rank, got [0.5, 0.75]"
    assert run_ranks(_another_decay, 2) == [told, told]
