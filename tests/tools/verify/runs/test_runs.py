"""`verify --runs` and `--twice` accuse no right job, and name the first thing that a resume, the data order or an
operation gets wrong: the attempt, and a sample, number or tensor.
"""

import itertools
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megamix.builders.objects import build_optimizer
from megamix.cli import main
from megamix.config import Config
from megamix.config.checks import check_config
from megamix.tools.ranks import RankFailure
from megamix.tools.verify.core.layout import parse_layout
from megamix.tools.verify.runs import run_lines
from megamix.tools.verify.runs.run_lines import run_problems, runs_lines, twice_problems, watched
from megamix.tools.verify.runs.watched_run import run_config
from tests.conftest import FULL
from tests.tools.verify.jobs import EXPERTS, make_config
from tests.tools.verify.runs.run_bugs import RUN_BUGS, planted
from tests.tools.verify.test_command import SMALL

SEEDS = range(50 if FULL else 1)
ONE, TWO = parse_layout("dp1"), parse_layout("dp2")


class Pool:
    """The session's ranks in place of the command's pool."""

    run: Callable[..., list[Any]]
    on_gpus, where = False, "cpu"

    def __init__(self, size, where, **settings):
        self.size = size

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def call(self, work, *arguments, deadline_s=None):
        return self.run(work, self.size, *arguments)


def _work(bug, work, *arguments):
    with planted(bug):
        try:
            return work(*arguments)
        finally:
            torch.use_deterministic_algorithms(False)  # the command's ranks end there


def _pools(run_ranks, bug="", since=0):
    """Take the session's ranks, which have a bug since the start with this number."""
    starts = itertools.count()

    def run(work, size, *arguments):
        return run_ranks(_work, size, bug if next(starts) >= since else "", work, *arguments)

    return mock.patch.multiple(run_lines, pool_for=type("Planted", (Pool,), {"run": staticmethod(run)}))


def _dynamic(config, dropout=0.0):
    """Return a job whose loss scale grows within a run."""
    tree = config.model_dump()
    tree["data"]["packing"] = "documents" if dropout else "none"
    tree["precision"]["loss_scale"] = {"rule": "dynamic", "init_scale": 2.0**12, "growth_interval": 2}
    tree["model"] |= {"dropout": dropout, "num_layers": 1}
    return Config.model_validate(tree)


def _drawn(seed):
    draw = random.Random(seed)
    dtype = draw.choice(["fp16", "bf16", "fp32"])
    config = make_config(
        "dp1", family=draw.choice(["gpt", "llama"]), dtype=dtype, tied=draw.random() < 0.5,
        name=draw.choice(["adamw", "nag"]), clip_grad=draw.choice([0.0, 0.1, 1.0]),
    )  # fmt: skip
    if dtype == "fp16" and draw.random() < 0.7:
        config = _dynamic(config, draw.choice([0.0, 0.1]))
    tree = config.model_dump()
    tree["precision"]["on_overflow"] = draw.choice(["requeue", "redo", "skip"])
    tree["checkpoint"]["async_save"] = draw.random() < 0.5
    tree["data"]["packing"] = draw.choice(["none", "documents"])
    tree["model"]["num_layers"] = 2  # as many as a layout has stages
    tree["training"] |= {"seed": seed, "micro_batch_size": draw.choice([1, 2])}
    if seed % 2 == 0:
        tree["training"]["batch_ramp"] = [[0, 4], [2, 8]]
    layouts = draw.choice(["dp1,dp2", "dp2,dp1", "dp2,dp4,dp1", "tp2,dp1", "dp2,pp2", "replicas2,dp1", "dp1"])
    return Config.model_validate(tree), layouts


@pytest.mark.uncounted
@pytest.mark.parametrize("seed", SEEDS)
def test_a_job_that_is_right_passes(run_ranks, seed):
    config, layouts = _drawn(seed)
    with _pools(run_ranks):
        _, header, *rows = runs_lines(config, [*map(parse_layout, layouts.split(","))], None)
    assert header.split() == ["run", "on", "attempts", "skipped"]
    assert [row.split()[-1] for row in rows] == ["passes"] * len(rows)
    assert all(int(row.split()[-2]) >= 2 for row in rows)  # those that are planted


