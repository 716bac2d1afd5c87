"""A job on several ranks names a slow one on the console, in metrics.jsonl and in ranks.jsonl; one that waits for
another, and a single rank, are not named.
"""

import json
import socket
from unittest import mock

import torch.distributed as dist

from megamix.base.clock import Clock
from megamix.base.console import Console
from tests.builders import run_on_ranks, tiny_job

INTERVALS = 8


def _job(folder, data, **settings):
    own = {"log_interval": 1, "steps": INTERVALS, "eval_interval": 0, "valid": None}
    return tiny_job(folder, tokens=data, **own | settings)


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
