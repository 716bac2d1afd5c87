"""Whoever has memory that flips bits: a bit that differs in any copy of any parameter is found and named on all ranks;
so is a counter or a state of any loss-scale rule, with its values; undamaged copies are never accused. Without half
parameters between steps, counters and loss scale are still compared.
"""

import random

import pytest
import torch
import torch.distributed as dist

from megamix import (
    NAG,
    AdamW,
    DeepSpeedLossScale,
    DynamicLossScale,
    HeadroomLossScale,
    MegatronLossScale,
    Precision,
    StaticLossScale,
    TorchLossScale,
)
from megamix.inspect import replicas
from megamix.inspect.replicas import DamagedMemory, check_replicas, shard_hashes
from tests.builders import loss_of, make_batch, make_engine, train_steps
from tests.conftest import FULL

pytestmark = pytest.mark.uncounted

HALF = (torch.float16, torch.bfloat16)
TRIALS = 50 if FULL else 12  # trials for each of two dtypes
RULES = {
    rule.__name__: rule
    for rule in (
        StaticLossScale, DynamicLossScale, HeadroomLossScale, TorchLossScale, MegatronLossScale, DeepSpeedLossScale
    )
}  # fmt: skip
OPTIMIZERS = {"AdamW": AdamW(lr=[0.01, 0.02, 0.03]), "NAG": NAG(lr=0.01)}
CHECKS = 100 if FULL else 5  # checks without a change, for each rule and optimizer
COUNTERS = {"plan.cursor": 40, "plan.waiting": [7, 2**60], "plan.last_applied_scale": 256.0}


def _trained(dtype, steps=3, optimizer=None, rule="StaticLossScale", shard="states"):
    precision = Precision(dtype, loss_scale=RULES[rule](2.0**8))
    engine = make_engine(None, optimizer, precision, shard=shard, bucket_size=1500)
    train_steps(engine, range(steps))
    return engine


def _verdict(engine, counters=None):
    try:
        check_replicas(engine, counters)
    except DamagedMemory as error:
        return str(error)
    return "clean"


