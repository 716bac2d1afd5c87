"""Whoever trains on a machine with other users: a job on one node listens on loopback alone, even if the machine's name
has another address.
"""

import subprocess
import sys

import pytest

from megamix.config import config_to_toml
from megamix.supervise.processes import children_of
from tests.end_to_end.test_leaving import LAUNCH, ROOT, Job, _config, _kill, _trains, _until
from tests.network import ADDRESS, elsewhere, listening
from tests.programs import with_settings


@pytest.fixture(scope="module")
def not_elsewhere():
    """Why the machine's name cannot be made to resolve elsewhere than to loopback; "" where it can."""
    look = [sys.executable, "-c", "import socket; print(socket.gethostbyname(socket.gethostname()))"]
    try:
        found = subprocess.run(elsewhere(look), cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        return str(error)
    return "" if found.stdout.strip() == ADDRESS else f"{found.stdout}{found.stderr}"


def test_a_one_node_job_listens_on_loopback_alone(tmp_path, data, not_elsewhere):
    (tmp_path / "job.toml").write_text(config_to_toml(_config(tmp_path, data, steps=10**6)))
    command = [*LAUNCH, str(tmp_path / "job.toml")]
    with (tmp_path / "said.txt").open("w") as said:
        launcher = subprocess.Popen(
            command if not_elsewhere else elsewhere(command),
            cwd=ROOT, env=with_settings(OMP_NUM_THREADS=1), stdout=said, stderr=said,
        )  # fmt: skip
    try:
        _until(lambda: launcher.poll() is not None or _trains(Job(tmp_path, [])), "training")
        store, *gloo = (listening(pid) for pid in (launcher.pid, *children_of(launcher.pid)))
        assert len(store) == 1, (tmp_path / "said.txt").read_text()
        assert len(gloo) == 2
        assert {address for sockets in (store, *gloo) for address, _ in sockets} == {"127.0.0.1"}
        assert all(gloo)
    finally:
        _kill([launcher.pid, *children_of(launcher.pid)])
        launcher.wait()
    if not_elsewhere:
        pytest.skip(f"seen only where the machine's name may be loopback's: no namespaces ({not_elsewhere.strip()})")
