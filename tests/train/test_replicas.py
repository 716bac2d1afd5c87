"""Whoever has memory that flips bits: a bit that differs in any copy of any parameter is found and named on all ranks;
so is a counter or a state of any loss-scale rule, with its values; undamaged copies are never accused. Without half
parameters between steps, counters and loss scale are still compared.
"""

import random

import pytest
import torch
import torch.distributed as dist

import megamix
from megamix import Precision
from megamix.train import replicas
from megamix.train.replicas import DamagedMemory, check_replicas, shard_hashes
from tests.builders import loss_of, make_batch, make_engine, train_steps
from tests.conftest import FULL

TRIALS = 50 if FULL else 12  # trials for each of two dtypes
KINDS = "Static", "Dynamic", "Headroom", "Torch", "Megatron", "DeepSpeed"
RULES = [getattr(megamix, f"{kind}LossScale") for kind in KINDS]
CHECKS = 100 if FULL else 5  # checks without a change, for each rule
COUNTERS = {"plan.cursor": 40, "plan.waiting": [7, 2**60], "plan.last_applied_scale": 256.0}


def _trained(dtype, steps=3, rule=megamix.StaticLossScale, shard="states"):
    engine = make_engine(precision=Precision(dtype, loss_scale=rule(2.0**8)), shard=shard, bucket_size=1500)
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
        if rng.random() < 0.5:
            damaged, values, bit = victim, bucket.params, rng.randrange(8 * dtype.itemsize)
            kind = "half parameter"
        else:
            values, bit, kind = bucket.master, _bit_of_the_cast(dtype, bucket, element, rng), "master of"
            damaged, element = divmod(element, shard_numel)
        for what in (f"rank {damaged}: the {kind} {slot.spec.name}", "clean"):
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


def _skips_one_and_counts_otherwise(shard):
    engine = _trained(torch.float16, shard=shard)
    engine.backward(loss_of(engine.module, make_batch(9, 0, 0)) * float("inf"))
    assert engine.step().found_inf
    rank = dist.get_rank()
    lists = [7, 2**60 + rank], [7] * rank
    said = [_verdict(engine), *(_verdict(engine, COUNTERS | {"plan.waiting": numbers}) for numbers in lists)]
    engine.applied_updates += rank
    return [*said, _verdict(engine)]


@pytest.mark.parametrize("shard", ["states", "parameters"])  # without a half parameter between steps
def test_after_a_skipped_step_nothing_is_accused_but_counters_with_the_values_that_differ(run_ranks, shard):
    first, second = run_ranks(_skips_one_and_counts_otherwise, 2, shard)
    assert first == second
    assert [said.removeprefix("memory does not hold what was written: ") for said in first] == [
        "clean",
        f"plan.waiting[1]: {2**60} on rank 0 and {2**60 + 1} on rank 1",
        "the length of plan.waiting: 0 on rank 0 and 1 on rank 1",
        "applied_updates: 3 on rank 0 and 4 on rank 1",
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
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


def _change_each_counter(rule, victim):
    """Return the verdicts without a change, and for each counter and state (its name, the error after one
    bit changed).
    """
    engine = _trained(torch.float16, 2, rule)
    clean = {_verdict(engine, COUNTERS) for _ in range(CHECKS)}
    state = {"applied_updates": engine.applied_updates, "skipped_steps": engine.skipped_steps}
    state |= {f"loss_scale.{name}": getattr(engine.loss_scale, name) for name in engine.loss_scale.state_names}
    outcomes = []
    for name, tensor in state.items():
        element = tensor.numel() // 2
        for what in (f"{name}[{element}]" if tensor.dim() else name, "clean"):
            if engine.topology.world.rank == victim:
                _flip(tensor.view(-1), element, 3)
            outcomes.append((what, _verdict(engine, COUNTERS)))
    return clean, outcomes


@pytest.mark.parametrize("size", [2, 3])
def test_a_counter_or_a_state_of_the_loss_scale_that_differs_is_found_and_named(run_ranks, size):
    for number, rule in enumerate(RULES if FULL else RULES[size - 2 :: 2]):
        answers = run_ranks(_change_each_counter, size, rule, victim := number % size)
        assert all(answer == answers[0] for answer in answers)
        clean, outcomes = answers[0]
        assert clean == {"clean"}, rule
        assert len(outcomes) == 2 * (2 + len(rule.state_names))
        others = [str(rank) for rank in range(size) if rank != victim]
        for name, said in outcomes:
            told = f"memory does not hold what was written: {name}: "
            assert said == "clean" if name == "clean" else said.startswith(told), (name, said)
            assert name == "clean" or f" on rank {victim}" in said, said
            assert name == "clean" or f" on rank{'s' * (size > 2)} {', '.join(others)}" in said, said


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
    monkeypatch.setattr("megamix.base.constants.HASH_CHUNK", 128)
    assert torch.equal(shard_hashes(full, 3, torch.bfloat16), whole)
