"""`megamix doctor --nodes` names silent ranks, machines whose clocks are apart or whose name is no address, and the
slowest link, such as one that the kernel slows down.
"""

import os
import socket
import stat
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch.distributed as dist

from megamix.cli import main
from megamix.tools.doctor import nodes
from megamix.tools.doctor.host import refusal

HERE = ("node0", {"10.0.0.1": True})
THERE = ("node1", {"10.0.0.2": True})


def compared(*records):
    store, size = dist.HashStore(), len(records)
    with ThreadPoolExecutor(len(records)) as threads:
        told = threads.map(
            lambda rank: nodes.compare_ranks(store, rank, size, records[rank], 30.0), range(len(records))
        )
        first, *others = told
    assert not any(others)
    return first


def test_ranks_whose_clocks_and_names_are_right_are_told_so():
    findings = compared(HERE, HERE, THERE)
    assert {one.verdict for one in findings} == {"ok"}


def test_clocks_and_names_of_machines_are_compared():
    records = [HERE, HERE, THERE]
    (wrong,) = [one for one in nodes.judge_records(records, [0.0, 0.0, 7.25]) if one.verdict != "ok"]
    assert (wrong.check, wrong.seen) == ("clocks", "node1 by 7.2 s")
    records = [HERE, ("node1", {"127.0.1.1": True})]
    (wrong,) = [one for one in nodes.judge_records(records, [0.0, 0.0]) if one.verdict != "ok"]
    assert (wrong.check, wrong.seen) == ("hostname", "node1 is 127.0.1.1")


def test_a_clock_that_is_apart_is_measured():
    store, offsets = dist.HashStore(), {0: 0.0, 1: -100.0}
    real = nodes.time.time

    def tell(rank):
        return nodes.compare_ranks(Later(store, offsets[rank]), rank, 2, (HERE, THERE)[rank], 30.0)

    class Later:
        """Store whose rank reads another clock."""

        def __init__(self, store, offset):
            self.store, self.offset = store, offset

        def set(self, key, value):
            self.store.set(key, str(float(value) + self.offset) if key.startswith("time ") else value)

        def __getattr__(self, name):
            return getattr(self.store, name)

    start_s = real()
    with ThreadPoolExecutor(2) as threads:
        findings, _ = threads.map(tell, range(2))
    (wrong,) = [one for one in findings if one.verdict != "ok"]
    by = float(wrong.seen.removeprefix("node1 by ").removesuffix(" s"))
    assert 100.0 - (real() - start_s) - 0.1 <= by <= 100.1


def test_a_silent_rank_is_named():
    store = dist.HashStore()
    store.set("record 1", "said in time")
    with pytest.raises(RuntimeError, match="rank 2 of 3 did not answer in 0 s"):
        nodes.compare_ranks(store, 0, 3, HERE, 0.1)


def seconds(size, slow, value):
    """Return each rank's seconds by source; those of one pair are `value`."""
    others = [[source for source in range(size) if source != to] for to in range(size)]
    return [[(one, value if (one, to) == slow else 0.1) for one in row] for to, row in enumerate(others)]


def test_the_slowest_link_is_named():
    wrong = nodes.judge_pairs(["node0", "node1", "node2", "node3"], seconds(4, (1, 0), 0.5))
    assert wrong.verdict == "slow"
    assert wrong.seen == "rank 1 on node1 to rank 0 on node0: 0.03 GB/s, usual 0.17"
    within = nodes.judge_pairs(["node0", "node0", "node1", "node1"], seconds(4, (1, 0), 0.9))
    assert "rank 1 on node0" not in within.seen
    assert within.verdict == "ok"
    assert nodes.judge_pairs(["node0"], [[]]).verdict == "does not apply"


def _links():
    store = dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
    with mock.patch.object(nodes, "_SENT", 1024):
        return nodes.measure_links(store, dist.get_rank(), dist.get_world_size(), 30.0)


def test_ranks_measure_their_links(run_ranks):
    first, other = run_ranks(_links, 2)
    assert [one.check for one in first] == ["reached", "collectives", "slowest link"]
    assert [one.verdict for one in first[:2]] == ["ok", "ok"]
    assert other == []


