"""`verify --runs` accuses no right job, and it and `--twice` name the first thing that a resume, the data order or an
operation gets wrong: the attempt, and a sample, number or tensor.
"""

import itertools
import random
import re
import shutil
from contextlib import nullcontext
from unittest import mock

import pytest
import torch

from megamix.cli.verbs import main
from megamix.config import Config
from megamix.config.checks import check_config
from megamix.tools.ranks import RankFailure
from megamix.tools.verify.core.layout import parse_layout
from megamix.tools.verify.runs import run_lines
from megamix.tools.verify.runs.run_lines import run_problems, runs_lines, twice_problems, watched
from megamix.tools.verify.runs.watched_run import run_config
from megamix.train.objects import build_optimizer
from tests.conftest import FULL
from tests.tools.verify.jobs import EXPERTS, make_config
from tests.tools.verify.runs import run_bugs
from tests.tools.verify.test_command import CONFIG, SMALL

SEEDS = range(50 if FULL else 1)
ONE, TWO = parse_layout("dp1"), parse_layout("dp2")


def pools(run):
    """Take the session's ranks, by `run(work, size, *arguments)`, in place of the command's pool."""

    def pool_of(size, where, **settings):
        pool = mock.MagicMock(where="cpu")
        pool.call = lambda work, *arguments, deadline_s=None: run(work, size, *arguments)
        pool.__enter__.return_value = pool
        return pool

    return mock.patch.object(run_lines, "RankPool", pool_of)


def _work(bug, work, *arguments):
    with getattr(run_bugs, bug)() if bug else nullcontext():
        try:
            return work(*arguments)
        finally:
            torch.use_deterministic_algorithms(False)  # the command's ranks end there


@pytest.fixture(scope="module")
def right_first(run_ranks, tmp_path_factory):
    """Return the session's ranks with a bug in all starts but the first one, which is once for all bugs of a job."""
    kept = {}

    def right_first(job, bug):
        starts = itertools.count()

        def run(work, size, config, *arguments):
            if next(starts):
                return run_ranks(_work, size, bug, work, config, *arguments)
            if job not in kept:
                kept[job] = run_ranks(_work, size, "", work, config, *arguments), tmp_path_factory.mktemp("run")
                shutil.copytree(config.checkpoint.folder, kept[job][1], dirs_exist_ok=True)
            seen, folder = kept[job]
            shutil.copytree(folder, config.checkpoint.folder, dirs_exist_ok=True)
            return seen

        return pools(run)

    return right_first


def changed(config, **sections):
    tree = config.model_dump()
    for name, keys in sections.items():
        tree[name] |= keys
    return Config.model_validate(tree)


def _dynamic(config, dropout=0.0):
    """Return a job whose loss scale grows within a run."""
    scale = {"rule": "dynamic", "init_scale": 2.0**12, "growth_interval": 2}
    return changed(
        config, data={"packing": "documents" if dropout else "none"}, precision={"loss_scale": scale},
        model={"dropout": dropout, "num_layers": 1},
    )  # fmt: skip


JOB = _dynamic(make_config("dp2"), dropout=0.1)


def _drawn(seed):
    draw = random.Random(seed)
    dtype = draw.choice(["fp16", "bf16", "fp32"])
    config = make_config(
        "dp1", family=draw.choice(["gpt", "llama"]), dtype=dtype, tied=draw.random() < 0.5,
        name=draw.choice(["adamw", "nag"]), clip_grad=draw.choice([0.0, 0.1, 1.0]),
    )  # fmt: skip
    if dtype == "fp16" and draw.random() < 0.7:
        config = _dynamic(config, draw.choice([0.0, 0.1]))
    config = changed(
        config, precision={"on_overflow": draw.choice(["requeue", "redo", "skip"])},
        checkpoint={"async_save": draw.random() < 0.5}, data={"packing": draw.choice(["none", "documents"])},
        model={"num_layers": 2},  # as many as a layout has stages
        training={"seed": seed, "micro_batch_size": draw.choice([1, 2])}
        | ({} if seed % 2 else {"batch_ramp": [[0, 4], [2, 8]]}),
    )  # fmt: skip
    return config, draw.choice(["dp1,dp2", "dp2,dp1", "dp2,dp4,dp1", "tp2,dp1", "dp2,pp2", "replicas2,dp1", "dp1"])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_job_that_is_right_passes(run_ranks, seed):
    config, layouts = _drawn(seed)
    with pools(run_ranks):
        _, _, *rows = runs_lines(config, [*map(parse_layout, layouts.split(","))], None)
    assert [row.split()[-1] for row in rows] == ["passes"] * len(rows)
    assert all(int(row.split()[-2]) >= 2 for row in rows)  # those that are planted


@pytest.mark.parametrize("bug", ["", "mirror_one_step_old"])
def test_a_run_that_dies_goes_on_from_memory_and_a_mirror_that_is_a_step_old_is_named(run_ranks, bug):
    config = changed(JOB, checkpoint={"mirror": 7})
    with pools(lambda work, size, *arguments: run_ranks(_work, size, bug, work, *arguments)):
        _, _, *rows = runs_lines(config, [TWO], None)
    ends = {"": ["passes", "passes"], "mirror_one_step_old": ["passes", "differs"]}[bug]
    assert [row.split()[-1] for row in rows[:2]] == ends
    assert rows[1].startswith("dp2, from memory ")
    assert len(rows) == 2 if not bug else rows[2].startswith("  after the resume: ")


