"""`verify --trainer` judges somebody's own training: torch's wrappers pass, planted bugs are named by their kind."""

from pathlib import Path

import pytest

from megamix.cli import main
from megamix.verify.command import verify_trainer
from megamix.verify.judge_trainer import judge_trainer
from megamix.verify.trainer import load_trainer
from megamix.verify.verdict import Verdict
from megamix.verify.watch import watch_trainer

TRAINERS = str(Path(__file__).parent / "trainers.py")
STEPS = 4


def _verify(run_ranks, name: str, ranks: int) -> Verdict:
    where = f"{TRAINERS}:{name}"
    return judge_trainer(load_trainer(where, ranks=ranks), run_ranks(watch_trainer, ranks, where, STEPS))


@pytest.mark.parametrize(
    ("name", "ranks", "skipped"),
    [("Plain", 1, 0), ("Ddp", 2, 0), ("Fsdp", 2, 0), ("Zero", 2, 0), ("Scaled", 2, 1), ("Scheduled", 2, 0)],
)
def test_a_right_training_passes(run_ranks, name: str, ranks: int, skipped: int) -> None:
    verdict = _verify(run_ranks, name, ranks)
    assert verdict.differences == []
    assert (verdict.attempts, verdict.skipped) == (STEPS, skipped)
    assert 0 < verdict.worst["gradient"] < 1  # it was compared, and rounds
    assert 0 < verdict.worst["weight"] < 1


@pytest.mark.parametrize(
    ("name", "check", "kind"),
    [
        ("NotReduced", "gradient", "rank 0's own, not reduced over the ranks"),
        ("HalfMasters", "dtype", "no FP32 master: the optimizer keeps it in BF16"),
        ("ScaledNorm", "gradient", "of the gradient with the loss scale in it"),
        ("WrongDecay", "weight_decay", "0, where the plain optimizer has 0.1"),
        ("LateSchedule", "lr", "0.01 is the lr of update 1, not 2"),
    ],
)
def test_a_planted_bug_is_named_by_its_kind(run_ranks, name: str, check: str, kind: str) -> None:
    first = _verify(run_ranks, name, 2).differences[0]
    assert first.check == check
    assert kind in first.looks_like


def test_the_verb_starts_the_ranks_and_prints_a_row_for_each_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--trainer", f"{TRAINERS}:Plain", "--ranks", "1"]) == 0
    head, row, _ = capsys.readouterr().out.splitlines()
    assert head.split() == ["ranks", "attempts", "skipped", "loss", "gradients", "norm", "weights", "moments"]
    assert row.split()[:3] == ["1", "4", "0"]
    assert row.split()[-1] == "passes"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--trainer", "nowhere.py:Mine"], "must be a file and a class in it; write my_trainer.py:MyTrainer"),
        (["--trainer", f"{TRAINERS}:Ddpp"], "which has Plain, Ddp, Fsdp"),
        (["--trainer", f"{TRAINERS}:Ddp", "--ranks", "two"], "must be numbers of ranks; write --ranks 1,2"),
        ([], "the config file is missing"),
    ],
)
def test_wrong_arguments_are_told_before_any_rank_is_started(
    capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["verify", *arguments])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("package", "name"), [("accelerate", "Accelerated"), ("deepspeed", "DeepSpeed"), ("deepspeed", "DeepSpeed2")]
)
def test_a_training_by_a_package_passes(package: str, name: str) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed")
    verdict = verify_trainer(f"{Path(__file__).parent / 'packages.py'}:{name}", 2, STEPS)  # ranks of its own
    assert verdict.differences == []
    assert verdict.skipped == 0
