"""Whoever loses a rank among many: a rank that is killed, stopped, asleep (--full) or in another collective is named,
and all ranks end, within the time limit and two seconds; stacks are left; a rank with a slow disk is waited for. A rank
ends no process but a missing rank; a stopped launcher ends no run.
"""

import gc
import json
import logging
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections import namedtuple
from functools import partial
from itertools import count
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.flight_recorder import fr_trace

from megamix.base.processes import process_start
from megamix.base.signals import LeaveRequest
from megamix.checkpoint.folder import Files
from megamix.cli.verbs import main
from megamix.comm.topology import Topology
from megamix.data.loader import BatchLoader
from megamix.launch import watchdog
from megamix.launch.liveness import EndReason, Position, RollCall, Sign
from megamix.launch.run_status import read_status
from megamix.launch.watchdog import Watchdog
from megamix.model.transformer import Block
from megamix.parallel.stages import Stage
from megamix.tools.ranks import DEADLINE_S
from tests.builders import make_journal, tiny_job, write_data
from tests.conftest import FULL
from tests.train.fresh_ranks import FreshRanks

TIMEOUT_S = 3.0 if FULL else 5.0  # a loaded machine must not stand still for as long without a fault
FAULT_AT = 6  # the number of an attempt


def _killed(victim):
    os.kill(os.getpid(), signal.SIGKILL)


def _stopped(victim):
    os.kill(os.getpid(), signal.SIGSTOP)


def _asleep(victim):
    time.sleep(60)


def _elsewhere(victim):
    """Enter a collective that no other rank enters."""
    dist.broadcast(torch.zeros(3), src=1 - victim)


def _never_returns(*_, **__):
    time.sleep(60)


# This process is the rank's own.
def _hangs_in_data(victim):
    BatchLoader.load = _never_returns


def _hangs_in_forward(victim):
    Block.forward = _never_returns


def _hangs_in_a_stage(victim):
    """Hang in the forward of the first chunk, for which the other stage waits."""
    Stage.forward = _never_returns


def _without_memory(victim):
    torch.empty(2**60)  # an error of torch's, which a dead peer's are, too


def _writes_slowly(victim):
    """Write slowly: the rest of the checkpoint takes longer than the time limit, but no chunk does."""
    write = Files.write

    def slow_write(files, file, chunk):
        time.sleep(TIMEOUT_S / 30)  # at each of some 40 chunks
        write(files, file, chunk)

    Files.write = slow_write


def _strike(folder, fault, victim, rank, number):
    """Begin the fault, if it is due, and write its time to a file."""
    if (rank, number) == (victim, FAULT_AT):
        (folder / "fault").write_text(repr(time.time()))
        fault(victim)


# Each kind of fault, and with all counts each on each rank.
KINDS = (_killed, _stopped, _asleep, _elsewhere, _hangs_in_data, _hangs_in_forward)
CASES = [(fault, victim) for victim in (0, 1) for fault in KINDS]
CASES = CASES if FULL else [(_killed, 0), (_killed, 1), (_stopped, 1), (_hangs_in_data, 0), (_elsewhere, 1)]
SLOW, NO_MEMORY = (_writes_slowly, 1), (_without_memory, 1)
IN_A_STAGE = [(_hangs_in_a_stage, 0)]
BEHIND = "rank {} fell behind\n"
VERDICTS = {_killed: "rank {} died; rank {} was in", _stopped: "no sign of life from rank {}\n"}  # on (victim, other)
# The function in which a living rank hangs, and its place in the end reason.
HANGS = {
    _asleep: ("_asleep", "the code after "),
    _elsewhere: ("_elsewhere", "the code after "),
    _hangs_in_data: ("_never_returns", "data, attempt 6 "),
    _hangs_in_forward: ("_never_returns", "forward_backward, attempt 6 "),
}


Ended = namedtuple("Ended", "ranks statuses took_s status folder")  # took_s: from the fault to the last rank's end


def _start(folder, data, fault, victim, timeout_s):
    folder.mkdir()
    config = tiny_job(
        folder, tokens=data, valid=None, eval_interval=0, steps=FAULT_AT + 2 if fault is _writes_slowly else 100_000,
        timeout_s=timeout_s, pipeline={"size": 2 if fault is _hangs_in_a_stage else 1},
    )  # fmt: skip
    return FreshRanks(config, 2, partial(_strike, folder, fault, victim))