def test_a_schedule_in_tokens_has_the_same_shares_of_the_updates(tmp_path):
    schedule = {"decay_style": "wsd", "warmup_tokens": 10**5, "decay_tokens": 5 * 10**5}
    config = changed(make_config("dp1"), training={"tokens": 10**6}, lr_schedule=schedule)
    steps, by_updates = config.training.steps, ONE.apply(config).lr_schedule
    assert (by_updates.warmup_steps, by_updates.decay_steps) == (steps // 10, steps // 2)
    assert check_config(run_config(config, [ONE], ONE, tmp_path)) == []


@pytest.fixture(scope="module")
def whole(run_ranks):
    """Return a job that never stopped, by its layout."""
    with pools(run_ranks):
        return {one.name: watched(JOB, [ONE, TWO], [one], None) for one in (ONE, TWO)}


@pytest.mark.parametrize(("bug", "words"), [(bug, words) for bug, _, words in run_bugs.RUN_BUGS])
def test_a_planted_bug_is_named(right_first, whole, bug, words):
    first = TWO if "dropout" in bug else ONE  # dropout is compared where the layout stays
    with right_first(first, bug):
        run = watched(JOB, [ONE, TWO], [first, TWO], None)
    (problem,) = run_problems(whole[first.name], run, one_layout=first == TWO)
    assert problem.startswith(words)


def test_a_log_that_is_not_the_other_ones_is_named(right_first, whole):
    with right_first(TWO, ""):
        run = watched(JOB, [ONE, TWO], [TWO, TWO], None)
    rows = run.rows
    right, missing, short = (
        run_problems(whole["dp2"], run._replace(rows=some), one_layout=True)
        for some in (rows, rows[:2] + rows[3:], rows[:-1])
    )
    assert right == []
    assert missing[0].startswith("in metrics.jsonl, step 2: ")
    assert re.search(r"^in metrics.jsonl, step 6: step is None, not 6, and \d+ more$", short[0])


def test_a_job_with_experts_passes_and_biases_that_a_resume_loses_are_named(run_ranks):
    config, layouts = make_config("dp1", dtype="bf16", model={"experts": EXPERTS}), [TWO, parse_layout("dp2ep2")]
    with pools(run_ranks):
        straight, run = (watched(config, layouts, on, None) for on in (layouts[:1], layouts))
    assert run_problems(straight, run, one_layout=False) == []
    for seen in run.starts[1][0]:
        seen.observed.buffers["blocks.1.feed_forward.router.balance.value"].zero_()
    (lost,) = run_problems(straight, run, one_layout=False)
    assert lost.startswith("after the resume: blocks.1.feed_forward.router.balance.value is #")


def test_schedules_of_long_runs_fit_into_the_few_updates(tmp_path):
    momentum, decay = {"start": 0.85, "warmup_steps": 300}, {"end": 0.0, "warmup_steps": 0, "decay_steps": 400}
    schedules = {"momentum": momentum, "weight_decay": decay}
    config = changed(make_config("dp1", name="nag"), optimizer={"schedules": schedules})
    optimizer = build_optimizer(run_config(config, [ONE], ONE, tmp_path))
    assert optimizer.momentum == (0.85, 0.875, *[0.9] * 4)
    assert optimizer.weight_decay[-1] == pytest.approx(optimizer.weight_decay[0] / 6)


def test_a_job_has_the_same_global_batch_on_every_layout(tmp_path):
    layouts = [parse_layout(name) for name in ("cp2", "replicas2", "dp2replicas2", "dp2tp2", "pp2")]
    jobs = [run_config(make_config("dp1"), layouts, one, tmp_path) for one in layouts]
    assert {job.training.global_batch_size for job in jobs} == {16}


@pytest.mark.parametrize(
    ("bug", "words"),
    [
        ("another_seed", ("after the start: master of ", "none of the operations")),
        ("summed_in_another_order", ("after attempt 0 (update 1): sample 0 of its batch is ", "none of")),
        ("put_in_any_order", ("after attempt 0 (update 1): gradient of ", "by what torch knows: put_")),
    ],
)
def test_the_same_job_twice(right_first, bug, words):
    with right_first("twice", bug):
        problems = twice_problems(_dynamic(make_config("dp1")), ONE, None)
    assert len(problems) == len(words)
    assert all(some in problem for some, problem in zip(words, problems, strict=True)), problems


def test_the_command_names_what_differs_and_ends_with_1(monkeypatch, capsys):
    problems = ["the first difference", "operations"]
    monkeypatch.setattr(run_lines, "twice_problems", lambda *_: problems)
    assert main(["verify", CONFIG, *SMALL, "--twice", "--layouts", "dp1"]) == 1
    told = capsys.readouterr().out.splitlines()
    assert told[1].split() == ["dp1", "cpu", "differs"]
    assert told[2:] == [f"  {problem}" for problem in problems]

    for name in ("twice_problems", "watched"):
        monkeypatch.setattr(run_lines, name, mock.Mock(side_effect=RankFailure("rank 1: no such thing")))
    assert main(["verify", CONFIG, *SMALL, "--twice", "--layouts", "dp1"]) == 1
    assert main(["verify", CONFIG, *SMALL, "--runs"]) == 1
    assert capsys.readouterr().out.count("fails\nrank 1: no such thing") == 2
