"""A job on ranks of its own, which may be killed, stopped or signalled: the test is their parent and loses nothing."""

import os
import time
from multiprocessing.connection import wait
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

import megamix.cli.train  # noqa: F401  # else each rank would import it anew
from megamix.base.signals import stay_deaf
from megamix.cli.verbs import main
from megamix.launch import watchdog
from megamix.tools.ranks import DEADLINE_S, forkserver
from megamix.train.batch_plan import BatchPlan
from tests.conftest import FULL


def _rank_main(rank, size, folder, port, at_attempt, environment):
    # torchrun's agent sets these to say where the ranks meet.
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= environment
    stay_deaf()  # until the job takes signals: the server that it was forked from may block this one
    torch.set_num_threads(1)
    with (Path(folder) / f"rank{rank}.txt").open("w") as log:  # by descriptor: output of a rank and the way it dies
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)

    launch = BatchPlan.launch

    def launch_and_tell(plan):
        attempt = launch(plan)
        if at_attempt is not None:
            at_attempt(rank, attempt.number)
        return attempt

    with (
        mock.patch.object(BatchPlan, "launch", launch_and_tell),
        # On a machine with more work than cores, the last resort may be faster than the action before it.
        mock.patch.object(watchdog, "_LAST_RESORT_S", watchdog._LAST_RESORT_S if FULL else DEADLINE_S),
    ):
        status = main(["train", f"{folder}/job.toml"])
    os._exit(status) if status else None


class FreshRanks:
    """Ranks of a job in processes of their own.

    `at_attempt(rank, number)` is called on every rank before each attempt; it is a top-level function or a partial.
    `environment`: variables that the ranks get beside their own.
    """

    def __init__(self, config, size, at_attempt=None, environment=None):
        self.folder = Path(config.checkpoint.folder).parent
        (self.folder / "job.toml").write_text(config.text)
        # The store is in this process, as torchrun has it. A store in a file stays locked if a rank is stopped while it
        # reads.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes = [
            forkserver().Process(
                target=_rank_main,
                args=(rank, size, str(self.folder), self._store.port, at_attempt, environment or {}),
            )
            for rank in range(size)
        ]
        for process in self.processes:
            process.start()

    def join(self, deadline_s):
        """Return every rank's exit status, below 0 for a signal.

        Raises: AssertionError for ranks that live at the deadline, after killing them.
        """
        end_s = time.monotonic() + deadline_s
        for process in self.processes:
            process.join(max(0.0, end_s - time.monotonic()))
        self.ended_s = time.time()  # end of the last rank
        alive = [rank for rank, process in enumerate(self.processes) if process.is_alive()]
        for rank in alive:
            self.processes[rank].kill()
            self.processes[rank].join()
        said = "\n".join(self.said(rank) for rank in range(len(self.processes)))
        assert alive == [], f"still alive: {alive}\n{said}"
        return [process.exitcode for process in self.processes]

    def end_with_the_first(self, deadline_s):
        """Wait until all ranks have ended, or one has died: then kill the others, as a launcher does."""
        end_s = time.monotonic() + deadline_s
        while alive := [process.sentinel for process in self.processes if process.is_alive()]:
            wait(alive, end_s - time.monotonic())
            if time.monotonic() > end_s or any(process.exitcode for process in self.processes):
                for process in self.processes:
                    process.kill()
        return self.join(deadline_s)

    def said(self, rank):
        return (self.folder / f"rank{rank}.txt").read_text()
