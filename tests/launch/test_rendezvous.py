"""Ranks of one machine meet in a store that only it can reach, whether the launcher, `verify` or the tests start them.
On many machines a port in use is reported at once, a machine 0 that nobody reaches after 20 s.
"""

import os
import socket
from unittest import mock

import pytest
import torch.distributed.run
from torch.distributed.elastic.rendezvous import RendezvousParameters

from megamix.base.machine import num_cores
from megamix.launch import rendezvous
from megamix.launch.rendezvous import BACKEND, create_handler, torchrun
from megamix.launch.torchrun import launch
from tests.network import listening


def _parameters(endpoint="", nodes=1):
    return RendezvousParameters(BACKEND, endpoint, "id", nodes, nodes)


@pytest.fixture(autouse=True)
def _no_interfaces_named(monkeypatch):
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS"):
        monkeypatch.setenv(variable, "")  # so that it comes back as it was
        monkeypatch.delenv(variable)


def test_the_agent_s_store_listens_on_loopback_and_its_ranks_find_nothing_of_those_before():
    before = listening(os.getpid())
    handler = create_handler(_parameters())
    met = handler.next_rendezvous()
    where = met.bootstrap_store_info
    assert listening(os.getpid()) - before == {("127.0.0.1", where.master_port)}
    assert where.master_addr == "127.0.0.1"
    assert (met.rank, met.world_size) == (0, 1)
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")
    met.store.set("key", "value")
    assert not handler.next_rendezvous().store.check(["key"])


@pytest.mark.parametrize(
    ("parameters", "want"),
    [
        (_parameters(nodes=2), "--nnodes: got 2, .* is for the ranks of one machine; leave --rdzv-backend out"),
        (_parameters("node0:29500"), "--rdzv-endpoint: got node0:29500, .* takes a free port of 127.0.0.1"),
    ],
)
def test_what_it_cannot_do_is_refused(parameters, want):
    with pytest.raises(ValueError, match=want):
        create_handler(parameters)


MANY = ["--nnodes=2", "--node-rank=1", "--master-addr=node0", "--master-port=4711"]


@pytest.fixture
def run(monkeypatch):
    """Stands for torchrun's agent."""
    monkeypatch.setattr(torch.distributed.run, "run", mock.Mock())
    return torch.distributed.run.run


@pytest.mark.parametrize(
    ("options", "backend"),
    [
        ([], BACKEND),
        (["--nnodes=1:1", "--standalone"], BACKEND),
        ([MANY[0], "--node-rank=0", "--master-addr=127.0.0.1", MANY[3]], "static"),
        (["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"], "c10d"),  # c10d, if it is asked for
    ],
)
def test_the_launcher_s_ranks_of_one_machine_meet_there(run, options, backend):
    torchrun([*options, "job", "--standalone"])
    (args,) = run.call_args.args
    assert (args.rdzv_backend, args.standalone, args.training_script_args) == (backend, False, ["--standalone"])


def test_a_port_in_use_is_named_and_nothing_else(run, capfd):
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        head = ["--nnodes=2", "--node-rank=0", "--master-addr=127.0.0.1", f"--master-port={port}"]
        assert launch([*head, "job.py"]) == 2
        said, errors = capfd.readouterr()
        (line,) = errors.splitlines()
        assert said == ""
        told = f"MASTER_PORT: got {port}, at which nobody can listen on this machine, 127.0.0.1"
        assert line.startswith(f"megamix: {told} (Address already in use); ")
        torchrun([*head[:1], "--node-rank=1", *head[2:], "job.py"])  # another machine listens there
    run.assert_called_once()


def test_a_head_node_without_an_address_is_named_within_the_limit(run, monkeypatch, capsys):
    not_known = mock.Mock(side_effect=socket.gaierror(-2, "Name or service not known"))
    monkeypatch.setattr(rendezvous, "QUIET_S", 0.0)
    monkeypatch.setattr(rendezvous, "MEET_S", 0.1)
    monkeypatch.setattr(socket, "getaddrinfo", not_known)
    assert launch([*MANY, "job.py"]) == 1  # another start may find it
    run.assert_not_called()
    assert not_known.call_args_list[0].args[0] == "node0"
    waits, ends = capsys.readouterr().err.splitlines()
    assert waits == "megamix: waiting for machine 0 at node0:4711 (Name or service not known), 0 s left"
    told = "MASTER_ADDR: got node0, where nobody listened at port 4711 within 0.1 s (Name or service not known)"
    assert ends.startswith(f"megamix: {told}; write machine 0's name or address")


def test_a_machine_waits_until_the_first_one_listens(run, monkeypatch):
    answers = [ConnectionRefusedError(111, "Connection refused"), TimeoutError("timed out"), socket.socket()]
    connect = mock.Mock(side_effect=answers)
    monkeypatch.setattr(socket, "create_connection", connect)
    torchrun([*MANY, "job.py"])
    run.assert_called_once()
    assert connect.call_count == 3


@pytest.mark.parametrize(("given", "want"), [("", max(1, num_cores() // 2)), ("7", 7)])
def test_the_launcher_shares_the_cores_among_its_ranks(run, monkeypatch, given, want):
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    torchrun(["--standalone", "--nproc-per-node=2", "job"])
    run.assert_called_once()
    assert os.environ["OMP_NUM_THREADS"] == str(want)


def _interfaces():
    return os.environ.get("GLOO_SOCKET_IFNAME"), {address for address, _ in listening(os.getpid())}


def test_ranks_of_verify_and_of_these_tests_keep_to_loopback(run_ranks):
    assert run_ranks(_interfaces, 2) == [("lo", {"127.0.0.1"})] * 2
