"""A job on several ranks names a slow one on the console, in metrics.jsonl and in ranks.jsonl; one that waits for
another, and a single rank, are not named.
"""

import json
import socket
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch.distributed as dist

from megamix import clock
from megamix.clock import Clock
from megamix.model.transformer import Block
from megamix.supervise.console import Console
from tests.builders import run_on_ranks, tiny_job, write_data
from tests.conftest import FULL

INTERVALS = 8


def _job(folder, data, **keys):
    folder.mkdir(exist_ok=True)
    metrics = {"log_interval": 1}
    training = {"steps": INTERVALS, "eval_interval": 0}
    return tiny_job(folder, {"metrics": metrics, "training": training}, keys, tokens=data, valid=None)


def _rows(folder, name):
    return [json.loads(line) for line in (folder / "run" / name).read_text().splitlines()]


def _run_planted(config, slow):
    """Run a job whose clock reads 30 % more for the slow rank's forward and backward, and waits for the others. Return
    the console's lines on ranks.
    """
    late = dist.is_initialized() and dist.get_rank() == slow
    spans = {"data": 0.01, "forward_backward": 1.3 if late else 1.0, "update": 0.1}
    waits = {} if late else {"exposed_reduce_scatter": 0.2, "exposed_agreement": 0.1}
    lines = []
    with (
        mock.patch.object(Clock, "read", lambda clock: spans | waits),
        mock.patch.object(Console, "line", lambda console, text: lines.append(text)),
    ):
        run_on_ranks(config)
    return [line for line in lines if line.startswith("ranks")]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    return folder


def test_a_slow_rank_is_named(run_ranks, tmp_path, data):
    (line,), _ = run_ranks(_run_planted, 2, _job(tmp_path, data), 1)
    assert line == (
        f"ranks | rank 1 on {socket.gethostname()} is slow: 1.27 times the others' own time\n"
        "  in 5 of the last 5 log intervals; most in forward and backward, 1.3 s an attempt against 1"
    )
    rows = [row for row in _rows(tmp_path, "metrics.jsonl") if "ranks/slowest_rank" in row]
    assert len(rows) == INTERVALS - 2  # the first interval warms up, and each is told with the next one
    assert {(row["ranks/slowest_rank"], row["ranks/slowest_ratio"]) for row in rows} == {(1, 1.2703)}
    told = _rows(tmp_path, "ranks.jsonl")
    assert told[-1]["slow"] == [[1]]
    assert told[-1]["forward_backward_s"] == [1.0, 1.3]
    assert told[-1]["work_s"] < 1  # of the processor, for all intervals together


def test_ranks_alike_and_a_single_rank_name_nobody(run_ranks, tmp_path, data):
    assert run_ranks(_run_planted, 2, _job(tmp_path / "alike", data), None) == [[], []]
    assert [row["slow"] for row in _rows(tmp_path / "alike", "ranks.jsonl")] == [[]]  # beside the last, detailed line
    assert _run_planted(_job(tmp_path / "alone", data), 0) == []
    assert not (tmp_path / "alone/run/ranks.jsonl").exists()
    assert "ranks/slowest_rank" not in _rows(tmp_path / "alone", "metrics.jsonl")[-1]


def _on_core_s():
    """Return a clock that stands still while this thread waits for a core: other work on the machine does not count."""
    waited_ns = int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    return time.perf_counter() - waited_ns / 1e9


@contextmanager
def _slowed(share):
    """Let each block's forward take longer, so that forward and backward take `share` longer: backward takes twice as
    long as forward.
    """
    forward = Block.forward

    def slow_forward(block, *args, **keys):
        start_s = _on_core_s()
        result = forward(block, *args, **keys)
        time.sleep(max(0.0, 3 * share * (_on_core_s() - start_s)))  # the two readings are not of one instant
        return result

    on_core = SimpleNamespace(perf_counter=_on_core_s)
    with mock.patch.object(Block, "forward", slow_forward), mock.patch.object(clock, "time", on_core):
        yield


def _run_slowed(config, slow):
    with _slowed(0.3 if dist.get_rank() == slow else 0.0):
        run_on_ranks(config)


@pytest.mark.skipif(not FULL, reason="trains 40 jobs, by the clock")
def test_twenty_slowed_ranks_are_named_and_no_rank_of_twenty_jobs_without(run_ranks, tmp_path, data):
    named, seconds = [], []
    for number in range(40):
        slow = number % 2 if number < 20 else None
        folder = tmp_path / str(number)
        job = _job(
            folder,
            data,
            model={"hidden_size": 64},
            training={"steps": 240, "micro_batch_size": 8, "global_batch_size": 16},
            metrics={"log_interval": 20},
        )
        run_ranks(_run_slowed, 2, job, slow)
        path = folder / "run/ranks.jsonl"
        told = _rows(folder, "ranks.jsonl") if path.exists() else []
        named.append({rank for row in told for ranks in row["slow"] for rank in ranks})
        seconds += [row["work_s"] for row in told[-1:]]
    assert named == [{number % 2} for number in range(20)] + [set()] * 20
    print(f"processor time of a job's 12 intervals: at most {max(seconds):.4f} s")