def _ended(ranks):
    statuses = ranks.join(DEADLINE_S)
    took_s = ranks.ended_s - float((ranks.folder / "fault").read_text())
    return Ended(ranks, statuses, took_s, read_status(ranks.folder / "run"), ranks.folder)


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Run all cases: one after the other if their time counts, otherwise together, since they mostly wait.

    If the machine was so busy that ranks stood still for the time limit before their fault, or that another rank was
    blamed, the case is run once more, alone and with four times the limit.
    """
    base = tmp_path_factory.mktemp("faults")
    write_data(base / "data")

    def start(case, name="", timeout_s=TIMEOUT_S):
        fault, victim = case
        return _start(base / f"{fault.__name__}{victim}{name}", base / "data", fault, victim, timeout_s)

    cases = [*CASES, SLOW, NO_MEMORY, *IN_A_STAGE]
    if FULL:
        return {case: _ended(start(case)) for case in cases}
    started = {case: start(case) for case in cases}
    results = {}
    for case, ranks in started.items():
        ranks.join(DEADLINE_S)
        struck = (ranks.folder / "fault").exists()
        fair = struck and (case in (SLOW, NO_MEMORY) or _verdict(*case) in _ended(ranks).status.reason)
        results[case] = _ended(ranks if fair else start(case, "again", 4 * TIMEOUT_S))
    return results


def _verdict(fault, victim):
    return VERDICTS.get(fault, BEHIND).format(victim, 1 - victim)


@pytest.mark.parametrize(("fault", "victim"), CASES)
def test_a_dead_or_hung_rank_ends_all_in_time_and_is_named_and_live_ones_leave_stacks(ended, fault, victim):
    end = ended[fault, victim]
    dies = fault in (_killed, _stopped)
    assert end.statuses == [-signal.SIGKILL if rank == victim and dies else 1 for rank in range(2)]
    if FULL:
        assert end.took_s < TIMEOUT_S + 2
    verdict = _verdict(fault, victim)
    assert end.status.state == "failed"
    assert verdict in end.status.reason
    assert f"rank {victim}: last in {HANGS.get(fault, ('', ''))[1]}" in end.status.reason
    # A rank may die with the last words of the attempt before unsent.
    assert re.search(rf"attempt ({FAULT_AT - 1}|{FAULT_AT})\b", end.status.reason)
    assert any(verdict in end.ranks.said(rank) for rank in range(2))
    if fault is _killed:  # the collective that broke is the consequence
        assert end.status.reason.startswith(verdict)
        assert end.ranks.said(1 - victim).partition(verdict)[0].endswith("megamix train: ")
        assert "Traceback" not in end.ranks.said(1 - victim).partition(verdict)[0]
    run = end.folder / "run"
    assert "trainer.py" in (run / f"stacks_rank{1 - victim}.txt").read_text()  # the place where it waited
    if fault in HANGS:
        assert HANGS[fault][0] in (run / f"stacks_rank{victim}.txt").read_text()


@pytest.mark.parametrize(("fault", "victim"), [*CASES, *IN_A_STAGE])
def test_the_verb_hang_names_the_rank_or_the_stage_and_not_one_that_waits_for_it(ended, capsys, fault, victim):
    assert main(["hang", str(ended[fault, victim].folder / "run")]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"failed at update {FAULT_AT - 1}: ")
    assert _verdict(fault, victim).strip() in told.partition("\n")[0]
    if fault in (_killed, _stopped):
        assert f"\nrank {victim} left no record: it was killed or stopped, or its machine is gone\n" in told
    elif fault is _elsewhere:
        assert f"gloo:broadcast on rank {victim}" in told
        assert "these ranks ran different code" in told
    elif fault is _hangs_in_a_stage:  # torch records no message between two ranks by Gloo
        reason = ended[fault, victim].status.reason
        assert f"rank {victim}: last in forward_backward of stage {victim}, attempt {FAULT_AT} " in reason
    else:
        waits = f"in which rank {1 - victim} waited; the last of rank {victim}"
        never = rf"^rank {victim} never entered collective \d+ of ranks 0, 1, gloo:all_to_all, {waits} is \d+, gloo:"
        assert re.search(never, told, re.MULTILINE)


def test_torchs_own_analyser_reads_the_records(ended, tmp_path, caplog):
    fault, victim = next(case for case in CASES if case[0] is _hangs_in_data)
    assert main(["hang", str(ended[fault, victim].folder / "run"), "--torchfrtrace", str(tmp_path / "fr")]) == 0
    with caplog.at_level(logging.INFO):
        fr_trace.main([str(tmp_path / "fr")])
    gc.enable()  # the analyser turns it off
    assert f"missing ranks: {{{victim}}}" in caplog.text


def test_a_rank_that_writes_its_checkpoint_slowly_is_waited_for(ended):
    end = ended[SLOW]
    took = re.search(r"^saved .* in ([0-9.]+) s$", end.ranks.said(0), re.MULTILINE)
    assert took is not None
    assert float(took[1]) > 1.2 * TIMEOUT_S
    assert (end.statuses, end.status.state) == ([0, 0], "finished"), end.ranks.said(0)


def test_a_rank_without_memory_ends_all_with_the_status_that_says_so(ended):
    end = ended[NO_MEMORY]
    assert end.statuses == [4, 4]
    assert end.status.reason.startswith(f"rank 1, attempt {FAULT_AT}: ran out of memory: ")
    assert [end.ranks.said(rank).count("ran out of memory") for rank in range(2)] == [1, 0]
    assert "Traceback" not in end.ranks.said(1)
    assert "_without_memory" in (end.folder / "run/stacks_rank1.txt").read_text()
    memory = end.folder / "run/memory_rank1.txt"
    assert re.search(rf"rank 1: .* MiB of live tensors, listed in {memory}; the largest:\n", end.ranks.said(1))
    assert re.search(r"MiB +1 x master of blocks.1.\S+ to blocks.0.\S+, float32 \(", memory.read_text())
    assert not memory.with_name("memory_rank0.txt").exists()


def test_a_rank_does_not_take_itself_for_dead_whatever_the_store_says():
    store = dist.HashStore()
    roll = RollCall(store, 0, 2)
    roll.beat(Position(1, "the start", 0, 0), 0.0)
    sign = json.loads(store.get("rank 0"))
    sign[-2] = "1"  # another start: this process is another one
    for rank in (0, 1):
        store.set(f"rank {rank}", json.dumps(sign))
    suspicion = watchdog._Suspicion(roll)
    assert suspicion.age_s() < DEADLINE_S  # it begins now: whoever was stopped itself waits before it blames another
    assert suspicion.idle_s() == 0
    assert suspicion.missing() == [1]


def test_what_a_rank_writes_is_what_the_others_read():
    roll = RollCall(dist.HashStore(), 0, 2)
    roll.beat(Position(3, "forward_backward", 2, 0), 0.5)
    (sign,) = roll.signs().values()
    assert sign[:6] == (1, 0.5, 3, "forward_backward", 2, 0)
    assert (sign.is_here, sign.runs) == (True, True)
    reason = EndReason("rank 1 died\nlast in a save", [1], 4)
    assert roll.decide(reason) == roll.decide(EndReason("a later one", [])) == roll.reason() == reason


def test_a_rank_that_runs_is_not_dead_when_the_clock_has_been_set(monkeypatch):
    sign = Sign(1, 0.0, 0, "", 0, 0, socket.gethostname(), os.getpid(), process_start(os.getpid()))
    booted_s = psutil.boot_time()
    monkeypatch.setattr(psutil._psplatform, "boot_time", lambda: booted_s + 3600)  # as Linux tells it then
    assert sign.runs


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_missing_rank_is_killed_also_if_it_is_stopped_and_a_later_process_with_its_pid_is_not(is_stopped):
    with subprocess.Popen(["sleep", "60"]) as rank:
        host, start = socket.gethostname(), process_start(rank.pid)
        sign = Sign(1, 0.0, 0, "", 0, 0, host, rank.pid, start)
        if is_stopped:
            rank.send_signal(signal.SIGSTOP)
            os.waitpid(rank.pid, os.WUNTRACED)
        assert sign.runs != is_stopped
        for other_host, other_start in (("elsewhere", start), (host, "1.00"), (host, "")):
            sign._replace(host=other_host, start=other_start).end()
        assert process_start(rank.pid) == start
        sign.end()
        assert rank.wait(DEADLINE_S) == -signal.SIGKILL
        assert not sign.runs


def _run_whose_launcher_is_stopped(folder):
    """Run a rank that moves for longer than the time limit and the last resort, and ends. No call of the launcher's
    store comes back after the first one.
    """
    calls, spans = count(), count()

    def set_once(key, value):
        if next(calls):
            threading.Event().wait()

    roll = RollCall(SimpleNamespace(set=set_once), Topology.current().world.rank, 2)
    moving = mock.Mock(side_effect=lambda: Position(next(spans), "training", 0, 0))
    with (
        mock.patch.object(watchdog, "_LAST_RESORT_S", 1.0),
        Watchdog(roll, 1.0, make_journal(folder), LeaveRequest(), None, moving),
    ):
        time.sleep(2.5)
    return "finished"


def test_a_run_goes_on_and_ends_while_its_launcher_is_stopped(tmp_path, run_ranks):
    assert run_ranks(_run_whose_launcher_is_stopped, 2, tmp_path) == ["finished"] * 2
    assert list(tmp_path.iterdir()) == []  # no stacks