def _flip(values, element, bit):
    """Flip one bit of one element in place; flipping twice restores it."""
    values.view(torch.uint8)[element * values.itemsize + bit // 8] ^= 1 << bit % 8


def _damage_and_check(dtype, shard, seeds):
    """Return for each seed (the damage, the error), and then the same for a check with the damage undone."""
    engine = _trained(dtype, shard=shard)
    engine.wait()
    rank, size = engine.topology.dp.rank, engine.topology.dp.size
    outcomes = []
    for seed in seeds:
        rng = random.Random(seed)
        victim, bucket = rng.randrange(size), rng.choice(engine.buckets)
        slot = rng.choice(bucket.plan.slots)
        element, shard_numel = rng.randrange(slot.start, slot.end), bucket.master.numel()
        half, name = rng.random() < 0.5, slot.spec.name
        if half:
            damaged, values, bit = victim, bucket.params, rng.randrange(8 * dtype.itemsize)
            done = f"rank {victim}: the half parameter {name}"
        else:
            bit = _bit_of_the_cast(dtype, bucket, element, rng)
            damaged, element = divmod(element, shard_numel)
            values = bucket.master
            done = f"rank {damaged}: the master of {name}"
        for what in (done, "clean"):
            if rank == damaged:
                _flip(values, element, bit)
            outcomes.append((what, _verdict(engine)))
    return outcomes


def _bit_of_the_cast(dtype, bucket, element, rng):
    """Return a bit of a master that its cast does not drop."""
    value = bucket.owners.gather(bucket.master).view(-1)[element].view(1)
    while True:
        flipped, bit = value.clone(), rng.randrange(32)
        _flip(flipped, 0, bit)
        halves = [copy.to(dtype).view(torch.int16) for copy in (value, flipped)]
        if not torch.equal(*halves):
            return bit


@pytest.mark.parametrize("shard", ["states", "gradients"])
@pytest.mark.parametrize(("dtype", "size"), [(torch.float16, 2), (torch.bfloat16, 3)])
def test_single_bits_are_found_and_named_and_clean_checks_pass(run_ranks, dtype, size, shard):
    answers = run_ranks(_damage_and_check, size, dtype, shard, range(TRIALS))
    assert all(answer == answers[0] for answer in answers)
    for done, said in answers[0]:
        assert (said == "clean") == (done == "clean"), (done, said)
        assert done == "clean" or said.endswith(f"; {done}"), (done, said)
    assert len(answers[0]) == 2 * TRIALS


def _counts_one_more():
    engine = _trained(torch.float16, shard="parameters")
    before = _verdict(engine)
    engine.applied_updates += dist.get_rank()
    return before, _verdict(engine)


def test_where_no_half_parameter_is_kept_counters_are_compared(run_ranks):
    answers = run_ranks(_counts_one_more, 2)
    assert answers[0] == answers[1]
    before, said = answers[0]
    assert before == "clean"
    assert said.endswith("applied_updates: rank 0: 3, rank 1: 4"), said


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
def test_a_rank_alone_finds_that_its_two_copies_differ(dtype):
    engine = _trained(dtype)
    assert _verdict(engine) == "clean"
    _flip(engine.buckets[0].master, 3, 31)
    name = engine.buckets[0].plan.slots[0].spec.name
    assert _verdict(engine).endswith(f"; rank 0: {name} (half parameter or master)")


def test_counters_are_gathered_only_where_they_differ(monkeypatch):
    """Whoever checks often: a check is two small gathers of hashes."""
    engine = _trained(torch.float16, 1)
    monkeypatch.setattr(replicas, "gather_json", None)
    check_replicas(engine, COUNTERS)


def test_digits_of_a_master_that_the_cast_drops_have_no_second_copy():
    engine = _trained(torch.bfloat16)
    engine.buckets[0].master.view(torch.int32)[3] &= -(2**16)
    _flip(engine.buckets[0].master, 3, 0)
    engine.buckets[0].params[3] = engine.buckets[0].master[3]
    assert _verdict(engine) == "clean"


def _after_an_overflow():
    engine = _trained(torch.float16)
    engine.backward(loss_of(engine.module, make_batch(9, 0, 0)) * float("inf"))
    assert engine.step().found_inf
    return _verdict(engine)


def test_after_a_skipped_step_nothing_is_accused(run_ranks):
    assert run_ranks(_after_an_overflow, 2) == ["clean"] * 2


def _change_each_counter(rule, optimizer, victim):
    """Return the verdicts without a change, and for each counter and state (its name, the error after one
    bit changed).
    """
    engine = _trained(torch.float16, 2, OPTIMIZERS[optimizer], rule)
    rank = engine.topology.world.rank
    clean = {_verdict(engine, COUNTERS) for _ in range(CHECKS)}
    state = {"applied_updates": engine.applied_updates, "skipped_steps": engine.skipped_steps}
    state |= {f"loss_scale.{name}": getattr(engine.loss_scale, name) for name in engine.loss_scale.state_names}
    outcomes = []
    for name, tensor in state.items():
        element = tensor.numel() // 2
        if rank == victim:
            _flip(tensor.view(-1), element, 3)
        outcomes.append((f"{name}[{element}]" if tensor.dim() else name, _verdict(engine, COUNTERS)))
        if rank == victim:
            _flip(tensor.view(-1), element, 3)
    clean.add(_verdict(engine, COUNTERS))
    return clean, outcomes


@pytest.mark.parametrize("size", [2, 3])
def test_a_counter_or_a_state_of_the_loss_scale_that_differs_is_found_and_named(run_ranks, size):
    every = [(rule, optimizer) for rule in RULES for optimizer in OPTIMIZERS]
    for number, (rule, optimizer) in enumerate(every if FULL else every[size - 2 :: size]):
        answers = run_ranks(_change_each_counter, size, rule, optimizer, victim := number % size)
        assert all(answer == answers[0] for answer in answers)
        clean, outcomes = answers[0]
        assert clean == {"clean"}, (rule, optimizer)
        assert len(outcomes) == 2 + len(RULES[rule].state_names)
        for name, said in outcomes:
            assert said.startswith(f"memory does not hold what was written: {name}: rank "), (name, said)
            assert f"rank {victim}: " in said
            assert said.count("rank ") == (2 if size == 2 else 1), said  # two ranks have no majority
            assert (", all others: " in said) == (size == 3), said


def _changed_on_one_rank(victim):
    engine = _trained(torch.bfloat16, 1, OPTIMIZERS["AdamW"])
    mine = engine.topology.world.rank == victim
    said = [_verdict(engine, COUNTERS | change) if mine else _verdict(engine, COUNTERS) for change in (
        {"plan.cursor": 41}, {"plan.waiting": [7, 2**60 + 1]}, {"plan.waiting": []}, {"plan.last_applied_scale": 0.5}
    )]  # fmt: skip
    if mine:
        engine.applied_updates += 1000
    said.append(_verdict(engine))
    if mine:
        engine.applied_updates -= 1000
        _flip(engine.buckets[0].params, 3, 1)
        engine.skipped_steps += 1
    return [*said, _verdict(engine)]


def test_the_values_of_what_differs_are_told(run_ranks):
    said = run_ranks(_changed_on_one_rank, 3, 1)
    assert said[0] == said[1] == said[2]
    told = [line.removeprefix("memory does not hold what was written: ") for line in said[0]]
    assert told[:5] == [
        "plan.cursor: rank 1: 41, all others: 40",
        f"plan.waiting[1]: rank 1: {2**60 + 1}, all others: {2**60}",
        "the length of plan.waiting: rank 1: 0, all others: 2",
        "plan.last_applied_scale: rank 1: 0.5, all others: 256.0",
        "applied_updates: rank 1: 1001, all others: 1",
    ]
    assert told[5].startswith("rank 1 differs from the masters; rank 1: the half parameter ")
    assert told[5].endswith("; skipped_steps: rank 1: 1, all others: 0")


def test_every_bit_of_every_place_counts_and_so_does_the_place():
    torch.manual_seed(3)
    half = torch.randn(4 * 64).to(torch.float16)
    (whole,) = shard_hashes(half, 1, torch.float16).tolist()
    hashes = set()
    for element in range(half.numel()):
        for bit in range(16):
            _flip(half, element, bit)
            hashes.add(shard_hashes(half, 1, torch.float16).item())
            _flip(half, element, bit)
    for element in range(1, half.numel()):
        swapped = half.clone()
        swapped[[0, element]] = half[[element, 0]]
        hashes.add(shard_hashes(swapped, 1, torch.float16).item())
    assert len(hashes) == half.numel() * 17 - 1  # no two of them are equal
    assert whole not in hashes


def test_the_hash_of_a_part_does_not_depend_on_the_others_nor_on_how_it_is_read(monkeypatch):
    torch.manual_seed(3)
    full = torch.randn(6 * 64)
    whole = shard_hashes(full, 3, torch.bfloat16)
    parts = [shard_hashes(part, 1, torch.bfloat16) for part in full.view(3, -1)]
    assert torch.equal(whole, torch.cat(parts))
    monkeypatch.setattr("megamix.tuned.HASH_CHUNK", 128)
    assert torch.equal(shard_hashes(full, 3, torch.bfloat16), whole)
