"""Comparison of the ranks that torchrun has started, on one machine or many: `megamix doctor --nodes`.

They meet in the launcher's store, so that ranks that cannot reach each other in any other way are named.
"""

from __future__ import annotations

import datetime
import os
import statistics
import time
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import Store, rendezvous  # type: ignore[attr-defined]  # not in its __all__

from megamix.comm.topology import local_device, meet_ranks
from megamix.launch.liveness import Board, names
from megamix.tools.doctor import ranks
from megamix.tools.doctor.finding import Finding, found, not_here
from megamix.tools.doctor.host import judge_hostname, probe_hostname
from megamix.tools.doctor.measured import judge_shares

_LIMIT_S = 60.0  # seconds until the ranks have met, and again until they have measured
_SENT = 1 << 24  # bytes sent over each link
Record = tuple[str, dict[str, bool]]  # the machine's name, and whether each of its addresses is its own


def examine_nodes() -> list[Finding]:
    """Examine the ranks that torchrun has started. Every rank must call it; the first one returns all findings."""
    findings = []
    try:
        store, rank, size = next(rendezvous("env://", timeout=datetime.timedelta(seconds=_LIMIT_S)))
        findings += compare_ranks(store, rank, size, probe_hostname(), _LIMIT_S)
        # Otherwise NCCL would end this process at a collective that hangs, and with it all findings.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
        meet_ranks(local_device(), _LIMIT_S)
        findings += measure_links(store, rank, size, _LIMIT_S)
        if size > 1:
            dist.destroy_process_group()
    except (RuntimeError, ValueError) as error:
        findings.append(found("reached", str(error).partition("\n")[0], True))
    return findings


def compare_ranks(store: Store, rank: int, size: int, own: Record, limit_s: float) -> list[Finding]:
    """Return the machines whose clocks differ, or whose names have no usable address. Every rank must call it.

    Raises: RuntimeError naming ranks that do not answer within `limit_s`.
    """
    board, told = Board(store, limit_s), [f"record {number}" for number in range(size)]
    board.put(told[rank], own)
    if rank == 0:
        board.put("silent", board.missing(told))
    start_s = time.time()
    if not board.wait(["silent"], Board.grace_s):
        raise RuntimeError("rank 0 does not answer")
    board.put(f"time {rank}", time.time())
    if silent := board.read("silent"):
        raise RuntimeError(f"{names(silent)} of {size} did not answer in {limit_s:.0f} s")
    if rank > 0:
        return []
    board.wait(at := [f"time {number}" for number in range(size)])
    times, end_s = [board.read(key) for key in at], time.time()
    apart = [max(0.0, start_s - at_s, at_s - end_s) for at_s in times]
    return judge_records([board.read(key) for key in told], apart)


def judge_records(records: Sequence[Record], apart: Sequence[float]) -> list[Finding]:
    """Judge the ranks' records.

    `apart`: the least seconds by which each rank's clock differs from the first rank's.
    """
    addresses = dict(records)
    late = {host: f"{host} by {off_s:.1f} s" for (host, _), off_s in zip(records, apart, strict=True) if off_s > 1}
    named = [judge_hostname(host, own, several=len(addresses) > 1) for host, own in addresses.items()]
    wrong = [one for one in named if one.verdict != "ok"]
    return [found("clocks", ", ".join(late.values()) or "together", bool(late)), *(wrong or named[:1])]


def measure_links(store: Store, rank: int, size: int, limit_s: float) -> list[Finding]:
    """Compare the ranks' sums with those in rank order, and name the slowest link. Every rank must call it."""
    board, keys = Board(store, limit_s), [f"measured {number}" for number in range(size)]
    board.put(keys[rank], (probe_hostname()[0], ranks.sums_off(), ranks.seconds_by_source(_SENT)))
    if rank > 0:
        return []
    if silent := board.missing(keys):
        raise RuntimeError(f"{names(silent)} of {size} measured nothing in {limit_s:.0f} s")
    hosts, sums, seconds = zip(*(board.read(key) for key in keys), strict=True)
    reached = found("reached", f"{size} rank(s) on {len({*hosts})} machine(s)", False)
    return [reached, judge_shares("collectives", sums), judge_pairs(hosts, seconds)]


def judge_pairs(hosts: Sequence[str], seconds: Sequence[Sequence[tuple[int, float]]]) -> Finding:
    """Name the slowest pair of ranks, among pairs on two machines if there are several.

    `seconds`: a list for each rank, of (source, seconds) of every other rank's message.
    """
    taken = {(source, to): value for to, row in enumerate(seconds) for source, value in row}
    apart = {pair: value for pair, value in taken.items() if hosts[pair[0]] != hosts[pair[1]]} or taken
    if not apart:
        return not_here("slowest link", "there is one rank")
    (source, to), slowest = max(apart.items(), key=lambda item: item[1])
    usual = statistics.median_low(apart.values())
    rates = f"{_SENT / slowest / 1e9:.2f} GB/s, usual {_SENT / usual / 1e9:.2f}"
    seen = f"rank {source} on {hosts[source]} to rank {to} on {hosts[to]}: {rates}"
    return found("slowest link", seen, slowest > 2 * usual)
