"""The average of the weights is, bit for bit, that of torch's own loop over FP32 masters, on any ranks, in every
`shard`, over skipped steps, with tied, frozen and grouped parameters, Muon's matrices and replicas. Inside `weights()`
every read gets it, and nothing that trains or saves is taken. The weights come back bit for bit, also after an
exception, and writes inside are found.
"""

import itertools
import random
import re
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.optim.swa_utils import get_ema_multi_avg_fn

from megamix import (
    NAG,
    AdamW,
    Checkpoints,
    DynamicLossScale,
    Muon,
    ParamGroup,
    Precision,
    ShardedEngine,
    Sharding,
    WeightAverage,
)
from megamix.comm.topology import Topology
from tests.builders import bf16_engine, loss_of, make_batch, make_model, train_steps
from tests.checkpoint.state import fp16_engine
from tests.conftest import FULL

pytestmark = pytest.mark.uncounted

DECAY = 0.7
STEPS = 7
COUNTS = {1: 100, 2: 100, 4: 30} if FULL else {1: 6, 2: 5, 4: 3}
GROUPS = (ParamGroup(pattern="blocks.1.*", lr_factor=0.5), ParamGroup(pattern="*.gain", weight_decay=0.3))
OPTIMIZERS = {
    "adamw": AdamW(lr=0.01, groups=GROUPS),
    "nag": NAG(lr=0.1, momentum_form="velocity", groups=GROUPS),
    "muon": Muon(lr=0.01, groups=GROUPS),
}


@dataclass(frozen=True)
class Case:
    shard: str
    dtype: torch.dtype
    optimizer: str
    units: bool
    tied: bool
    frozen: bool
    bucket_size: int | None
    replicas: int = 1


AXES = {
    "shard": ["states", "gradients", "parameters"],
    "dtype": [torch.float16, torch.bfloat16],
    "optimizer": [*OPTIMIZERS],
    "units": [True, False],
    "tied": [False, True],
    "frozen": [False, True],
    "bucket_size": [None, 1111],
}


def _cases(dp_size, count):
    """Return seeded picks from the product of all axes: the first ones have every `shard`."""
    product = [Case(**dict(zip(AXES, values, strict=True))) for values in itertools.product(*AXES.values())]
    product = [case for case in product if case.units or case.shard != "parameters"]
    random.Random(dp_size).shuffle(product)
    each = [next(case for case in product if case.shard == shard) for shard in AXES["shard"]]
    return [*each, *(case for case in product if case not in each)][:count]


def _build(case):
    model = make_model(case.tied)
    model.blocks[1].up.requires_grad_(not case.frozen)
    scale = DynamicLossScale(init_scale=2.0**20, growth_interval=2) if case.dtype == torch.float16 else None
    topology = Topology.connect(replicas=case.replicas) if case.replicas > 1 else None
    sharding = Sharding(
        [*model.blocks] if case.units else [], topology, bucket_size=case.bucket_size, shard=case.shard
    )  # fmt: skip
    optimizer = OPTIMIZERS[case.optimizer]
    return ShardedEngine(model, optimizer, Precision(case.dtype, loss_scale=scale), sharding, compile_update=False)


def _padded(weights, trained):
    """Return the trained weights flat, and padded to whole vectors, whose kernels have no scalar tail."""
    return [F.pad(weights[name].flatten(), (0, -weights[name].numel() % 64)) for name in trained]


def _halves(engine):
    with engine.whole_parameters():
        return [param.detach().clone() for param in engine.module.parameters()]


