"""The checkpoint bench judges its goals right, on made-up figures, and its ranks really save, load, write and read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megamix.checkpoint.verify import verify_checkpoint
from megamix.model.family import parameter_count
from megamix.tools.bench import checkpoint_bench
from megamix.tools.bench.checkpoint_bench import Beside, CheckpointRank, checkpoint
from megamix.tools.bench.ranks import Settings
from tests.tools.bench.tiny import MODEL, WORK

PARAMS = parameter_count(MODEL)
SECONDS = {"write": 2.0, "save": 2.5, "read": 1.0, "load": 1.75}


class FakeRanks:
    """Two ranks, the second a little slower."""

    def __init__(self, name: str, actor: Any, *, world_size: int):
        assert world_size == 2

    def __enter__(self) -> FakeRanks:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        method = function.__name__
        if method == "saved_bytes":
            return [13 * PARAMS] * 2
        if method == "steps_beside_a_save":
            return [Beside(1.0, 0.25, 0.3, 2.4), Beside(0.9, 0.2, 0.375, 2.5)]
        return [SECONDS[method] - 0.1, SECONDS[method]]


def test_the_slowest_rank_counts_and_is_compared_with_plain_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_bench, "start_ranks", FakeRanks)
    result = checkpoint(Settings(work=WORK, rounds=3))
    assert [(round(goal.value, 3), round(goal.bound, 3), goal.met) for goal in result.goals] == [
        (1.25, 1.3, True),  # 2.5 s over 2
        (1.75, 1.5, False),
        (12.5, 10.0, False),  # 0.375 s until it has started, 0.25 s of that a copy; a step takes 1 s
        (13.0, 12.12, False),
    ]
    assert result.rows[1] == (
        "save", "2500 [2500, 2500]", f"{13e-6 * PARAMS / 2.5:.0f} [0, 0]", "1.25 [1.25, 1.25]"
    )  # fmt: skip
    lost = 37.5 + 250 - 200 - 25  # % of a step: the start and two steps, less two steps alone and a copy
    assert f"% of a step that 2 steps lose beside a save, beyond a copy: {lost:.0f} [62, 62]" in result.notes
    assert [len(result.raw[name]) for name in result.raw] == [3] * 7


def test_a_rank_moves_its_state_in_every_way(tmp_path: Path) -> None:
    rank = CheckpointRank(WORK, tmp_path)
    for _ in range(4):
        assert rank.write() > 0
        assert rank.save() > 0
    plain = [path for path in tmp_path.iterdir() if path.is_file()]
    saved = sorted((tmp_path / "checkpoints").iterdir())
    assert (len(plain), len(saved)) == (2, 2)  # as many of each are kept
    (shard,) = saved[-1].glob("rank_*")
    content = shard.read_bytes()
    assert len(content) % 64 == plain[0].stat().st_size % 64  # the same bytes, behind a header
    assert plain[0].stat().st_size == 12 * PARAMS
    assert rank.saved_bytes() == len(content) + (saved[-1] / "manifest.json").stat().st_size
    before = [flat.clone() for flat in rank._state]
    rank.losses(1)
    assert not all(map(torch.equal, rank._state, before))
    assert min(rank.load(True), rank.load(False), rank.read(True), rank.read(False)) > 0
    assert all(map(torch.equal, rank._state, before))


def test_steps_go_on_beside_a_save(tmp_path: Path) -> None:
    rank = CheckpointRank(WORK, tmp_path)
    beside = rank.steps_beside_a_save(2)
    assert min(beside) > 0
    (saved,) = (tmp_path / "checkpoints").iterdir()
    assert verify_checkpoint(saved).manifest.applied_updates == 3  # the first step and two alone, none beside it
    assert rank._ours.engine.applied_updates == 5
