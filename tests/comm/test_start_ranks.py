"""After `megamix.start_ranks()` programs train on all ranks of torchrun, srun and mpirun, by the variables that these
set, and so does `megamix train`. An engine that would train alone by mistake is refused; training alone on purpose is
possible.
"""

import os
import re
import socket
from unittest import mock

import pytest
import torch
from torch import nn

import megamix
from megamix.cli.verbs import main
from megamix.comm import start_ranks
from megamix.tools.ranks import forkserver
from tests.builders import make_engine, tiny_job

KNOWN = re.compile("RANK$|WORLD_SIZE$|^(SLURM|OMPI|PMI|PMIX|MPI|MASTER)_")

# Variables that each starter sets for one of two ranks on one machine, in the allocation of a batch job if there is
# one.
JOB = {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "no-such-host-[1-2]", "SLURM_PROCID": "0"}


def _srun(rank):
    own = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0"}
    step = {"SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    pmi2 = {"PMI_RANK": str(rank), "PMI_SIZE": "2"}
    return JOB | step | own | pmi2 | {"SLURM_STEP_NODELIST": "no-such-host-1", "SLURM_LAUNCH_NODE_IPADDR": "192.0.2.1"}


def _mpirun(rank):
    own = {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_RANK": str(rank)}
    sizes = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    helper = {"SLURM_STEP_ID": "2", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    return JOB | helper | own | sizes | {"SLURM_LOCALID": "0", "PMIX_NAMESPACE": "2089418753"}


def _mpiexec(rank):
    return {"PMI_RANK": str(rank), "PMI_SIZE": "2", "MPI_LOCALRANKID": str(rank), "MPI_LOCALNRANKS": "2"}


def _torchrun(rank):
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


def _program(told, pipe):
    os.environ.clear()
    os.environ |= told
    device = megamix.start_ranks(timeout_s=60)
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    engine = make_engine(model)
    engine.backward(model(torch.full((1, 4), 1.0 + engine.topology.world.rank)).sum())
    pipe.send((device.type, engine.topology.world.size, float(engine.step().grad_norm)))


def _free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])


def test_a_program_trains_on_all_ranks_that_srun_has_started(told):
    port = {"MASTER_PORT": _free_port()}  # the default would be the same for every run of this test
    mine, theirs = forkserver().Pipe()
    programs = [forkserver().Process(target=_program, args=(told | _srun(rank) | port, theirs)) for rank in (0, 1)]
    for program in programs:
        program.start()
    for program in programs:
        program.join(100.0)
        program.kill()
    # The mean over the ranks of a sum over inputs of 1 and of 2: gradients of 1.5, for the bias of 1.
    assert [mine.recv() for _ in programs if mine.poll()] == [("cpu", 2, float(torch.tensor(10.0).sqrt()))] * 2


@pytest.fixture
def told():
    """Yield an environment in which nobody has started this process, and restore the old one after the test."""
    with mock.patch.dict(os.environ):
        for name in filter(KNOWN.search, [*os.environ]):
            del os.environ[name]
        yield os.environ


def _build(topology=None):
    return make_engine(nn.Linear(2, 2), sharding=megamix.Sharding(topology=topology))


ONES = [
    {"RANK": "0", "WORLD_SIZE": "1", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},  # a single process in each task
    {"WORLD_SIZE": "2"},  # set for a program that starts no rank, e.g. with --check
    {"SLURM_NTASKS": "2", "SLURM_PROCID": "0"},  # in a batch script, and in our launcher in it
    {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"},
    {},
]


@pytest.mark.parametrize("variables", ONES)
def test_an_engine_of_a_process_that_was_started_alone_is_built(variables, told):
    told |= variables
    assert megamix.start_ranks() == torch.device("cpu")
    assert {name: value for name, value in told.items() if KNOWN.search(name)} == variables
    assert _build().topology == megamix.Topology()


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (_torchrun, "WORLD_SIZE is 2, so torchrun has started 2"),
        (_srun, "SLURM_STEP_NUM_TASKS is 2, so srun has started 2 processes, .* Call megamix.start_ranks"),
        (_mpirun, "OMPI_COMM_WORLD_SIZE is 2, so mpirun"),
        (_mpiexec, "PMI_SIZE is 2, so mpiexec"),
    ],
)
def test_an_engine_that_would_train_alone_is_refused(ranks, message, told):
    told |= ranks(1)
    with pytest.raises(RuntimeError, match=message):
        _build()
    _build(megamix.Topology())


