"""Silent damage: whether every rank still holds the same half parameters and counters, and halves are the casts of
masters.

Every rank holds each element in half, and its owner holds it in FP32 as well. Every rank holds all counters and the
loss scale. A memory fault, a wrong kernel or a lost message that changes one copy shows as a difference. Values without
a second copy cannot be checked: the digits of a master that its cast drops, and the optimizer's states. With
`Sharding(shard="parameters")` no element has a second copy between steps, so only counters and loss scale are compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import ItemsView, Mapping, Sequence

import torch
from torch import Tensor

from megamix.base import constants
from megamix.comm.collectives import Collectives, gather_json
from megamix.launch.liveness import names
from megamix.mixed_precision.bucket import Bucket
from megamix.mixed_precision.engine import ShardedEngine
from megamix.mixed_precision.flat_layout import ROW
from megamix.mixed_precision.guards.refusals import fingerprint

Numbers = float | Sequence[float]  # host counters, equal on every rank

_SHOWN = 8  # most differences shown
_MIX = -7046029254386353131  # 2^64 divided by the golden ratio, made odd, as a signed number


class DamagedMemory(Exception):
    """Memory that does not hold what was written; the message names ranks and parameters."""


def check_replicas(engine: ShardedEngine, counters: Mapping[str, Numbers] | None = None) -> None:
    """Compare every rank's half parameters with the masters, and every rank's counters and loss scale with the other
    ranks'. Every rank must call it, after the same step.

    `counters`: the caller's own counters by name, which must be equal on every rank.
    It costs one pass over the half parameters and this rank's masters, one gather of 8 bytes per bucket from its
    owners, one gather of two such numbers from every rank, and a wait for the device.
    Raises: DamagedMemory on all ranks alike, after a closer look at every element.
    """
    engine.check_module()
    engine.wait()
    agree = torch.stack([_copies_agree(engine, *shared) for shared in _buckets_by_owners(engine)]).all()
    state = _state(engine, counters or {})
    told = torch.full_like(agree, int(fingerprint(state)[:15], 16), dtype=torch.int64)
    row = torch.stack([agree.long(), told])
    by_rank = engine.world.table(row).tolist()
    problems = []
    if wrong := [rank for rank, (ok, _) in enumerate(by_rank) if not ok]:
        problems.append(_describe(engine, wrong))
    if len({state for _, state in by_rank}) > 1:
        states = gather_json(engine.world, state, engine.device)
        problems += [line for name in state if (line := _disagreement(name, [values[name] for values in states]))]
    if problems:
        raise DamagedMemory(f"memory does not hold what was written: {'; '.join(problems)}")


def _state(engine: ShardedEngine, counters: Mapping[str, Numbers]) -> dict[str, Numbers]:
    """Return everything that must be equal on all ranks; waits for the device."""
    scale = {f"loss_scale.{name}": getattr(engine.loss_scale, name) for name in engine.loss_scale.state_names}
    state = {"applied_updates": engine.applied_updates, "skipped_steps": engine.skipped_steps, **scale}
    return {**{name: value.tolist() for name, value in state.items()}, **counters}


def _buckets_by_owners(engine: ShardedEngine) -> ItemsView[Collectives, list[Bucket]]:
    """Return the buckets by their owners, in the same order on all of these owners."""
    found = dict[Collectives, list[Bucket]]()
    for bucket in engine.buckets:
        found.setdefault(bucket.owners, []).append(bucket)
    return found.items()


def _copies_agree(engine: ShardedEngine, owners: Collectives, buckets: list[Bucket]) -> Tensor:
    """Return whether this rank's half parameters are the casts of their owners' masters: bool (). All owners must call
    it.
    """
    if engine.plan.sharding.shard == "parameters":  # no second copy exists
        return torch.ones((), dtype=torch.bool, device=engine.device)
    dtype = engine.plan.precision.dtype
    copies = [shard_hashes(bucket.params, owners.axis.size, dtype) for bucket in buckets]
    own = torch.cat([shard_hashes(bucket.master, 1, dtype) for bucket in buckets])
    return (torch.stack(copies) == owners.table(own).T).all()


def shard_hashes(flat: Tensor, shards: int, dtype: torch.dtype) -> Tensor:
    """Return a hash of the bits of each of `shards` equal parts of `flat`, cast to `dtype`.

    It is a sum modulo 2^64 of 64-bit words, each folded and multiplied by an odd number that depends on its place. Any
    difference within one word always changes it; elements that changed places do, except with a chance of about 2^-30.
    Shapes: flat (numel,), a multiple of 64 x shards -> INT64 (shards,).
    """
    chunk = constants.HASH_CHUNK if flat.is_cpu else constants.HASH_CHUNK_GPU
    keys = _odd_keys(ROW * dtype.itemsize // 8, flat.device)
    rows = [_row_hashes(part.to(dtype).view(torch.int64), keys) for part in torch.split(flat, chunk)]
    by_shard = torch.cat(rows).view(shards, -1)
    # Other numbers than those of the words: otherwise word i of row j would count like word j of row i.
    return (by_shard * _odd_keys(ROW + by_shard.shape[1], flat.device)[ROW:]).sum(1)


def _row_hashes(words: Tensor, keys: Tensor) -> Tensor:
    """Return the hash of each row. Shapes: words INT64 (rows * n,), keys INT64 (n,) -> INT64 (rows,)."""
    # A word's top bit times any odd number is that top bit, so two of them would cancel. Therefore it is folded down
    # first.
    folded = (words >> 32).bitwise_and_(0xFFFFFFFF).bitwise_xor_(words)
    return folded.view(-1, keys.numel()).mul_(keys).sum(1)


def _odd_keys(count: int, device: torch.device) -> Tensor:
    """Return odd numbers without a pattern: INT64 (count,). Odd, because a product with an even number drops a word's
    top bit.
    """
    mixed = torch.arange(1, count + 1, device=device) * _MIX
    return ((mixed ^ (mixed >> 32)) * _MIX) | 1


def _describe(engine: ShardedEngine, ranks: list[int]) -> str:
    """Describe which parameters differ, on the ranks whose hashes differ. Every rank must call it."""
    dtype = engine.plan.precision.dtype
    found = [line for shared in _buckets_by_owners(engine) for line in _differences(dtype, *shared)]
    # A rank knows differences only in buckets that it owns a share of. Duplicates are dropped.
    by_rank = gather_json(engine.world, found[:_SHOWN], engine.device)
    lines = list(dict.fromkeys(line for told in by_rank for line in told))
    shown = "; ".join(lines[:_SHOWN]) or "no element differs at a second look"
    return f"{names(ranks)} differ{'s' if len(ranks) == 1 else ''} from the masters; {shown}"


def _differences(dtype: torch.dtype, owners: Collectives, buckets: list[Bucket]) -> list[str]:
    """Return a phrase for each wrong copy or master of these buckets. All their owners must call it."""
    size, bits = owners.axis.size, torch.int32 if dtype.itemsize == 4 else torch.int16
    pieces, differs = [], []
    for bucket in buckets:
        master = owners.gather(bucket.master).to(dtype).view(bits).view(size, -1)
        unequal = master != bucket.params.view(bits).view(size, -1)
        for owner in range(size):
            for piece in bucket.plan.shard_pieces(owner):
                pieces.append((owner, piece.spec.name))
                differs.append(unequal[owner, piece.start : piece.end].any())
    by_rank = owners.table(torch.stack(differs).to(torch.uint8)).bool().tolist()
    numbers, found = owners.axis.ranks, []
    for place, (owner, name) in enumerate(pieces):
        wrong = [rank for rank in range(size) if by_rank[rank][place]]
        if len(wrong) == size:  # a lone owner cannot tell which of its two copies is wrong
            which = f"the master of {name}" if size > 1 else f"{name} (half parameter or master)"
            found.append(f"rank {numbers[owner]}: {which}")
        else:
            found += [f"rank {numbers[rank]}: the half parameter {name}" for rank in wrong]
    return found


def _disagreement(name: str, by_rank: Sequence[Numbers]) -> str:
    """Return a phrase with a counter's values at the first place where ranks differ; empty if all are equal."""
    rows = [numbers if isinstance(numbers, Sequence) else [numbers] for numbers in by_rank]
    if len({len(row) for row in rows}) > 1:
        return _who_holds_what(f"the length of {name}", [len(row) for row in rows])
    for place, values in enumerate(zip(*rows, strict=True)):
        if len({repr(value) for value in values}) > 1:  # 0.0 and -0.0 differ, NaN equals NaN
            return _who_holds_what(f"{name}[{place}]" if isinstance(by_rank[0], Sequence) else name, values)
    return ""


def _who_holds_what(what: str, by_rank: Sequence[float]) -> str:
    groups = defaultdict[str, list[int]](list)
    for rank, value in enumerate(by_rank):
        groups[repr(value)].append(rank)
    return f"{what}: {' and '.join(f'{value} on {names(ranks)}' for value, ranks in groups.items())}"