def _wrong(case):
    """Return what differs from torch's average of the masters, and the number of skipped steps."""
    engine = _build(case)
    average = WeightAverage(engine, DECAY)
    module, rank = engine.module, engine.topology.data.rank
    trained = [name for name, param in module.named_parameters() if param.requires_grad]
    own = _padded(engine.full_weights(), trained)
    move, wrong = get_ema_multi_avg_fn(DECAY), []
    for step in range(STEPS):
        engine.backward(loss_of(module, make_batch(step, rank, 0)))
        if not engine.step().found_inf:
            move(own, _padded(engine.full_weights(), trained), None)
    masters, halves = engine.full_weights(), _halves(engine)
    with average.weights():
        shown, shown_halves = engine.full_weights(), _halves(engine)
        with torch.no_grad():
            logits = module(make_batch(99, 0, 0))
    want = {**masters}
    for name, flat in zip(trained, own, strict=True):
        want[name] = flat[: masters[name].numel()].view(masters[name].shape)
        want |= {"head.weight": want["embedding.weight"]} if case.tied else {}
    wrong += [f"average of {name}" for name in want if not torch.equal(shown[name], want[name])]
    plain = make_model(case.tied).to(case.dtype)
    plain.load_state_dict(want)
    if not all(map(torch.equal, shown_halves, plain.parameters())):
        wrong.append("the half parameters that are shown")
    with torch.no_grad():
        if not torch.equal(logits, plain(make_batch(99, 0, 0))):
            wrong.append("the logits")
    after = engine.full_weights()
    wrong += [f"the master of {name}" for name in masters if not torch.equal(after[name], masters[name])]
    if not all(map(torch.equal, _halves(engine), halves)):
        wrong.append("the half parameters after it")
    moved = [name for name in trained if not torch.equal(want[name], masters[name])]
    if len(moved) < len(trained) - 2:
        wrong.append(f"only {moved} moved")
    return [f"{case}: {what}" for what in wrong], int(engine.skipped_steps)


def _all_wrong(cases):
    return [_wrong(case) for case in cases]


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_the_average_is_that_of_torchs_loop(run_ranks, dp_size):
    cases = _cases(dp_size, COUNTS[dp_size])
    by_rank = [_all_wrong(cases)] if dp_size == 1 else run_ranks(_all_wrong, dp_size, cases, deadline_s=600.0)
    for answers in by_rank:
        assert [line for wrong, _ in answers for line in wrong] == []
        assert all(skipped for case, (_, skipped) in zip(cases, answers, strict=True) if case.dtype == torch.float16)


def _with_replicas():
    return [_wrong(Case("states", torch.bfloat16, "adamw", True, True, False, 1111, replicas=2))]


def test_replicas_average_alike(run_ranks):
    assert [answer for answers in run_ranks(_with_replicas, 4) for answer in answers] == [([], 0)] * 4


def _trained(shard="states"):
    engine = bf16_engine(make_model(tied=False), shard=shard, bucket_size=1111)
    average = WeightAverage(engine, DECAY)
    train_steps(engine, range(2))
    return engine, average


def _reads_without_a_wait():
    """Return whether a plain read gets the right weights at once, inside the block and behind it."""
    engine, average = _trained()
    masters = engine.full_weights()
    with average.weights():
        at_once = [param.detach().clone() for param in engine.module.parameters()]
        averages = engine.full_weights()
    behind = [param.detach().clone() for param in engine.module.parameters()]
    names = [name for name, _ in engine.module.named_parameters()]
    pairs = ((averages, at_once), (masters, behind))
    return [
        all(torch.equal(values[name].bfloat16(), got) for name, got in zip(names, read, strict=True))
        for values, read in pairs
    ]


def test_no_read_is_stale(run_ranks):
    assert run_ranks(_reads_without_a_wait, 2) == [[True, True]] * 2


@pytest.mark.parametrize("shard", ["states", "parameters"])
def test_an_exception_brings_the_weights_back(shard):
    engine, average = _trained(shard)
    masters, halves = engine.full_weights(), _halves(engine)
    hook = engine.module.blocks[1].register_forward_pre_hook(_interrupt)
    with pytest.raises(KeyboardInterrupt), average.weights():
        engine.module(make_batch(0, 0, 0))
    hook.remove()
    assert all(map(torch.equal, _halves(engine), halves))
    assert all(torch.equal(value, masters[name]) for name, value in engine.full_weights().items())
    engine.backward(loss_of(engine.module, make_batch(2, 0, 0)))
    assert not engine.step().found_inf


def _interrupt(module, given):
    raise KeyboardInterrupt


