"""`megamix checkpoint diff` finds every difference, to the bit and with its size; it finds none if a resumed run would
be the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from megamix import NAG, ShardedEngine
from megamix.checkpoint import boxes, verify
from megamix.checkpoint.actions import changes, diff, differences
from megamix.checkpoint.manifest import RunRecord
from megamix.checkpoint.save import save
from megamix.checkpoint.snapshot import owned_parts, take_snapshot
from megamix.checkpoint.verify import verify_checkpoint
from megamix.cli import main
from tests.checkpoint.state import all_or_none_of, fill, fp16_engine, save_steps

CONFIG = "[optimizer]\nlr = 0.5\n"


def _saved(
    folder: Path,
    hurt: Callable[[ShardedEngine], object] = lambda engine: None,
    engine: ShardedEngine | None = None,
    config: str = CONFIG,
) -> Path:
    """Save the state of step 3 after a change."""
    engine = engine or fp16_engine()
    fill(engine, 3)
    hurt(engine)
    run = RunRecord(progress={"consumed_samples": 3}, config=config)
    return save(folder, take_snapshot(engine, run), all_or_none_of(engine))


def _lines(old: Path, new: Path) -> list[str]:
    return list(differences(verify_checkpoint(old), verify_checkpoint(new)))


def _set(param: str, state: str, values: dict[int, float]) -> Callable[[ShardedEngine], None]:
    """Change elements of a parameter that lies in one box."""

    def change(engine: ShardedEngine) -> None:
        (part,) = (part for part in owned_parts(engine) if (part.param, part.state) == (param, state))
        for index, value in values.items():
            part.tensor[index] = value
        engine.publish_masters()

    return change


def test_other_ranks_and_buckets_are_no_difference(run_ranks, tmp_path: Path, capsys) -> None:
    run_ranks(save_steps, 2, tmp_path / "two", [3])
    save_steps(tmp_path / "one", [3], bucket_size=4000)
    one, two = (str(tmp_path / name / "step_00000003") for name in ("one", "two"))
    assert main(["checkpoint", "diff", one, two]) == 0
    assert capsys.readouterr().out == "no difference\n"


@pytest.mark.uncounted
def test_elements_are_counted_by_their_bits_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = _saved(tmp_path / "old", _set("norm.bias", "exp_avg", {0: 1.0, 1: 0.0, 2: math.nan, 3: 2.0}))

    def hurt(engine: ShardedEngine) -> None:
        _set("norm.bias", "exp_avg", {0: 1.5, 1: -0.0, 2: math.nan, 3: 1.75})(engine)
        _set("norm.weight", "master", {5: math.nan, 6: 1e9})(engine)
        _set("blocks.0.gain", "exp_avg_sq", {0: math.inf})(engine)

    new = _saved(tmp_path / "new", hurt)
    want = {
        "exp_avg of norm.bias: 3 of 24 elements (12.50%), by at most 5.000e-01",
        "master of norm.weight: 2 of 24 elements (8.33%), by at most nan",
        "exp_avg_sq of blocks.0.gain: 1 of 1 elements (100.00%), by at most inf",
    }
    assert set(_lines(old, new)) == set(_lines(new, old)) == want
    monkeypatch.setattr(boxes, "_LARGEST_SUB_BOX", 2)
    assert set(_lines(old, new)) == want  # a NaN in one piece is not lost to the number in the next


def test_configuration_counters_and_shapes_are_told_by_name(tmp_path: Path) -> None:
    old = _saved(tmp_path / "old")

    def hurt(engine: ShardedEngine) -> None:
        engine.applied_updates.fill_(4)
        engine.loss_scale.loss_scale.fill_(64.0)

    new = _saved(tmp_path / "new", hurt, config="[optimizer]\nlr = 0.25\nwarmup = 7\n")
    assert _lines(old, new) == [
        "config.optimizer.lr: 0.5 -> 0.25",
        "config.optimizer.warmup: (none) -> 7",
        "applied_updates: 3 -> 4",
        "loss_scale.loss_scale: 8.0 -> 64.0",
    ]
    assert [*diff(old, new)][-1] == "4 differences"
    broken = _saved(tmp_path / "broken", config="[")
    with pytest.raises(ValueError, match="its configuration is no TOML: "):
        _lines(old, broken)


def test_of_another_model_or_optimizer_what_both_have_is_compared(tmp_path: Path) -> None:
    torch.manual_seed(0)
    old = _saved(tmp_path / "old", engine=fp16_engine(model=nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))))
    other = fp16_engine(model=nn.Sequential(nn.Linear(4, 3, bias=False), nn.LayerNorm(5)), optimizer=NAG(lr=0.1))
    new = _saved(tmp_path / "new", _set("0.weight", "master", {0: 100.0}), other)
    lines = _lines(old, new)
    told = {
        "states.0.weight: master, exp_avg, exp_avg_sq -> master, momentum_buffer",
        "states.0.bias: master, exp_avg, exp_avg_sq -> (none)",
        "states.1.weight: master, exp_avg, exp_avg_sq -> master, momentum_buffer",
        "states.1.bias: master, exp_avg, exp_avg_sq -> master, momentum_buffer",
        "shape.0.bias: (3,) -> (none)",
        "shape.1.weight: (3,) -> (5,)",
        "shape.1.bias: (3,) -> (5,)",
    }
    assert told == set(lines[:7])
    (line,) = lines[7:]
    assert line.startswith("master of 0.weight: 1 of 12 elements (8.33%), by at most ")


def test_no_piece_is_larger_than_the_largest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0

    def read(self: verify.BoxReader, *place: object) -> torch.Tensor:
        nonlocal largest
        piece = original(self, *place)  # type: ignore[arg-type]
        largest = max(largest, piece.numel())
        return piece

    original = verify.BoxReader.read
    monkeypatch.setattr(verify.BoxReader, "read", read)
    monkeypatch.setattr(boxes, "_LARGEST_SUB_BOX", 100)
    _lines(_saved(tmp_path / "old"), _saved(tmp_path / "new"))
    assert 50 < largest <= 100


def test_changes_of_a_tree_are_told_value_by_value() -> None:
    old = {"a": {"b": 1, "c": [1, 2]}, "gone": {"x": True}}
    new = {"a": {"b": 1, "c": [1, 3]}, "came": 0}
    assert list(changes(old, new)) == ["a.c: [1, 2] -> [1, 3]", "gone: {'x': True} -> (none)", "came: (none) -> 0"]
    assert list(changes(old, old)) == []
