"""Scripts under audit as forks of a process that has torch loaded: a new Python imports it for 2 s on each rank."""

import atexit
import os
import subprocess
import sys
from unittest import mock

import torch
import torch.distributed as dist

from megamix.tools.audit.script import audit_script
from megamix.tools.ranks import forkserver


def audit_forked(name, updates, *, ranks=1):
    """Return the report on a script of `tests.tools.audit.scripts`, as of a command that starts one or two ranks."""
    with mock.patch.object(subprocess, "Popen", ForkedScript):
        return audit_script([name, str(ranks)], updates)


class ForkedScript:
    """Stand-in for the `subprocess.Popen` of a script's command."""

    def __init__(self, command, *, env, **_):
        name, ranks = command
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        started_by_torchrun = {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
            "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks,
        }  # fmt: skip
        self._process = forkserver().Process(target=_run, args=(name, env | started_by_torchrun))
        self._process.start()
        self.pid = self._process.pid

    def poll(self):
        return self._process.exitcode

    def wait(self, timeout):
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout)


def _run(name, environment):
    """Run the script as a Python that begins with the audit's `sitecustomize` and then imports torch."""
    os.setsid()
    os.environ.update(environment)
    os.environ["RANK"] = "1" if environment["WORLD_SIZE"] == "2" and os.fork() == 0 else "0"
    torch.set_num_threads(1)
    atexit._clear()  # what the parent of this fork does at its end
    from megamix.tools.audit.start.sitecustomize import Updates
    from tests.tools.audit import scripts

    Updates(sys.modules["torch.optim.optimizer"])
    getattr(scripts, name)()
    atexit._run_exitfuncs()
