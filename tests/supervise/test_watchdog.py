"""Whoever loses a rank among many: a rank that is killed, stopped, asleep or in another collective is named, and all
ranks end, within the time limit and two seconds; stacks are left; a rank with a slow disk is waited for.
"""

import gc
import json
import logging
import os
import re
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.flight_recorder import fr_trace

from megamix.checkpoint.folder import Files
from megamix.cli import main
from megamix.data.loader import BatchLoader
from megamix.model.transformer import Block
from megamix.parallel.stages import Stage
from megamix.supervise import watchdog
from megamix.supervise.liveness import Position, RollCall, Sign
from megamix.supervise.processes import process_start
from megamix.tools.ranks import DEADLINE_S
from tests.builders import tiny_job, write_data
from tests.conftest import FULL
from tests.train.fresh_ranks import FreshRanks

TIMEOUT_S = 3.0 if FULL else 5.0  # a loaded machine must not stand still for as long without a fault
FAULT_AT = 6  # the number of an attempt


def _mark(folder, victim, rank, number):
    """Return whether the fault is due, and write its time to a file."""
    due = (rank, number) == (victim, FAULT_AT)
    if due:
        (folder / "fault").write_text(repr(time.time()))
    return due


def _stopped(folder, victim, rank, number):
    if _mark(folder, victim, rank, number):
        os.kill(os.getpid(), signal.SIGSTOP)


def _asleep(folder, victim, rank, number):
    if _mark(folder, victim, rank, number):
        time.sleep(60)


def _never_returns(*_):
    time.sleep(60)


def _hangs_in_data(folder, victim, rank, number):
    if _mark(folder, victim, rank, number):
        BatchLoader.load = _never_returns  # type: ignore[assignment,method-assign]  # this process is the rank's own


def _hangs_in_forward(folder, victim, rank, number):
    if _mark(folder, victim, rank, number):
        Block.forward = _never_returns  # type: ignore[assignment,method-assign]  # likewise


def _killed(folder, victim, rank, number):
    if _mark(folder, victim, rank, number):
        os.kill(os.getpid(), signal.SIGKILL)


def _elsewhere(folder, victim, rank, number):
    """Enter a collective that no other rank enters."""
    if _mark(folder, victim, rank, number):
        dist.broadcast(torch.zeros(3), src=1 - victim)


def _hangs_in_a_stage(folder, victim, rank, number):
    """Hang in the forward of the first chunk, for which the other stage waits."""
    if _mark(folder, victim, rank, number):
        Stage.forward = lambda *args, **kwargs: time.sleep(60)  # type: ignore[method-assign]  # likewise


def _without_memory(folder, victim, rank, number):
    if _mark(folder, victim, rank, number):
        torch.empty(2**60)  # an error of torch's, which a dead peer's are, too


def _writes_slowly(folder, victim, rank, number):
    """Write slowly: the rest of the checkpoint takes longer than the time limit, but no chunk does."""
    write = Files.write

    def slow_write(files, file, chunk):
        time.sleep(TIMEOUT_S / 30)  # at each of some 40 chunks
        write(files, file, chunk)

    if _mark(folder, victim, rank, number):
        Files.write = slow_write  # type: ignore[method-assign] # this process is the rank's own


# Each kind of fault, and with all counts each on each rank.
KINDS = (_killed, _stopped, _asleep, _elsewhere, _hangs_in_data, _hangs_in_forward)
CASES = [(fault, victim) for victim in (0, 1) for fault in KINDS]
CASES = CASES if FULL else [(_killed, 0), (_killed, 1), (_stopped, 1), (_hangs_in_data, 0), (_elsewhere, 1)]
SLOW, NO_MEMORY = (_writes_slowly, 1), (_without_memory, 1)
IN_A_STAGE = [(_hangs_in_a_stage, 0), (_hangs_in_a_stage, 1)]
VERDICTS = {  # on (victim, other)
    _killed: "rank {} died; rank {} was in",
    _stopped: "no sign of life from rank {}\n",
    _asleep: "rank {} fell behind\n",
    _elsewhere: "rank {} fell behind\n",
    _hangs_in_data: "rank {} fell behind\n",
    _hangs_in_forward: "rank {} fell behind\n",
    _hangs_in_a_stage: "rank {} fell behind\n",
}
# The function in which a living rank hangs, and its place in the end reason.
HANGS = {
    _asleep: ("_asleep", "the code after "),
    _elsewhere: ("_elsewhere", "the code after "),
    _hangs_in_data: ("_never_returns", "data, attempt 6 "),
    _hangs_in_forward: ("_never_returns", "forward_backward, attempt 6 "),
}


class Ended(NamedTuple):
    ranks: FreshRanks
    statuses: list[int | None]
    took_s: float  # from the fault until the last rank has ended
    status: dict[str, Any]
    folder: Path


def _start(folder, data, fault, victim, timeout_s):
    folder.mkdir()
    config = tiny_job(
        folder,
        tokens=data,
        valid=None,
        steps=FAULT_AT + 2 if fault is _writes_slowly else 100_000,
        eval_interval=0,
        timeout_s=timeout_s,
        pp_size=2 if fault is _hangs_in_a_stage else 1,
    )
    return FreshRanks(config, 2, partial(fault, folder, victim))