CALLS = {
    "engine.backward": lambda engine, folder: engine.backward(torch.ones((), requires_grad=True)),
    "step()": lambda engine, folder: engine.step(),
    "load_weights()": lambda engine, folder: engine.load_weights({}),
    "state_dict()": lambda engine, folder: engine.state_dict(),
    "load_state_dict()": lambda engine, folder: engine.load_state_dict({}),
    "owned_ranges()": lambda engine, folder: engine.owned_ranges(),
    "publish_masters()": lambda engine, folder: engine.publish_masters(),
    "examine_next_step()": lambda engine, folder: engine.examine_next_step(),
    "Checkpoints.save()": lambda engine, folder: Checkpoints(engine, folder).save({}),
    "Checkpoints.load()": lambda engine, folder: Checkpoints(engine, folder).load(),
    "WeightAverage.weights()": lambda engine, folder: engine.averaged_weights().__enter__(),
}


@pytest.mark.parametrize("shard", ["states", "parameters"])
def test_what_trains_or_saves_is_refused_inside(shard, tmp_path):
    engine, average = _trained(shard)
    with average.weights():
        for name, call in CALLS.items():
            with pytest.raises(
                RuntimeError, match=rf"^{re.escape(name)} inside WeightAverage.weights\(\).*end the block"
            ):
                call(engine, tmp_path)
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


def test_writes_inside_the_block_are_found():
    engine, average = _trained()
    with pytest.raises(RuntimeError, match=r"head.weight was written in place"), average.weights(), torch.no_grad():
        engine.module.head.weight.add_(1.0)
    with average.weights():
        engine.module.head.weight.data.add_(1.0)
    with pytest.raises(RuntimeError, match=r"parameter head.weight was written past the engine"):
        train_steps(engine)


def test_a_write_before_the_block_is_found():
    engine, average = _trained()
    engine.module.head.weight.data.add_(1.0)
    with pytest.raises(RuntimeError, match=r"parameter head.weight was written past the engine"), average.weights():
        pass


@pytest.mark.parametrize("loaded", [False, True])
def test_a_skipped_step_changes_no_bit(loaded):
    engine, plain = fp16_engine(), fp16_engine()
    plain.load_weights({name: torch.full_like(value, -0.0) for name, value in plain.full_weights().items()})
    if loaded:
        WeightAverage(engine, DECAY)
    engine.load_state_dict(plain.state_dict())  # which has no average
    if not loaded:
        WeightAverage(engine, DECAY)
    before = [owned.tensors["average"].clone() for owned in engine.owned_ranges()]
    engine.backward(loss_of(engine.module, make_batch(0, 0, 0)) * float("inf"))
    assert engine.step().found_inf
    after = [owned.tensors["average"] for owned in engine.owned_ranges()]
    assert all(
        torch.equal(one.view(torch.int32), other.view(torch.int32)) for one, other in zip(before, after, strict=True)
    )


def test_loaded_weights_start_it_anew():
    engine, average = _trained()
    weights = {name: 2 * value for name, value in engine.full_weights().items()}
    engine.load_weights(weights)
    with average.weights():
        shown = engine.full_weights()
    assert all(torch.equal(shown[name], weights[name]) for name in weights)


def test_what_cannot_be_kept_is_refused():
    engine = bf16_engine()
    with pytest.raises(TypeError, match="engine is a TinyModel; pass the ShardedEngine"):
        WeightAverage(engine.module, 0.9)  # type: ignore[arg-type]  # the mistake that is tested
    with pytest.raises(ValueError, match=r"decay of WeightAverage must be less than 1, got 1.0"):
        WeightAverage(engine, 1.0)
    WeightAverage(engine, 0.9)
    with pytest.raises(ValueError, match=r"keeps an average already, with decay 0.9"):
        WeightAverage(engine, 0.99)
    with pytest.raises(ValueError, match=r"states of embedding.weight has 'average'"):
        bf16_engine(optimizer=_TakesTheName(lr=0.1))


class _TakesTheName(NAG):
    def states(self, name, shape):
        return {"average": torch.float32}


def _another_decay():
    engine = bf16_engine()
    with pytest.raises(ValueError, match="decay of WeightAverage must be equal") as raised:
        WeightAverage(engine, 0.5 + 0.25 * dist.get_rank())
    return str(raised.value)


def test_ranks_that_differ_are_refused(run_ranks):
    told = "decay of WeightAverage must be equal on every rank, got [0.5, 0.75]"
    assert run_ranks(_another_decay, 2) == [told, told]
