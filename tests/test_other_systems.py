"""On a system without what only Linux has (Python's names, /proc, /sys, /dev/shm), a two-rank job of launch/pretrain.sh
trains and stops at a signal, and resumes on one rank and is exported; what only matters on Linux does nothing there.
"""

import ctypes
import resource
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from megamix.base.machine import peak_resident
from megamix.launch.rendezvous import keep_to_loopback
from megamix.launch.run_status import read_status
from megamix.tools.doctor import first_light
from tests.builders import tiny_job, write_data
from tests.programs import with_settings

ROOT = Path(__file__).resolve().parents[1]


def _start(*command):
    """Start a command on another system."""
    paths = f"{ROOT / 'tests/another_system'}:{ROOT}"
    settings = with_settings(MEGAMIX_PYTHON=sys.executable, NPROC_PER_NODE="2", OMP_NUM_THREADS="1", PYTHONPATH=paths)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, env=settings, text=True, **streams)


def _end(started, status=0):
    said, errors = started.communicate()
    assert started.returncode == status, errors
    return said


# In one process, which imports torch once: the checks of the doctor ask the system, and print a line each with what
# they have found.
AGAIN = """
import sys
from pathlib import Path
from megamix.cli.verbs import main
from megamix.cli.doctor import _machine
_, job, steps, run, folder = sys.argv
assert main(["train", job, steps]) == 0
assert main(["export", run, "--to", "hf", folder]) == 0
for name in ("cores", "driver", "hostname", "ports", "/dev/shm"):
    print(*(one.check for one in _machine(Path(), [], {})[name]()))
"""


def test_a_job_of_two_ranks_stops_at_a_signal_resumes_and_is_exported_and_the_doctor_looks_at_what_there_is(tmp_path):
    write_data(tmp_path / "data")
    steps = {"steps": 400, "eval_interval": 0}
    config = tiny_job(tmp_path, training=steps, valid=None, log_interval=1)
    (tmp_path / "job.toml").write_text(config.text)
    launch = ["launch/pretrain.sh", str(tmp_path / "job.toml")]
    first = _start(*launch)
    next(line for line in first.stdout if line.startswith("step "))
    first.send_signal(signal.SIGTERM)
    _end(first, 75)
    stopped = read_status(tmp_path / "run")
    assert stopped.state == "preempted"
    settings = [str(tmp_path / "job.toml"), f"training.steps={stopped.update + 2}", str(tmp_path / "run")]
    again = _end(_start(sys.executable, "-c", AGAIN, *settings, str(tmp_path / "hf")))
    assert f"step_{stopped.update:08d} after update {stopped.update}\n" in again
    assert (tmp_path / "hf/config.json").exists()
    assert again.splitlines()[-5:] == ["cores", "driver", "hostname", "loopback port", ""]


def test_a_peak_of_memory_is_in_bytes_on_either_system(monkeypatch):
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=1000))
    assert peak_resident() == 1_024_000
    monkeypatch.setattr(sys, "platform", "darwin")
    assert peak_resident() == 1000


def test_ranks_keep_to_loopback_by_its_name_on_either_system_unless_an_interface_is_named(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    gloo, nccl = {"GLOO_SOCKET_IFNAME": "lo0"}, {"NCCL_SOCKET_IFNAME": "=lo0"}
    for given, want in (({"NCCL_SOCKET_IFNAME": "eth0"}, gloo), ({"GLOO_SOCKET_IFNAME": "eth1"}, nccl)):
        environment = dict(given)
        keep_to_loopback(environment)
        assert environment == given | want


def test_a_part_of_the_first_light_starts_where_no_process_can_end_with_its_parent(tmp_path, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    started = first_light.start(["-c", "print(1)"], tmp_path, subprocess.DEVNULL)
    assert started.communicate()[0] == b"1\n"
