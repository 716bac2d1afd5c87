"""Ranks of one machine meet in a store that only it can reach, whether the launcher, torchrun by hand, `verify` or the
tests start them. On many machines a port in use is reported at once, a machine 0 that nobody reaches after 20 s.
"""

import os
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch.distributed.run
from torch.distributed.elastic.rendezvous import RendezvousParameters

from megamix.machine import num_cores
from megamix.supervise import rendezvous
from megamix.supervise.launch import launch
from megamix.supervise.rendezvous import BACKEND, create_handler, keep_to_loopback, torchrun
from tests.network import listening

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def _parameters(endpoint="", nodes=1):
    return RendezvousParameters(BACKEND, endpoint, "id", nodes, nodes)


@pytest.fixture(autouse=True)
def _no_interfaces_named(monkeypatch):
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS"):
        monkeypatch.setenv(variable, "")  # so that it comes back as it was
        monkeypatch.delenv(variable)


def test_the_agent_s_store_listens_on_loopback_and_its_ranks_do():
    before = listening(os.getpid())
    met = create_handler(_parameters()).next_rendezvous()
    where = met.bootstrap_store_info
    assert where is not None
    assert listening(os.getpid()) - before == {(where.master_addr, where.master_port)}
    assert where.master_addr == "127.0.0.1"
    assert (met.rank, met.world_size) == (0, 1)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


def test_ranks_that_are_started_again_find_nothing_of_those_before():
    handler = create_handler(_parameters())
    first = handler.next_rendezvous()
    first.store.set("key", "value")
    again = handler.next_rendezvous()
    assert not again.store.check(["key"])


def test_who_names_interfaces_gets_them():
    environment = {"GLOO_SOCKET_IFNAME": "eth1"}
    keep_to_loopback(environment)
    assert environment == {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=lo"}


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


def test_torchrun_by_hand_finds_it_by_name(tmp_path):
    groups = tomllib.loads(PYPROJECT.read_text())["project"]["entry-points"]
    installed = tmp_path / "installed_by_hand-1.dist-info"  # the trace of an install of ours
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: installed_by_hand\nVersion: 1\n")
    lines = [f"[{group}]\n{name} = {value}\n" for group, names in groups.items() for name, value in names.items()]
    (installed / "entry_points.txt").write_text("".join(lines))
    program = "from torch.distributed.run import main; main()"  # as torchrun's own: the name is half imported by then
    by_hand = [sys.executable, "-c", program, f"--rdzv-backend={BACKEND}", "--no-python", "env"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [tmp_path, PYPROJECT.parent]))}
    done = subprocess.run(by_hand, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {"MASTER_ADDR=127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE=True", "GLOO_SOCKET_IFNAME=lo"} <= {
        *done.stdout.splitlines()
    }


MANY = ["--nnodes=2", "--node-rank=1", "--master-addr=node0", "--master-port=4711"]


@pytest.mark.parametrize(
    ("options", "backend"),
    [
        ([], BACKEND),
        (["--standalone"], BACKEND),
        (["--nnodes=1:1", "--standalone"], BACKEND),
        ([MANY[0], "--node-rank=0", "--master-addr=127.0.0.1", MANY[3]], "static"),
        (["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"], "c10d"),  # c10d, if it is asked for
    ],
)
def test_the_launcher_s_ranks_of_one_machine_meet_there(monkeypatch, options, backend):
    seen = []
    monkeypatch.setattr(torch.distributed.run, "run", seen.append)
    torchrun([*options, "job", "--standalone"])
    (args,) = seen
    assert (args.rdzv_backend, args.standalone, args.training_script_args) == (backend, False, ["--standalone"])


def test_a_port_in_use_is_named_and_nothing_else(monkeypatch):
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        head = ["--nnodes=2", "--node-rank=0", "--master-addr=127.0.0.1", f"--master-port={port}"]
        command = [sys.executable, "-m", "megamix.supervise.launch", *head, "job.py"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        told = f"MASTER_PORT: got {port}, at which nobody can listen on this machine, 127.0.0.1"
        assert line.startswith(f"megamix: {told} (Address already in use); ")
        seen = []
        monkeypatch.setattr(torch.distributed.run, "run", seen.append)
        torchrun([*head[:1], "--node-rank=1", *head[2:], "job.py"])  # another machine listens there
        assert len(seen) == 1


def test_a_head_node_without_an_address_is_named_within_the_limit(monkeypatch, capsys):
    asked = []

    def not_known(host, *arguments):
        asked.append(host)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(rendezvous, "QUIET_S", 0.0)
    monkeypatch.setattr(rendezvous, "MEET_S", 0.1)
    monkeypatch.setattr(socket, "getaddrinfo", not_known)
    monkeypatch.setattr(torch.distributed.run, "run", lambda args: pytest.fail("it has an address"))
    assert launch([*MANY, "job.py"]) == 1  # another start may find it
    assert asked[0] == "node0"
    waits, ends = capsys.readouterr().err.splitlines()
    assert waits == "megamix: waiting for machine 0 at node0:4711 (Name or service not known), 0 s left"
    told = "MASTER_ADDR: got node0, where nobody listened at port 4711 within 0.1 s (Name or service not known)"
    assert ends.startswith(f"megamix: {told}; write machine 0's name or address")


def test_a_machine_waits_until_the_first_one_listens(monkeypatch):
    refusals = iter([ConnectionRefusedError(111, "Connection refused"), TimeoutError("timed out"), None])

    def connect(*arguments):
        if (refusal := next(refusals)) is not None:
            raise refusal
        return socket.socket()

    seen = []
    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr(torch.distributed.run, "run", seen.append)
    torchrun([*MANY, "job.py"])
    assert len(seen) == 1
    assert list(refusals) == []


@pytest.mark.parametrize(("given", "want"), [(None, max(1, num_cores() // 2)), ("7", 7)])
def test_the_launcher_shares_the_cores_among_its_ranks(monkeypatch, given, want):
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    seen = []
    monkeypatch.setattr(torch.distributed.run, "run", lambda args: seen.append(os.environ["OMP_NUM_THREADS"]))
    torchrun(["--standalone", "--nproc-per-node=2", "job"])
    assert seen == [str(want)]


def _interfaces():
    return os.environ.get("GLOO_SOCKET_IFNAME"), {address for address, _ in listening(os.getpid())}


def test_ranks_of_verify_and_of_these_tests_keep_to_loopback(run_ranks):
    assert run_ranks(_interfaces, 2) == [("lo", {"127.0.0.1"})] * 2
