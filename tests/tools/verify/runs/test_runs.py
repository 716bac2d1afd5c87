"""`verify --runs` and `--twice` accuse no right job, and name what a resume, the data order or an operation gets wrong:
fault, update, rank, samples.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import pytest
import torch

from megamix.builders.objects import build_optimizer
from megamix.cli import main
from megamix.config import Config
from megamix.config.checks import check_config
from megamix.tools.ranks import RankFailure
from megamix.tools.verify.core.layout import parse_layout
from megamix.tools.verify.runs import run_lines
from megamix.tools.verify.runs.data_order import DataOrder, ranges, write_data
from megamix.tools.verify.runs.judge_runs import (
    WatchedRun,
    first_difference,
    log_problems,
    problems_alone,
    run_results,
    twice_problems,
    watched_part,
)
from megamix.tools.verify.runs.watched_run import BORDERS, JobPart, run_config
from tests.conftest import FULL
from tests.tools.verify.jobs import EXPERTS, make_config
from tests.tools.verify.runs.run_bugs import RUN_BUGS, RunBug, planted
from tests.tools.verify.test_command import SMALL

CPU = torch.device("cpu")
SEEDS = range(50 if FULL else 1)
ENDS = (*BORDERS, None)


def _work(bug: str, work: Callable[[JobPart], Any], part: JobPart) -> Any:
    with planted(bug):
        return work(part)


def _dynamic(config: Config, dropout: float = 0.0) -> Config:
    """Return a job whose loss scale grows within a run."""
    tree = config.model_dump()
    tree["data"]["packing"] = "documents" if dropout else "none"
    tree["precision"]["loss_scale"] = {"rule": "dynamic", "init_scale": 2.0**12, "growth_interval": 2}
    tree["model"] |= {"dropout": dropout, "num_layers": 1}
    return Config.model_validate(tree)


def _drawn(seed: int) -> tuple[Config, str]:
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
def test_a_job_that_is_right_passes(run_ranks, tmp_path: Path, seed: int) -> None:
    config, layouts = _drawn(seed)
    parsed = [*map(parse_layout, layouts.split(","))]
    ranks = {one.world_size: partial(run_ranks, _work, one.world_size, "") for one in parsed}
    found = [*run_results(config, parsed, tmp_path, ranks, CPU)]
    assert [problems for _, problems, _ in found] == [[], [], []]
    assert all(run.skipped >= 4 for run, *_ in found)  # those that are planted
    assert 0 < found[2][2] < 1


def test_a_schedule_in_tokens_has_the_same_shares_of_the_updates(tmp_path: Path) -> None:
    tree = make_config("dp1", dtype="fp16").model_dump()
    tree["training"]["tokens"] = 10**6
    tree["lr_schedule"] = {"decay_style": "wsd", "warmup_tokens": 10**5, "decay_tokens": 5 * 10**5}
    config, layout = Config.model_validate(tree), parse_layout("dp1")
    steps, by_updates = config.training.steps, layout.apply(config).lr_schedule
    assert (by_updates.warmup_steps, by_updates.decay_steps) == (steps // 10, steps // 2)
    assert check_config(run_config(config, [layout], layout, tmp_path, "one")) == []


def test_a_border_of_a_ramp_that_drops_a_waiting_batch_is_named(run_ranks, tmp_path: Path) -> None:
    config = make_config("dp1", dtype="fp16").with_keys(training={"batch_ramp": ((0, 4), (2, 8))})
    ranks = {1: partial(run_ranks, _work, 1, "ramp_drops_what_waits")}
    _, problems, _ = next(run_results(config, [parse_layout("dp1")], tmp_path, ranks, CPU))
    assert problems == ["never stopped on dp1: samples 8..11 are used 0 times"]


def test_a_job_with_experts_passes_and_biases_that_a_resume_loses_are_named(run_ranks, tmp_path: Path) -> None:
    config, names = make_config("dp1", dtype="bf16", model={"experts": EXPERTS}), ("dp2", "dp2ep2")
    layouts = [*map(parse_layout, names)]
    ranks = {2: partial(run_ranks, _work, 2, "")}
    found = [*run_results(config, layouts, tmp_path, ranks, CPU)]
    assert [problems for _, problems, _ in found] == [[], [], []]
    (straight, *_), _, (run, _, share) = found
    assert 0 < share < 1
    order = write_data(run.configs[0], tmp_path)
    for seen in run.parts[1][0]:
        seen.observed.buffers["blocks.1.feed_forward.router.balance.value"].zero_()
    lost = [*problems_alone(run, order, [read.planned for read in straight.reads(order)])]
    assert len(lost) == 2
    assert lost[1].startswith(
        "resumed twice on dp2, dp2ep2: blocks.1.feed_forward.router.balance.value on rank 1 is off by 0.00"
    )
    assert lost[1].endswith(" after the first resume; it looks like it was not loaded, and is zero")


def test_schedules_of_long_runs_fit_into_the_few_updates(tmp_path: Path) -> None:
    tree = make_config("dp1", name="nag").model_dump()
    momentum, decay = {"start": 0.85, "warmup_steps": 300}, {"end": 0.0, "warmup_steps": 0, "decay_steps": 400}
    tree["optimizer"]["schedules"] = {"momentum": momentum, "weight_decay": decay}
    layout = parse_layout("dp1")
    optimizer = build_optimizer(run_config(Config.model_validate(tree), [layout], layout, tmp_path, "run"))
    assert optimizer.momentum == (0.85, 0.875, *[0.9] * 7)
    assert optimizer.weight_decay[-1] == pytest.approx(optimizer.weight_decay[0] / 9)


def test_a_job_has_the_same_global_batch_on_every_layout(tmp_path: Path) -> None:
    layouts = [parse_layout(name) for name in ("cp2", "replicas2", "dp2replicas2", "dp2tp2", "pp2")]
    jobs = [run_config(make_config("dp1"), layouts, one, tmp_path, one.name) for one in layouts]
    assert {job.training.global_batch_size for job in jobs} == {16}


@dataclass
class Straight:
    """A job that never stopped, and two in three parts, without bugs; and their folders after each part."""

    folder: Path
    order: DataOrder
    straight: WatchedRun
    configs: dict[str, list[Config]]
    parts: dict[str, list[list[Any]]]

    @property
    def planned(self) -> list[Any]:
        return [read.planned for read in self.straight.reads(self.order)]


@pytest.fixture(scope="module")
def right(run_ranks, tmp_path_factory: pytest.TempPathFactory) -> Straight:
    folder, config = tmp_path_factory.mktemp("runs"), _dynamic(make_config("dp2"), dropout=0.1)
    layouts = [parse_layout("dp2"), parse_layout("dp1")]
    places = {"straight": layouts[:1], "same": layouts[:1] * 3, "changed": [layouts[1], layouts[0], layouts[0]]}
    configs = {
        name: [run_config(config, layouts, one, folder, name) for one in these] for name, these in places.items()
    }
    order = write_data(configs["same"][0], folder)
    parts: dict[str, list[Any]] = {}
    for name, these in places.items():
        ends = ENDS if len(these) > 1 else (None,)
        for number, (layout, until) in enumerate(zip(these, ends, strict=True)):
            if name != "straight" and until is None:
                break
            ranks = partial(run_ranks, _work, layout.world_size, "")
            seen = watched_part(ranks, JobPart(configs[name][number], until))
            parts.setdefault(name, []).append(seen)
            shutil.copytree(folder / name, folder / f"{name}{number}")
    straight = WatchedRun("never stopped on dp2", configs["straight"], parts["straight"])
    return Straight(folder, order, straight, configs, parts)


@pytest.mark.uncounted
@pytest.mark.parametrize("bug", RUN_BUGS, ids=lambda bug: bug.plant.__name__)
def test_a_planted_bug_is_named(run_ranks, right: Straight, tmp_path: Path, bug: RunBug) -> None:
    at, own = bug.at_resume, tmp_path / "run"
    shutil.copytree(right.folder / f"{bug.run}{at - 1}", own)
    config = right.configs[bug.run][at]
    config = config.with_keys(checkpoint={"folder": str(own)})
    seen = watched_part(partial(run_ranks, _work, 2, bug.plant.__name__), JobPart(config, ENDS[at]))
    run = WatchedRun(bug.run, [*[config] * at, config], [*right.parts[bug.run][:at], seen])
    problems = [*problems_alone(run, right.order, right.planned)]
    if bug.run == "same":
        problems += [*first_difference(right.straight, run)]
    assert any(all(words in problem for words in bug.words) for problem in problems), problems[:5]


def test_a_log_that_is_not_the_other_ones_is_named(right: Straight, tmp_path: Path) -> None:
    config = right.configs["straight"][0]
    shutil.copytree(right.folder / "straight0", tmp_path / "run")
    config, log = config.with_keys(checkpoint={"folder": str(tmp_path / "run")}), tmp_path / "run/metrics.jsonl"

    def problems(rows: list[str]) -> list[str]:
        log.write_text("".join(rows))
        return [*log_problems(right.straight, WatchedRun("resumed", [config], right.straight.parts), None)]

    rows = log.read_text().splitlines(keepends=True)
    assert problems(rows) == []
    (missing,) = problems(rows[:3] + rows[4:])
    assert missing == "resumed: metrics.jsonl, step 3: step is 4, of the run that never stopped 3"
    (short,) = problems(rows[:-1])
    assert short == f"resumed: metrics.jsonl has {len(rows) - 1} rows, of the run that never stopped {len(rows)}"


def _seed(seed: int, part: JobPart) -> JobPart:
    return replace(part, config=part.config.with_keys(training={"seed": seed}))


@pytest.mark.parametrize(
    ("bug", "seed", "words"),
    [
        ("", 5, ["after the start, master of ", "not deterministic, by what torch knows: none of the operations"]),
        ("summed_in_another_order", 1234, ["after attempt 0 (update 1), gradient of ", "none of the operations"]),
        ("put_in_any_order", 1234, ["after attempt 0 (update 1), gradient of ", "by what torch knows: put_"]),
    ],
)
def test_the_same_job_twice(run_ranks, tmp_path: Path, bug: str, seed: int, words: list[str]) -> None:
    def program(bug: str, seed: int, work: Callable[[JobPart], Any], part: JobPart) -> list[Any]:
        return run_ranks(_work, 1, bug, work, _seed(seed, part))

    config = _dynamic(make_config("dp1"))
    programs = [partial(program, "", 1234), partial(program, bug, seed)]
    problems = twice_problems(config, parse_layout("dp1"), tmp_path, programs)
    assert len(problems) == len(words)
    assert all(some in problem for some, problem in zip(words, problems, strict=True)), problems


class Pool:
    """The session's ranks in place of the command's pool."""

    run: Callable[..., list[Any]]
    on_gpus, where = False, "cpu"

    def __init__(self, size: int, where: str | None, **settings: object):
        self.size = size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def call(self, work: Callable[[JobPart], Any], part: JobPart, deadline_s: float | None = None) -> list[Any]:
        return self.run(work, self.size, part)


CONFIG = str(Path(__file__).parents[4] / "configs/quickstart.toml")


def test_the_command_names_what_differs_and_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    problems = [f"problem {number}" for number in range(10)]
    monkeypatch.setattr(run_lines, "pool_for", Pool)
    monkeypatch.setattr(run_lines, "twice_problems", lambda *_: problems)
    assert main(["verify", CONFIG, *SMALL, "--twice", "--layouts", "dp1"]) == 1
    told = capsys.readouterr().out.splitlines()
    assert told[1].split() == ["dp1", "cpu", "differs"]
    assert told[2:] == [*(f"  {problem}" for problem in problems[:8]), "  and 2 more"]

    def fails(*_: object) -> None:
        raise RankFailure("rank 1: no such thing")

    monkeypatch.setattr(run_lines, "twice_problems", fails)
    monkeypatch.setattr(run_lines, "run_results", fails)
    assert main(["verify", CONFIG, *SMALL, "--twice", "--layouts", "dp1"]) == 1
    assert main(["verify", CONFIG, *SMALL, "--runs"]) == 1
    assert capsys.readouterr().out.count("fails\nrank 1: no such thing") == 2


def test_more_layouts_than_parts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["verify", CONFIG, *SMALL, "--runs", "--layouts", "dp1,dp2,dp4,dp1"])
    assert "--layouts: got 4 names, but a job with two resumes has 3 parts; write up to 3" in capsys.readouterr().err


def test_samples_are_told_by_their_ranges() -> None:
    assert ranges([3, 1, 2, 7, 9, 10]) == "1..3, 7, 9..10"
    assert ranges(range(0, 20, 2)) == "0, 2, 4, 6, 8, 10, and others"
