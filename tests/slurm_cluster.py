"""A Slurm of several nodes on this machine, from Debian's packages: a controller, and a slurmd for each node.

Its nodes have made-up GPUs and share this machine's cores. It needs root, and installs slurm-wlm and munge.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

DEADLINE_S = 300.0
CONFIG = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool_%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd_%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd_%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SwitchType=switch/none
MpiDefault=none
KillWait=30
SlurmdTimeout=300
GresTypes=gpu
JobRequeue=1
SchedulerParameters=requeue_delay=1,batch_sched_delay=1,sched_interval=2
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/ended.txt
{nodes}
PartitionName=main Nodes=n[1-{count}] Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """Starts when it is entered and ends, with all its jobs, when it is left."""

    def __init__(self, folder, count):
        self.folder, self.count = folder, count
        self._daemons = []

    def __enter__(self):
        if shutil.which("slurmctld") is None or shutil.which("munged") is None:
            packages = ["slurm-wlm", "munge"]
            subprocess.run(["apt-get", "install", "-y", "-q", "--no-install-recommends", *packages], check=True)
        for name in ("state", "dev", "munge"):
            (self.folder / name).mkdir(parents=True)
        for number in range(8):
            (self.folder / f"dev/nv{number}").touch()
        ports = _free_ports(self.count + 1)
        host = socket.gethostname()
        nodes = [
            f"NodeName=n{node} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[node]} CPUs=2 RealMemory=4000 "
            "Gres=gpu:8"
            for node in range(1, self.count + 1)
        ]
        told = {"folder": self.folder, "host": host, "controller": ports[0], "count": self.count}
        (self.folder / "slurm.conf").write_text(CONFIG.format(**told, nodes="\n".join(nodes)))
        (self.folder / "gres.conf").write_text(f"NodeName=n[1-{self.count}] Name=gpu File={self.folder}/dev/nv[0-7]\n")
        self._start_munge()
        self._daemon("slurmctld", "-D", "-c", "-f", str(self.folder / "slurm.conf"))
        for node in range(1, self.count + 1):
            self.start_node(f"n{node}")
        until(lambda: self.states() == ["idle"] * self.count, "idle nodes")
        return self

    def __exit__(self, *error):
        self.call("scancel", "--user=root")
        until(lambda: not self.call("squeue", "--noheader"), "end of all jobs", 60)
        for daemon in reversed(self._daemons):
            daemon.kill()
            daemon.wait()

    def _start_munge(self):
        folder = self.folder / "munge"
        (folder / "key").write_bytes(os.urandom(128))
        (folder / "key").chmod(0o400)
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={folder / name}" for option, name in files.items()]
        self._daemon("munged", "--foreground", "--force", *options)
        until((folder / "socket").exists, "munge")

    def _daemon(self, *command):
        with (self.folder / f"{command[0]}.out").open("ab") as out:
            daemon = subprocess.Popen(command, stdout=out, stderr=out, env=self.environment(), start_new_session=True)
        self._daemons.append(daemon)
        return daemon

    def environment(self):
        return os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def start_node(self, name):
        self._daemon("slurmd", "-D", "-c", "-N", name, "-f", str(self.folder / "slurm.conf"))

    def states(self):
        return self.call("sinfo", "--noheader", "--Node", "--format=%t").split()

    def kill_node(self, name):
        """Kill, at once, the processes that a node has started for jobs, and its daemons."""
        pids = [pid for pid in _pids() if f"SLURMD_NODENAME={name}" in _words(pid, "environ")]
        pids += [parent for pid in pids if "slurmstepd" in " ".join(_words(parent := _parent(pid), "cmdline"))]
        pids += [pid for pid in _pids() if {"slurmd", name} <= {*_words(pid, "cmdline")}]
        for pid in {*pids}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def call(self, *command, directory=None, **environment):
        """Run a client. Return what it printed."""
        told = self.environment() | environment
        done = subprocess.run(command, env=told, cwd=directory, capture_output=True, text=True, timeout=60, check=False)
        return done.stdout + done.stderr

    def job(self, number):
        """Return what Slurm says of a job."""
        words = self.call("scontrol", "show", "job", number, "--oneliner").split()
        return dict(word.split("=", 1) for word in words if "=" in word)


def _pids():
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _words(pid, what):
    try:
        return Path(f"/proc/{pid}/{what}").read_text(errors="replace").split("\0")
    except OSError:  # it has just ended
        return []


def _parent(pid):
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def until(true, what, deadline_s=DEADLINE_S):
    end_s = time.monotonic() + deadline_s
    while not true():
        assert time.monotonic() < end_s, f"not in time: {what}"
        time.sleep(0.05)