def test_a_job_that_srun_starts_without_a_launcher_is_one_job(told, tmp_path, data, capsys):
    (tmp_path / "job.toml").write_text(tiny_job(tmp_path, tokens=data).text)
    told |= _srun(0)
    assert main(["train", str(tmp_path / "job.toml"), "--check"]) == 0
    assert "no problems; 2 ranks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("variables", "want"),
    [
        (_srun(1), "1 2 1 2 127.0.0.1"),
        (_mpirun(1), "1 2 1 2 127.0.0.1"),
        (_mpiexec(1), "1 2 1 2 127.0.0.1"),
        (
            _srun(1) | {"SLURM_STEP_NUM_TASKS": "7", "SLURM_PROCID": "6", "SLURM_LOCALID": "0", "SLURM_NODEID": "3"}
            | {"SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_STEP_NODELIST": "n[07-09,12]"},
            "6 7 0 1 n07",
        ),
        (_mpirun(1) | {"OMPI_COMM_WORLD_SIZE": "4", "SLURM_JOB_NODELIST": "a,b"}, "1 4 1 2 a"),
        (_srun(1) | {"MASTER_ADDR": "other"}, "1 2 1 2 other"),
        (_torchrun(1) | _srun(0) | {"MASTER_ADDR": "mine", "MASTER_PORT": "7"}, "1 2 1 2 mine"),
    ],
)  # fmt: skip
def test_what_a_starter_says_becomes_what_torchrun_would(variables, want, told, monkeypatch):
    monkeypatch.setattr(start_ranks, "meet_ranks", met := mock.Mock())
    told |= variables
    assert megamix.start_ranks(timeout_s=7.0) == torch.device("cpu")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    assert " ".join(told[name] for name in names) == want
    assert told["MASTER_PORT"] == variables.get("MASTER_PORT", told["MASTER_PORT"])
    assert met.call_args == mock.call(torch.device("cpu"), 7.0)


def test_two_steps_of_a_job_meet_at_two_ports(told, monkeypatch):
    monkeypatch.setattr(start_ranks, "meet_ranks", mock.Mock())
    ports = []
    for rank, step in ((0, "1"), (1, "1"), (0, "2")):
        for name in filter(KNOWN.search, [*told]):
            del told[name]
        told.update(_srun(rank) | {"SLURM_STEP_ID": step})
        megamix.start_ranks()
        ports.append(int(told["MASTER_PORT"]))
    assert ports[0] == ports[1] != ports[2]
    assert all(20_000 <= port < 30_000 for port in ports)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (_mpiexec(1) | {"PMI_SIZE": "4"}, "^MASTER_ADDR: not set, and mpiexec does not say the value; set it"),
        (_torchrun(1) | {"MASTER_ADDR": "a"}, "^MASTER_PORT: not set, and torchrun does not"),
        (_torchrun(1) | {"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', no number"),
    ],
)
def test_what_is_missing_to_meet_is_named(variables, message, told):
    told |= variables
    with pytest.raises(ValueError, match=message):
        megamix.start_ranks()


def test_a_port_in_use_is_said_with_what_to_do(told):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        told |= _torchrun(0) | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        with pytest.raises(OSError, match=f"are 127.0.0.1:{port}, where .*; set MASTER_ADDR to a name of rank 0's"):
            megamix.start_ranks(timeout_s=5)
