"""The launcher of a job starts its ranks again after one was killed, and after no other failure."""

import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from megamix.base.signals import LeaveRequest
from megamix.launch.agent import Agent, Machines
from megamix.launch.journal import Journal, Reached, read_rows
from megamix.launch.ledger import Ledger, boot_s
from megamix.launch.warm import WarmProcess
from megamix.tools.ranks import DEADLINE_S, forkserver


def _rank(folder, starts):
    """Be a rank: the first one makes the updates of this start and ends as it says; the second one waits."""
    if os.environ["RANK"] == "1":
        time.sleep(DEADLINE_S)
    tried = len([*folder.glob("tried *")])
    (folder / f"tried {tried}").touch()
    if starts[tried] is None:  # it dies before anybody has heard of it
        os.kill(os.getpid(), signal.SIGKILL)
    (folder / "stacks_rank0.txt").write_text(f"{tried}")
    step = 0
    journal = Journal(folder, Ledger(boot_s()), lambda: Reached(step, 0))
    before = read_rows(folder)
    step = before[-1]["step"] if before else 0
    journal.open(steps=9)
    updates, end = starts[tried]
    step += updates
    journal.tell("first_step")
    if end < 0:
        os.kill(os.getpid(), -end)
    return end


def _launch(folder, starts, ranks, status):
    agent = Agent(WarmProcess(partial(_rank, folder, starts)), Machines(ranks), LeaveRequest(), boot_s())
    status.put(agent.run(folder))


@pytest.mark.parametrize(
    ("starts", "ranks", "status"),
    [
        ([(3, -9), (0, -9), (2, 2)], 2, 2),  # the second rank is told each time
        ([(3, -9), (0, -9), (2, -9), (1, 0)], 1, 0),
        ([(3, -9), None, (2, 2)], 2, 2),  # killed again while it started
        ([(3, -9), None, None], 1, 1),
        ([None], 1, 1),
        ([(3, 1)], 1, 1),  # an error of Python's may come again
        ([(0, -9), (0, 3)], 1, 3),
        *([[(3, end)], 1, end] for end in (2, 3, 4)),
        ([(3, -signal.SIGTERM)], 1, 75),
    ],
)
def test_ranks_start_again_if_one_was_killed(tmp_path, starts, ranks, status):
    context = forkserver()
    told = context.SimpleQueue()
    process = context.Process(target=_launch, args=(tmp_path, starts, ranks, told))
    process.start()
    process.join(DEADLINE_S)
    assert process.exitcode == 0
    assert told.get() == status
    assert len([*tmp_path.glob("tried *")]) == len(starts)
    assert (tmp_path / "ended_1/stacks_rank0.txt").exists() == (len(starts) > 1)


def _wait():
    time.sleep(DEADLINE_S)
    return 0


def _kill_the_warm_process():
    os.kill(os.getppid(), signal.SIGKILL)
    return 0


def _launch_and_ask(main, reason, status):
    warm, request = WarmProcess(main), LeaveRequest()
    start = warm.start
    warm.start = lambda places: (start(places), reason and request.ask(reason))
    status.put(Agent(warm, Machines(2), request, boot_s()).run(Path("none")))


@pytest.mark.parametrize(("main", "reason"), [(_wait, signal.SIGTERM), (_kill_the_warm_process, 0)])
def test_a_signal_while_ranks_are_forked_and_a_killed_warm_process_end_as_interrupted(main, reason):
    context = forkserver()
    told = context.SimpleQueue()
    process = context.Process(target=_launch_and_ask, args=(main, reason, told))
    process.start()
    process.join(DEADLINE_S)
    assert process.exitcode == 0
    assert told.get() == 75
