"""Whoever trains on a machine with other users: a job on one node listens on loopback alone, even if the machine's name
has another address; a pickle that another user writes into its store is not executed, although plain torchrun executes
it.
"""

import base64
import ctypes
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist

from megamix.config import config_to_toml
from megamix.supervise.processes import children_of
from megamix.tools.ranks import DEADLINE_S, forkserver
from tests.builders import write_data
from tests.end_to_end.test_leaving import LAUNCH, ROOT, _config, _environment, _until
from tests.network import ADDRESS, elsewhere, listening
from tests.programs import with_settings

NOBODY = 65534
# What is attacked: torchrun as it is, to see that the attack is one, and a job of ours that trains.
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python", "sleep", "3600"]


class Started(NamedTuple):
    launcher: subprocess.Popen[str]
    folder: Path

    def end(self):
        if self.launcher.poll() is None:
            for pid in (self.launcher.pid, *children_of(self.launcher.pid)):
                os.kill(pid, signal.SIGKILL)
        self.launcher.wait()


def _start(command, folder, not_elsewhere):
    environment = with_settings(OMP_NUM_THREADS=1)
    whole = command if not_elsewhere else elsewhere(command)
    with (folder / "said.txt").open("w") as said:
        launcher = subprocess.Popen(whole, cwd=ROOT, env=environment, stdout=said, stderr=said, text=True)
    return Started(launcher, folder)


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
def torchrun(tmp_path_factory, not_elsewhere):
    started = _start(TORCHRUN, tmp_path_factory.mktemp("torchrun"), not_elsewhere)
    try:
        _until(lambda: children_of(started.launcher.pid) != [], "a rank of torchrun")
        yield started
    finally:
        started.end()


@pytest.fixture(scope="module")
def job(tmp_path_factory, not_elsewhere, torchrun):
    """Two ranks that train until they are asked to leave."""
    folder = tmp_path_factory.mktemp("job")
    write_data(folder)
    (folder / "job.toml").write_text(config_to_toml(_config(folder, folder, steps=10**6)))
    job = _start([*LAUNCH, str(folder / "job.toml")], folder, not_elsewhere)
    metrics = folder / "run/metrics.jsonl"
    try:
        _until(
            lambda: job.launcher.poll() is not None or (metrics.exists() and "\n" in metrics.read_text()), "training"
        )
        yield job
    finally:
        job.end()


def test_a_one_node_job_listens_on_loopback_alone(job, not_elsewhere):
    store, *gloo = (listening(pid) for pid in (job.launcher.pid, *children_of(job.launcher.pid)))
    assert len(store) == 1, (job.folder / "said.txt").read_text()
    assert len(gloo) == 2
    assert {address for sockets in (store, *gloo) for address, _ in sockets} == {"127.0.0.1"}
    assert all(gloo)
    if not_elsewhere:
        pytest.skip(f"seen only where the machine's name may be loopback's: no namespaces ({not_elsewhere.strip()})")


class _Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def _attack(pid, ports, run_id, bomb):
    """Write a pickle over all that lies in a launcher's store, as another user where this one may change."""
    for name in ("user", "net"):
        namespace = Path(f"/proc/{pid}/ns/{name}")
        if not namespace.samefile(f"/proc/self/ns/{name}"):
            with namespace.open() as file:
                assert ctypes.CDLL(None).setns(file.fileno(), 0) == 0
    if os.geteuid() == 0 and Path("/proc/self/uid_map").read_text().split()[2] != "1":
        os.setgroups([])
        os.setegid(NOBODY)
        os.seteuid(NOBODY)
    content = pickle.dumps(_Bomb(bomb))
    for port in ports:
        store = dist.TCPStore("127.0.0.1", port)
        for key in getattr(store, "list_keys", list)():  # where torch can list them
            store.set(key, content)
        store.set(f"torch.rendezvous.{run_id}", base64.b64encode(content))
    os.seteuid(os.getuid())  # coverage writes into the tests' folder when the process ends


def _attacked(started, bomb):
    ports = [port for _, port in listening(started.launcher.pid)]
    (rank, *_) = children_of(started.launcher.pid)
    arguments = (started.launcher.pid, ports, _environment(rank)["TORCHELASTIC_RUN_ID"], bomb)
    attacker = forkserver().Process(target=_attack, args=arguments)
    attacker.start()
    attacker.join(DEADLINE_S)
    assert attacker.exitcode == 0


def test_what_another_user_writes_into_the_store_is_not_run(job, torchrun, tmp_path):
    for started, name in ((job, "ours"), (torchrun, "torchrun")):
        _attacked(started, tmp_path / name)
    _until((tmp_path / "torchrun").exists, "the attack on torchrun")
    assert (tmp_path / "torchrun").stat().st_uid == os.geteuid()
    os.kill(job.launcher.pid, signal.SIGTERM)
    _until(lambda: job.launcher.poll() is not None, "the end of the job")
    assert not (tmp_path / "ours").exists()