def _ended(ranks):
    statuses = ranks.join(DEADLINE_S)
    took_s = ranks.ended_s - float((ranks.folder / "fault").read_text())
    return Ended(ranks, statuses, took_s, json.loads((ranks.folder / "run/status.json").read_text()), ranks.folder)


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
        fair = struck and (case in (SLOW, NO_MEMORY) or _verdict(*case) in _ended(ranks).status["reason"])
        results[case] = _ended(ranks if fair else start(case, "again", 4 * TIMEOUT_S))
    return results


def _verdict(fault, victim):
    return VERDICTS[fault].format(victim, 1 - victim)


@pytest.mark.parametrize(("fault", "victim"), CASES)
def test_a_dead_or_hung_rank_ends_all_in_time_and_is_named(ended, fault, victim):
    end = ended[fault, victim]
    dies = fault in (_killed, _stopped)
    assert end.statuses == [-signal.SIGKILL if rank == victim and dies else 1 for rank in range(2)]
    if FULL:
        assert end.took_s < TIMEOUT_S + 2
    verdict = _verdict(fault, victim)
    assert end.status["state"] == "failed"
    assert verdict in end.status["reason"]
    assert f"rank {victim}: last in {HANGS.get(fault, ('', ''))[1]}" in end.status["reason"]
    # A rank may die with the last words of the attempt before unsent.
    assert re.search(rf"attempt ({FAULT_AT - 1}|{FAULT_AT})\b", end.status["reason"])
    assert any(verdict in end.ranks.said(rank) for rank in range(2))
    if fault is _killed:  # the collective that broke is the consequence
        assert end.status["reason"].startswith(verdict)
        assert end.ranks.said(1 - victim).partition(verdict)[0].endswith("megamix train: ")
        assert "Traceback" not in end.ranks.said(1 - victim).partition(verdict)[0]


@pytest.mark.parametrize(("fault", "victim"), CASES)
def test_every_live_rank_leaves_its_stacks(ended, fault, victim):
    stacks = [(ended[fault, victim].folder / f"run/stacks_rank{rank}.txt").read_text() for rank in range(2)]
    assert "trainer.py" in stacks[1 - victim]  # the place where it waited
    if fault in HANGS:
        assert HANGS[fault][0] in stacks[victim]


@pytest.mark.parametrize(("fault", "victim"), CASES)
def test_every_live_rank_tells_its_last_collectives(ended, fault, victim):
    for rank in {1 - victim, victim if fault in HANGS else 1 - victim}:
        told = json.loads((ended[fault, victim].folder / f"run/collectives_rank{rank}.json").read_text())
        last = told["entries"][-1]["profiling_name"]
        assert last.startswith("gloo:")
        assert (last == "gloo:broadcast") == (fault is _elsewhere and rank == victim)


@pytest.mark.parametrize(("fault", "victim"), [*CASES, *IN_A_STAGE])
def test_the_verb_hang_names_the_rank(ended, capsys, fault, victim):
    assert main(["hang", str(ended[fault, victim].folder / "run")]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"failed at update {FAULT_AT - 1}: ")
    assert _verdict(fault, victim).strip() in told.partition("\n")[0]
    if fault in (_killed, _stopped):
        assert f"\nrank {victim} left no record: it was killed or stopped, or its machine is gone\n" in told
    elif fault is _elsewhere:
        assert f"gloo:broadcast on rank {victim}" in told
        assert "these ranks ran different code" in told
    elif fault is not _hangs_in_a_stage:  # torch records no message between two ranks by Gloo
        assert re.search(
            rf"^rank {victim} never entered collective \d+ of ranks 0, 1, gloo:all_to_all, in which rank "
            rf"{1 - victim} waited; the last of rank {victim} is \d+, gloo:",
            told,
            re.MULTILINE,
        )


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
    assert (end.statuses, end.status["state"]) == ([0, 0], "finished"), end.ranks.said(0)


@pytest.mark.parametrize(("fault", "victim"), IN_A_STAGE)
def test_a_stage_that_hangs_is_named_and_not_one_that_waits_for_it(ended, fault, victim):
    reason = ended[fault, victim].status["reason"]
    assert _verdict(fault, victim) in reason
    assert f"rank {victim}: last in forward_backward of stage {victim}, attempt {FAULT_AT} " in reason


def test_a_rank_without_memory_ends_all_with_the_status_that_says_so(ended):
    end = ended[NO_MEMORY]
    assert end.statuses == [4, 4]
    assert end.status["reason"].startswith(f"rank 1, attempt {FAULT_AT}: ran out of memory: ")
    assert [end.ranks.said(rank).count("ran out of memory") for rank in range(2)] == [1, 0]
    assert "Traceback" not in end.ranks.said(1)
    assert "_without_memory" in (end.folder / "run/stacks_rank1.txt").read_text()
    memory = end.folder / "run/memory_rank1.txt"
    assert re.search(rf"rank 1: .* MiB of live tensors, listed in {memory}; the largest:\n", end.ranks.said(1))
    assert re.search(r"MiB +1 x master of blocks.1.\S+ to blocks.0.\S+, float32 \(", memory.read_text())
    assert not memory.with_name("memory_rank0.txt").exists()


def test_a_stopped_process_does_not_run():
    with subprocess.Popen(["sleep", "60"]) as process:
        sign = Sign(1, 0.0, 1, "", 1, 0, "", process.pid, process_start(process.pid))
        running = sign.runs
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        stopped = sign.runs
        process.kill()
    assert (running, stopped, sign.runs) == (True, False, False)


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
