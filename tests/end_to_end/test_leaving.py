"""Under real torchrun, with one launcher or two as on two nodes: a signal to launchers or ranks ends the run cleanly,
and no rank outlives a killed launcher or rank; with --full a run continues under nohup. Whoever trains on a machine
with other users: a job on one node listens on loopback alone, even if the machine's name has another address.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path
from typing import NamedTuple

import pytest

from megamix.base.processes import children_of, process_start
from megamix.checkpoint.folder import checkpoints
from megamix.checkpoint.manifest import read_manifest
from megamix.launch.run_status import read_status
from megamix.tools.ranks import DEADLINE_S
from tests.builders import tiny_job
from tests.conftest import FULL
from tests.network import ADDRESS, elsewhere, listening
from tests.programs import with_settings

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = ["launch/pretrain.sh"]
LAUNCH = [sys.executable, "-m", "megamix.launch.torchrun", "--standalone", "--nproc-per-node=2"]
LAUNCH += ["-m", "megamix", "train"]

# Beside the numbers of ranks: the launcher, the other node's (the first one's store is where all meet), the launcher
# twice, it and its ranks.
LAUNCHER, OTHER_LAUNCHER, TWICE, ALL = -1, -2, -3, -4


class Case(NamedTuple):
    who: int
    number: signal.Signals
    nodes: int  # two launchers with a rank each, or one with two

    def __str__(self):
        return f"{self.number.name} to {self.who} of {self.nodes} node(s)"


WHO = {1: (LAUNCHER, 1), 2: (LAUNCHER, OTHER_LAUNCHER, 1)}
SENT = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
ASKED = [Case(who, number, nodes) for nodes in WHO for who in WHO[nodes] for number in SENT]
# A shell and the system may both tell of a terminal that was closed.
GONE = (signal.SIGHUP, signal.SIGQUIT)
ASKED += [Case(who, number, 1) for who in (LAUNCHER, TWICE, ALL, 0, 1) for number in GONE]
KILLED = [Case(who, signal.SIGKILL, nodes) for nodes in WHO for who in (0, *WHO[nodes])]
if not FULL:
    ASKED, KILLED = [Case(TWICE, signal.SIGHUP, 1)], [Case(LAUNCHER, signal.SIGKILL, 2)]
STEPS = 300 if FULL else 60  # some seconds: a signal comes long before their end


Job = namedtuple("Job", "folder launchers")  # one launcher a node
# sockets: at which launchers and ranks listened; exit statuses of the launchers
Ended = namedtuple("Ended", "sockets exit_statuses status folder")


def _until(true, what):
    end_s = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < end_s, f"not in time: {what}"
        time.sleep(0.05)


def _config(folder, data, steps=STEPS):
    return tiny_job(folder, tokens=data, valid=None, steps=steps, eval_interval=0, log_interval=20)


def _start(config, nodes=1, *, by_script=False, before=()):
    """For the first time, or again. `before`: in front of the command, such as nohup."""
    folder = Path(config.checkpoint.folder).parent
    folder.mkdir(exist_ok=True)
    (folder / "job.toml").write_text(config.text)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    launchers = []
    with (folder / "stderr.txt").open("w") as errors:
        for node in range(nodes):
            settings = {"NNODES": nodes, "NODE_RANK": node, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            settings |= {"NPROC_PER_NODE": 2 // nodes, "OMP_NUM_THREADS": 1, "MEGAMIX_PYTHON": sys.executable}
            meet = [f"--nnodes={nodes}", f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}"]
            launch = LAUNCH if nodes == 1 else [*LAUNCH[:3], *meet, "--nproc-per-node=1", *LAUNCH[5:]]
            # The script is replaced by the launcher, which so has its pid.
            launchers.append(
                subprocess.Popen(
                    [*before, *(SCRIPT if by_script else launch), str(folder / "job.toml")],
                    cwd=ROOT, env=with_settings(**settings),
                    stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True,
                )
            )  # fmt: skip
    return Job(folder, launchers)


def _ranks(job):
    """Pid by rank."""
    ranks = {}
    for pid in (pid for launcher in job.launchers for pid in children_of(launcher.pid)):
        rank = re.search(r"(?:^|\0)RANK=(\d+)", Path(f"/proc/{pid}/environ").read_text())
        ranks[int(rank[1]) if rank else LAUNCHER] = pid
    return ranks


def _trains(job):
    metrics = job.folder / "run/metrics.jsonl"
    return metrics.exists() and "train/loss" in metrics.read_text()


def _signal(job, who, number):
    """Signal processes of a job that trains. Returns its ranks' pids, and where launchers and ranks listened."""
    ranks = _ranks(job)
    pids = [launcher.pid for launcher in job.launchers]
    sockets = [listening(pid) for pid in (*pids, *ranks.values())]
    if who < 0:
        job.launchers[who == OTHER_LAUNCHER].stdout.close()  # who reads the log often dies with the launcher
    told = {LAUNCHER: pids[:1], OTHER_LAUNCHER: pids[1:], TWICE: pids[:1] * 2, ALL: [*pids, *ranks.values()]}
    for pid in told[who] if who < 0 else [ranks[who]]:
        os.kill(pid, number)
    return ranks, sockets


def _kill(pids):
    for pid in pids:
        if process_start(pid):
            os.kill(pid, signal.SIGKILL)