_PACE, _ANY_PACE = 47, -1  # SO_MAX_PACING_RATE of socket(7), in bytes/s


def _shaped_links(pair):
    """Return every rank's findings on links, of which the kernel slows down one pair's, both ways."""
    sockets = [
        socket.socket(fileno=os.dup(number)) for number in map(int, os.listdir("/proc/self/fd")) if _is_socket(number)
    ]
    ends = [end for end in sockets if end.family == socket.AF_INET and refusal(end.getpeername) == ""]
    of_rank = [None] * dist.get_world_size()
    dist.all_gather_object(of_rank, [end.getsockname() for end in ends])
    paced = [
        end for end in ends for rank, other in (pair, pair[::-1])
        if dist.get_rank() == rank and end.getpeername() in of_rank[other]
    ]  # fmt: skip
    assert len(paced) == (dist.get_rank() in pair)
    store = dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
    try:
        for end in paced:
            end.setsockopt(socket.SOL_SOCKET, _PACE, 1 << 20)
        with mock.patch.object(nodes, "_SENT", 1 << 16):
            return nodes.measure_links(store, dist.get_rank(), dist.get_world_size(), 30.0)
    finally:
        for end in paced:
            end.setsockopt(socket.SOL_SOCKET, _PACE, _ANY_PACE)


def _is_socket(number):
    try:
        return stat.S_ISSOCK(os.fstat(number).st_mode)
    except OSError:  # the descriptor of the listing itself, closed by now
        return False


def test_a_link_that_the_kernel_slows_down_is_named(run_ranks):
    slowest = run_ranks(_shaped_links, 4, (1, 2))[0][-1]
    assert (slowest.check, slowest.verdict) == ("slowest link", "slow")
    host = socket.gethostname()
    pairs = [f"rank {a} on {host} to rank {b} on {host}: 0.00 GB/s" for a, b in ((1, 2), (2, 1))]
    assert slowest.seen.partition(",")[0] in pairs


def test_who_cannot_meet_the_first_rank_is_told(monkeypatch, capsys):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["doctor", "--nodes"]) == 2
    assert "--nodes: no launcher has started ranks; write on every node torchrun " in capsys.readouterr().err
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    with mock.patch.object(nodes, "_LIMIT_S", 0.1):
        assert main(["doctor", "--nodes"]) == 1
    assert ended == [1]
    first, fix, _ = capsys.readouterr().out.splitlines()
    assert first.startswith("BROKEN reached")
    assert "open MASTER_PORT" in fix


def test_a_group_that_failed_is_left_as_it_is(monkeypatch, capsys):
    def fails(*_):
        raise RuntimeError("NCCL error: unhandled system error")

    calls = []
    monkeypatch.setattr(nodes, "rendezvous", lambda *_, **__: iter([(None, 1, 2)]))
    monkeypatch.setattr(nodes, "compare_ranks", lambda *_: [])
    handling = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.setenv(handling, "")  # sets it, so that the old value comes back
    monkeypatch.delenv(handling)
    monkeypatch.setattr(nodes, "meet_ranks", lambda *_: calls.append(f"by {handling}={os.environ[handling]}"))
    monkeypatch.setattr(nodes, "measure_links", fails)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("destroyed"))
    monkeypatch.setattr(os, "_exit", lambda status: calls.append(f"ended at once with {status}"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["doctor", "--nodes"]) == 1
    assert calls == [f"by {handling}=2", "ended at once with 1"]  # hangs are errors, not the process's end
    assert capsys.readouterr().out.startswith("BROKEN reached         NCCL error: unhandled system error")


def test_one_rank_alone_is_examined(monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    for name, value in {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(nodes, "probe_hostname", lambda: HERE)
    assert main(["doctor", "--nodes"]) == 0
    out = capsys.readouterr().out
    assert "ok     reached         1 rank(s) on 1 machine(s) (expected: every rank)\n" in out
    assert "-      slowest link    does not apply: there is one rank\n" in out