def test_a_schedule_in_tokens_has_the_same_shares_of_the_updates(tmp_path):
    tree = make_config("dp1", dtype="fp16").model_dump()
    tree["training"]["tokens"] = 10**6
    tree["lr_schedule"] = {"decay_style": "wsd", "warmup_tokens": 10**5, "decay_tokens": 5 * 10**5}
    config, layout = Config.model_validate(tree), parse_layout("dp1")
    steps, by_updates = config.training.steps, layout.apply(config).lr_schedule
    assert (by_updates.warmup_steps, by_updates.decay_steps) == (steps // 10, steps // 2)
    assert check_config(run_config(config, [layout], layout, tmp_path)) == []


def _job():
    return _dynamic(make_config("dp2"), dropout=0.1)


@pytest.fixture(scope="module")
def whole(run_ranks):
    """Return a job that never stopped, by its layout."""
    with _pools(run_ranks):
        return {one.name: watched(_job(), [ONE, TWO], [one], None) for one in (ONE, TWO)}


def _resumed(run_ranks, on, bug=""):
    """Return a job whose second start has a bug."""
    with _pools(run_ranks, bug, since=1):
        return watched(_job(), [ONE, TWO], on, None)


@pytest.mark.uncounted
@pytest.mark.parametrize("bug", RUN_BUGS, ids=lambda bug: bug.plant.__name__)
def test_a_planted_bug_is_named(run_ranks, whole, bug):
    for first in (TWO,) if bug.on_one_layout else (TWO, ONE):
        run = _resumed(run_ranks, [first, TWO], bug.plant.__name__)
        (problem,) = run_problems(whole[first.name], run, one_layout=first == TWO)
        assert problem.startswith(bug.words)


def test_a_log_that_is_not_the_other_ones_is_named(run_ranks, whole):
    run = _resumed(run_ranks, [TWO, TWO])

    def problems(rows):
        return run_problems(whole["dp2"], run._replace(rows=rows), one_layout=True)

    assert problems(run.rows) == []
    (missing,) = problems(run.rows[:2] + run.rows[3:])
    assert missing.startswith("in metrics.jsonl, step 2: ")
    (short,) = problems(run.rows[:-1])
    assert re.search(r"^in metrics.jsonl, step 6: step is None, not 6, and \d+ more$", short)


def test_a_job_with_experts_passes_and_biases_that_a_resume_loses_are_named(run_ranks):
    config, layouts = make_config("dp1", dtype="bf16", model={"experts": EXPERTS}), [TWO, parse_layout("dp2ep2")]
    with _pools(run_ranks):
        straight, run = (watched(config, layouts, on, None) for on in (layouts[:1], layouts))
    assert run_problems(straight, run, one_layout=False) == []
    for seen in run.starts[1][0]:
        seen.observed.buffers["blocks.1.feed_forward.router.balance.value"].zero_()
    (lost,) = run_problems(straight, run, one_layout=False)
    assert lost.startswith("after the resume: blocks.1.feed_forward.router.balance.value is #")


def test_schedules_of_long_runs_fit_into_the_few_updates(tmp_path):
    tree = make_config("dp1", name="nag").model_dump()
    momentum, decay = {"start": 0.85, "warmup_steps": 300}, {"end": 0.0, "warmup_steps": 0, "decay_steps": 400}
    tree["optimizer"]["schedules"] = {"momentum": momentum, "weight_decay": decay}
    layout = parse_layout("dp1")
    optimizer = build_optimizer(run_config(Config.model_validate(tree), [layout], layout, tmp_path))
    assert optimizer.momentum == (0.85, 0.875, *[0.9] * 4)
    assert optimizer.weight_decay[-1] == pytest.approx(optimizer.weight_decay[0] / 6)


def test_a_job_has_the_same_global_batch_on_every_layout(tmp_path):
    layouts = [parse_layout(name) for name in ("cp2", "replicas2", "dp2replicas2", "dp2tp2", "pp2")]
    jobs = [run_config(make_config("dp1"), layouts, one, tmp_path) for one in layouts]
    assert {job.training.global_batch_size for job in jobs} == {16}


@pytest.mark.parametrize(
    ("bug", "words"),
    [
        (
            "another_seed",
            ["after the start: master of ", "not deterministic, by what torch knows: none of the operations"],
        ),
        ("summed_in_another_order", ["after attempt 0 (update 1): sample 0 of its batch is ", "none of"]),
        ("put_in_any_order", ["after attempt 0 (update 1): gradient of ", "by what torch knows: put_"]),
    ],
)
def test_the_same_job_twice(run_ranks, bug, words):
    with _pools(run_ranks, bug, since=1):
        problems = twice_problems(_dynamic(make_config("dp1")), ONE, None)
    assert len(problems) == len(words)
    assert all(some in problem for some, problem in zip(words, problems, strict=True)), problems


CONFIG = str(Path(__file__).parents[4] / "configs/quickstart.toml")


def test_the_command_names_what_differs_and_ends_with_1(monkeypatch, capsys):
    problems = ["the first difference", "operations"]
    monkeypatch.setattr(run_lines, "pool_for", Pool)
    monkeypatch.setattr(run_lines, "twice_problems", lambda *_: problems)
    assert main(["verify", CONFIG, *SMALL, "--twice", "--layouts", "dp1"]) == 1
    told = capsys.readouterr().out.splitlines()
    assert told[1].split() == ["dp1", "cpu", "differs"]
    assert told[2:] == [f"  {problem}" for problem in problems]

    def fails(*_):
        raise RankFailure("rank 1: no such thing")

    monkeypatch.setattr(run_lines, "twice_problems", fails)
    monkeypatch.setattr(run_lines, "watched", fails)
    assert main(["verify", CONFIG, *SMALL, "--twice", "--layouts", "dp1"]) == 1
    assert main(["verify", CONFIG, *SMALL, "--runs"]) == 1
    assert capsys.readouterr().out.count("fails\nrank 1: no such thing") == 2