def _signal_each(jobs):
    """Signal each job as soon as it trains, since another may take long to start. Returns what `_signal` does."""
    ranks = {}

    def all_signalled():
        trains = {case: job for case, job in jobs.items() if case not in ranks and _trains(job)}
        ranks.update({case: _signal(job, case.who, case.number) for case, job in trains.items()})
        return len(ranks) == len(jobs)

    try:
        _until(all_signalled, f"training of {', '.join(str(job.folder) for job in jobs.values())}")
    except AssertionError:
        for job in jobs.values():
            _kill([*_ranks(job).values(), *(launcher.pid for launcher in job.launchers)])
        raise
    return ranks


def _end(job, ranks, sockets=()):
    try:
        _until(lambda: all(launcher.poll() is not None for launcher in job.launchers), "end of the launchers")
        _until(lambda: not any(process_start(pid) for pid in ranks.values()), "end of the ranks")
    finally:
        _kill([*(launcher.pid for launcher in job.launchers), *ranks.values()])
        for launcher in job.launchers:
            launcher.stdout.close()
    status = read_status(job.folder / "run")
    return Ended(sockets, [launcher.wait() for launcher in job.launchers], status, job.folder)


def _saved(folder):
    """The update of the newest checkpoint."""
    return read_manifest(checkpoints(folder / "run/checkpoints")[0] / "manifest.json").applied_updates


@pytest.fixture(scope="module")
def not_elsewhere():
    """Why the machine's name cannot be made to resolve elsewhere than to loopback; "" where it can."""
    look = [sys.executable, "-c", "import socket; print(socket.gethostbyname(socket.gethostname()))"]
    try:
        found = subprocess.run(elsewhere(look), cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        return str(error)
    return "" if found.stdout.strip() == ADDRESS else f"{found.stdout}{found.stderr}"


@pytest.fixture(scope="module")
def ended(tmp_path_factory, data, not_elsewhere):
    base = tmp_path_factory.mktemp("jobs")
    cases, results = [*ASKED, *KILLED], {}
    for first in range(0, len(cases), 2):  # two at a time
        jobs = {}
        for case in cases[first : first + 2]:
            asked = case in ASKED
            # A killed job does not go on, so it may have more steps than it could ever take.
            config = _config(base / str(case), data, STEPS if asked else 10**6)
            before = () if case.nodes == 2 or not_elsewhere else elsewhere([])
            jobs[case] = _start(config, case.nodes, by_script=asked and FULL, before=before)
        signalled = _signal_each(jobs)
        results |= {case: _end(job, *signalled[case]) for case, job in jobs.items()}
    return results


@pytest.mark.parametrize("case", ASKED, ids=str)
def test_a_signal_to_a_launcher_or_to_a_rank_ends_the_run_in_good_order(ended, case):
    end = ended[case]
    errors = (end.folder / "stderr.txt").read_text()
    assert end.exit_statuses == [75] * case.nodes, errors
    assert (end.status.state, end.status.exit_status) == ("preempted", 75)
    said = f"asked to stop ({case.number.name}): ended after update {end.status.update} of "
    assert end.status.reason.startswith(said)
    assert errors.count(said) == 1
    assert _saved(end.folder) == end.status.update < STEPS
    names = {path.name for path in (end.folder / "run").iterdir()}
    assert names == {"checkpoints", "config.toml", "journal.jsonl", "metrics.jsonl"}


@pytest.mark.parametrize("case", KILLED, ids=str)
def test_a_killed_launcher_lets_its_ranks_save_and_a_killed_rank_is_named(ended, case):
    end = ended[case]
    if case.who < 0:
        assert end.status.state == "preempted"
        assert end.status.reason.startswith("asked to stop (a launcher died): ended after update ")
        assert _saved(end.folder) == end.status.update
        assert sorted(end.exit_statuses) == [-signal.SIGKILL, 75][: case.nodes]
    else:
        assert (end.status.state, end.status.exit_status) == ("failed", 1)
        assert end.exit_statuses == [1] * case.nodes
        died = f"rank {case.who} died; rank {1 - case.who} was in "
        assert end.status.reason.startswith(died)
        before, verdict, _ = (end.folder / "stderr.txt").read_text().partition(f"megamix train: {died}")
        assert verdict
        assert "Traceback" not in before


def test_a_one_node_job_listens_on_loopback_alone(ended, not_elsewhere):
    store, *gloo = ended[Case(TWICE, signal.SIGHUP, 1)].sockets
    assert (len(store), len(gloo)) == (1, 2)
    assert all(gloo)
    assert {address for sockets in (store, *gloo) for address, _ in sockets} == {"127.0.0.1"}
    if not_elsewhere:
        pytest.skip(f"seen only where the machine's name may be loopback's: no namespaces ({not_elsewhere.strip()})")


@pytest.mark.skipif(not FULL, reason="--full: seconds of a real launcher; tests/launch has its parts")
def test_under_nohup_a_run_outlives_its_terminal(tmp_path, data):
    config = _config(tmp_path / "job", data, 60)
    job = _start(config, by_script=True, before=["nohup"])
    _until(lambda: _trains(job), "training")
    ranks = _ranks(job)
    for pid in (job.launchers[0].pid, *ranks.values()):
        os.kill(pid, signal.SIGHUP)
    end = _end(job, ranks)
    assert (end.exit_statuses, end.status.state, end.status.update) == ([0], "finished", 60)
