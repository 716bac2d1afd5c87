"""`megamix doctor --nodes` names silent ranks, machines whose clocks are apart or whose name is no address, and the
slowest link, such as one that the kernel slows down.
"""

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import psutil
import pytest
import torch.distributed as dist

from megamix.cli.verbs import main
from megamix.tools.doctor import nodes

HERE = ("node0", {"10.0.0.1": True})
THERE = ("node1", {"10.0.0.2": True})


def wrong_of(findings):
    return [(one.check, one.seen) for one in findings if one.verdict != "ok"]


def test_clocks_and_names_of_machines_are_compared():
    assert wrong_of(nodes.judge_records([HERE, HERE, THERE], [0.0, 0.0, 7.25])) == [("clocks", "node1 by 7.2 s")]
    records = [HERE, ("node1", {"127.0.1.1": True})]
    assert wrong_of(nodes.judge_records(records, [0.0, 0.0])) == [("hostname", "node1 is 127.0.1.1")]


class Later:
    """Store whose rank reads another clock."""

    def __init__(self, store, offset):
        self.store, self.offset = store, offset

    def set(self, key, value):
        self.store.set(key, str(float(value) + self.offset) if key.startswith("time ") else value)

    def __getattr__(self, name):
        return getattr(self.store, name)


@pytest.mark.parametrize("apart", [0.0, 100.0])
def test_a_clock_that_is_apart_is_measured(apart):
    stores, start_s = [dist.HashStore()] * 2, time.time()
    stores.append(Later(stores[0], -apart))
    records = [HERE, HERE, THERE]
    with ThreadPoolExecutor(3) as threads:
        told = threads.map(lambda rank: nodes.compare_ranks(stores[rank], rank, 3, records[rank], 30.0), range(3))
        findings, *others = told
    assert others == [[], []]
    by = [float(seen.removeprefix("node1 by ").removesuffix(" s")) for _, seen in wrong_of(findings)]
    assert len(by) == (apart > 0)
    assert all(apart - (time.time() - start_s) - 0.1 <= one <= apart + 0.1 for one in by)


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


_PACE, _ANY_PACE = 47, -1  # SO_MAX_PACING_RATE of socket(7), in bytes/s


def _links(pair):
    """Return this rank's findings on links, of which the kernel slows down one pair's, both ways."""
    ends, of_rank = [end for end in psutil.Process().net_connections("tcp4") if end.raddr], [None] * 4
    dist.all_gather_object(of_rank, [end.laddr for end in ends])
    rank = dist.get_rank()
    theirs = of_rank[sum(pair) - rank] if rank in pair else []
    # A connection for each group that a case before this one has made, too.
    paced = [socket.socket(fileno=os.dup(end.fd)) for end in ends if end.raddr in theirs]
    assert (rank in pair) == bool(paced)
    store = dist.distributed_c10d._get_default_store()
    try:
        for one in paced:
            one.setsockopt(socket.SOL_SOCKET, _PACE, 1 << 20)
        with mock.patch.object(nodes, "_SENT", 1 << 16):
            return nodes.measure_links(store, rank, 4, 30.0)
    finally:
        for one in paced:
            one.setsockopt(socket.SOL_SOCKET, _PACE, _ANY_PACE)


def test_ranks_measure_their_links_and_name_one_that_the_kernel_slows_down(run_ranks):
    findings, *others = run_ranks(_links, 4, (1, 2))
    assert others == [[], [], []]
    checks = [("reached", "ok"), ("collectives", "ok"), ("slowest link", "slow")]
    assert [(one.check, one.verdict) for one in findings] == checks
    host = socket.gethostname()
    pairs = [f"rank {a} on {host} to rank {b} on {host}: 0.00 GB/s" for a, b in ((1, 2), (2, 1))]
    assert findings[-1].seen.partition(",")[0] in pairs


@pytest.fixture
def launched(monkeypatch):
    """Set what a launcher sets."""

    def launch(rank, size, port):
        for name, value in {"WORLD_SIZE": size, "RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))

    return launch


def test_who_cannot_meet_the_first_rank_is_told(monkeypatch, capsys, launched):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["doctor", "--nodes"]) == 2
    assert "--nodes: no launcher has started ranks; write on every node torchrun " in capsys.readouterr().err
    launched(1, 2, 1)
    with mock.patch.object(nodes, "_LIMIT_S", 0.1), mock.patch.object(os, "_exit") as ended:
        assert main(["doctor", "--nodes"]) == 1
    ended.assert_called_once_with(1)
    first, fix, _ = capsys.readouterr().out.splitlines()
    assert first.startswith("BROKEN reached")
    assert "open MASTER_PORT" in fix


def test_a_group_that_failed_is_left_as_it_is(monkeypatch, capsys, launched):
    calls, handling = [], "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.setattr(nodes, "rendezvous", lambda *_, **__: iter([(None, 1, 2)]))
    monkeypatch.setattr(nodes, "compare_ranks", lambda *_: [])
    monkeypatch.setenv(handling, "")  # sets it, so that the old value comes back
    monkeypatch.delenv(handling)
    monkeypatch.setattr(nodes, "meet_ranks", lambda *_: calls.append(f"by {handling}={os.environ[handling]}"))
    fails = mock.Mock(side_effect=RuntimeError("NCCL error: unhandled system error"))
    monkeypatch.setattr(nodes, "measure_links", fails)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("destroyed"))
    monkeypatch.setattr(os, "_exit", lambda status: calls.append(f"ended at once with {status}"))
    launched(1, 2, 1)
    assert main(["doctor", "--nodes"]) == 1
    assert calls == [f"by {handling}=2", "ended at once with 1"]  # hangs are errors, not the process's end
    assert capsys.readouterr().out.startswith("BROKEN reached         NCCL error: unhandled system error")


def test_one_rank_alone_is_examined(monkeypatch, capsys, launched):
    with socket.create_server(("127.0.0.1", 0)) as server:
        launched(0, 1, server.getsockname()[1])
    monkeypatch.setattr(nodes, "probe_hostname", lambda: HERE)
    assert main(["doctor", "--nodes"]) == 0
    out = capsys.readouterr().out
    assert "ok     reached         1 rank(s) on 1 machine(s) (expected: every rank)\n" in out
    assert "-      slowest link    does not apply: there is one rank\n" in out
