"""Silent damage: does every rank still hold the same half parameters, and are they the casts of their masters?

Every rank holds each element in half, and its owner holds it in FP32 as well. What a memory fault, a wrong kernel or a
lost message changes in one of them shows as a difference. What has no second copy cannot be checked: the digits of a
master that its cast drops, and the optimizer's states.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megamix.mixed_precision.engine import ShardedEngine
from megamix.mixed_precision.flat_layout import ROW

_CHUNK = 1 << 18  # elements: on a CPU the second pass finds what the first left in cache
_CHUNK_GPU = 1 << 24  # a GPU's launches cost more than its cache saves; bounds the memory of a check
_SHOWN = 8  # of what differs
_TEXT = 4096  # bytes
_MIX = -7046029254386353131  # 2^64 divided by the golden ratio, made odd, as a signed number


class DamagedError(Exception):
    """Memory does not hold what was written; the message names ranks and parameters."""


def check_replicas(engine: ShardedEngine) -> None:
    """Compare every rank's half parameters with the masters. Every rank must call it, after the same step.

    One pass over the half parameters and this rank's masters, one gather of a number of 8 bytes for each bucket from
    its owners, one of a byte from every rank, one read of the device.
    Raises: DamagedError on all ranks alike, after a closer look at every element.
    """
    engine.half_params.check()
    engine.param_gather.wait_all()
    agree = torch.stack([_copies_agree(engine, buckets) for buckets in _buckets_by_owners(engine)]).all()
    by_rank = engine.collectives.table(agree.view(1).to(torch.uint8))[:, 0].bool().tolist()
    if not all(by_rank):
        ranks = [rank for rank, ok in enumerate(by_rank) if not ok]
        raise DamagedError(f"memory does not hold what was written: {_describe(engine, ranks)}")


def _buckets_by_owners(engine: ShardedEngine) -> list[list[int]]:
    """The buckets of the same owners together, in the same order on all of these."""
    found: dict[int, list[int]] = {}
    for index, bucket in enumerate(engine.layout.buckets):
        found.setdefault(bucket.owners, []).append(index)
    return list(found.values())


def _copies_agree(engine: ShardedEngine, buckets: list[int]) -> Tensor:
    """Whether this rank's half parameters are the casts of their owners' masters: bool (). All owners must call it."""
    owners, dtype = engine.owners[buckets[0]], engine.half_params.dtype
    copies = [shard_hashes(engine.half_params.flat[index], owners.axis.size, dtype) for index in buckets]
    own = torch.cat([shard_hashes(engine.master_shard.master[index], 1, dtype) for index in buckets])
    masters = owners.table(own).T  # (buckets, ranks), as the copies
    return (torch.stack(copies) == masters).all()


def shard_hashes(flat: Tensor, shards: int, dtype: torch.dtype) -> Tensor:
    """A hash of the bits of each of `shards` equal parts of `flat`, as they are in `dtype`.

    A sum modulo 2^64 of 64-bit words, each folded, times an odd number that depends on its place: any difference within
    one word changes it, always; elements that changed places do, but for a chance of about 2^-30.
    Shapes: flat (numel,), a multiple of 64 x shards -> INT64 (shards,).
    """
    chunk = _CHUNK if flat.is_cpu else _CHUNK_GPU
    keys = _odd_keys(ROW * dtype.itemsize // 8, flat.device)
    rows = [_row_hashes(part.to(dtype).view(torch.int64), keys) for part in torch.split(flat, chunk)]
    by_shard = torch.cat(rows).view(shards, -1)
    # Other numbers than those of the words: else word i of row j would count as word j of row i does.
    return (by_shard * _odd_keys(ROW + by_shard.shape[1], flat.device)[ROW:]).sum(1)


def _row_hashes(words: Tensor, keys: Tensor) -> Tensor:
    """Shapes: words INT64 (rows * n,), keys INT64 (n,) -> INT64 (rows,)."""
    # A word's top bit times any odd number is that top bit: two of them would cancel. So fold it down first.
    folded = (words >> 32).bitwise_and_(0xFFFFFFFF).bitwise_xor_(words)
    return folded.view(-1, keys.numel()).mul_(keys).sum(1)


def _odd_keys(count: int, device: torch.device) -> Tensor:
    """Odd numbers without a pattern: INT64 (count,). Odd, because the product of an even one drops a word's top bit."""
    mixed = torch.arange(1, count + 1, device=device) * _MIX
    return ((mixed ^ (mixed >> 32)) * _MIX) | 1


def _describe(engine: ShardedEngine, ranks: list[int]) -> str:
    """Which parameters differ, on the ranks whose hashes do. Every rank must call it."""
    found = [line for buckets in _buckets_by_owners(engine) for line in _differences(engine, buckets)]
    # A rank knows only of what it owns a share of, and the first one speaks.
    text = "\n".join(found[:_SHOWN]).encode()[:_TEXT].ljust(_TEXT)
    row = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(engine.applied_updates.device)
    texts = [bytes(line).decode(errors="replace").strip() for line in engine.collectives.table(row).tolist()]
    lines = list(dict.fromkeys(line for text in texts for line in text.splitlines()))
    shown = "; ".join(lines[:_SHOWN]) or "no element differs at a second look"
    return f"rank {', '.join(map(str, ranks))} differ{'s' if len(ranks) == 1 else ''} from the masters; {shown}"


def _differences(engine: ShardedEngine, buckets: list[int]) -> list[str]:
    """A phrase for each wrong copy or master of these buckets. Their owners must all call it."""
    owners, dtype = engine.owners[buckets[0]], engine.half_params.dtype
    size, bits = owners.axis.size, torch.int32 if dtype.itemsize == 4 else torch.int16
    pieces, differs = [], []
    for index in buckets:
        master = engine.master_shard.gather(index).to(dtype).view(bits)
        unequal = (master != engine.half_params.flat[index].view(bits)).view(size, -1)
        for owner in range(size):
            for piece in engine.layout.buckets[index].shard_pieces(owner):
                pieces.append((owner, piece.name))
                differs.append(unequal[owner, piece.start : piece.end].any())
    by_rank = owners.table(torch.stack(differs).to(torch.uint8)).bool().tolist()
    numbers, found = owners.axis.ranks, []
    for index, (owner, name) in enumerate(pieces):
        wrong = [rank for rank in range(size) if by_rank[rank][index]]
        if len(wrong) == size:  # alone, a rank cannot tell which of its two copies it is
            which = f"the master of {name}" if size > 1 else f"{name} (half parameter or master)"
            found.append(f"rank {numbers[owner]}: {which}")
        else:
            found += [f"rank {numbers[rank]}: the half parameter {name}" for rank in wrong]
    return found
