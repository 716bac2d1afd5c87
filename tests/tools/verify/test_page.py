"""Every command of docs/verify.md runs and prints the text below it, and its script passes.
A trainer without accessible gradients is judged by its updates, and an overflow is never within a bound.
"""

import copy
import math
import re
import shlex
from pathlib import Path

import pytest
import torch

from megamix.cli.verbs import main
from megamix.tools.verify.core.hypotheses import RightStep
from megamix.tools.verify.core.reference import Reference, finite
from megamix.tools.verify.core.update_kinds import RightUpdate
from megamix.tools.verify.core.verdict import Verdict
from megamix.tools.verify.foreign import trainer_lines
from megamix.tools.verify.foreign.judge_buffers import check_buffers
from megamix.tools.verify.foreign.judge_trainer import judge_trainer
from megamix.tools.verify.foreign.trainer import load_trainer
from megamix.tools.verify.foreign.watch import SeenStep, watch_trainer
from tests.tools.verify.catalogue.foreign import ByHand
from tests.tools.verify.catalogue.run import judged
from tests.tools.verify.runs.test_runs import pools
from tests.tools.verify.test_command import CONFIG, SMALL

PAGE = (Path(__file__).parents[3] / "docs/verify.md").read_text(encoding="utf-8")


class Blind(ByHand):
    """Training whose gradients cannot be had."""

    def gradients(self, module, optimizer):
        return {}


class BlindAndTurned(Blind):
    def reduce(self):
        for grad in self.grads().values():
            grad.neg_()


def test_every_command_of_the_page_runs_and_prints_what_stands_below_it(run_ranks, tmp_path, monkeypatch, capsys):
    _, script, targets = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)  # tests/tools/audit runs the first
    (tmp_path / "my_trainer.py").write_text(f"{script}\n{targets}")  # another method of the script's class
    (tmp_path / "configs").symlink_to(Path(CONFIG).parent)
    monkeypatch.chdir(tmp_path)

    def by_these_ranks(trained, pool, steps, bisect):
        whole, world = str(tmp_path / trained), pool.world_size
        return judge_trainer(load_trainer(whole, ranks=world), run_ranks(watch_trainer, world, whole, steps, bisect))

    monkeypatch.setattr(trainer_lines, "verify_trainer", by_these_ranks)
    said = {}
    for line, below in re.findall(r"^```\nmegamix ([^\n]*)\n```\n(?:\n```\n(.*?)^```$)?", PAGE, re.M | re.S):
        with pools(run_ranks):
            assert main([*shlex.split(line), *(SMALL if "configs/" in line else [])]) == 0
        said[line] = capsys.readouterr().out
        assert _masked(below or said[line]) == _masked(said[line])
    of_scripts = PAGE.count("\nmegamix audit -- ")  # tests/tools/audit/test_script.py runs such
    assert len(said) == PAGE.count("\nmegamix ") - of_scripts == 5
    rows = [line.split() for line in said["verify --trainer my_trainer.py:Mine --ranks 1,2"].splitlines()[1:3]]
    assert [(row[0], row[-1]) for row in rows] == [("1", "passes"), ("2", "passes")]
    assert said["verify configs/quickstart.toml --twice --layouts dp2"].endswith(
        "dp2                  cpu  the same, bit for bit\n"
    )


def _masked(text):
    """Return a text without sizes, which are smaller here, and shares, which other machines round in another order."""
    return re.sub(r"=\d+|\d+\.\d+", "#", text)


def test_without_gradients_updates_are_judged(run_ranks):
    right, wrong = judged(run_ranks, 1, [f"{__file__}:{name}" for name in ("Blind", "BlindAndTurned")])
    assert right.differences == []
    assert "gradient" not in right.worst
    assert 0 < right.worst["weight"] < 1
    first = wrong.differences[0]
    assert (first.attempt, first.check, first.looks_like) == (0, "weight", "its sign is turned")


def test_what_is_not_finite_is_never_within_a_bound():
    verdict, weight = Verdict(), torch.ones(4)
    verdict.note("gradient", "weight", 1.0, math.inf)
    verdict.equal("weight", "bias", torch.ones(2), torch.ones(2))
    right = RightUpdate(
        rule=lambda grad, before, **_: {"master": weight.double()}, name="w", before={"master": weight}, lr=1e-3,
        grad=torch.zeros(4, dtype=torch.float64), weight_decay=0.0, update=1, attempts=1,
    )  # fmt: skip
    right.note(verdict, {"master": torch.tensor([1.0, 1.0, torch.nan, 1.0])}, {"master": torch.float32})
    assert [(one.check, one.error) for one in verdict.differences] == [("gradient", 1.0), ("weight", math.inf)]


def _reference(plain, loss=torch.sum):
    def loss_of(model, batch):
        return loss(model(batch.to([*model.parameters()][-1].dtype)))

    return Reference(plain, copy.deepcopy(plain).double(), loss_of, loss_of)


def test_a_loss_that_is_not_finite_on_one_rank_alone_names_the_rank():
    step = RightStep(_reference(torch.nn.Linear(1, 1)), {}, [[(0, 0.25)] * 2] * 2)
    told = step.rank_apart([[1.0, 1.0], [1.0, math.nan]], [1.0] * 4, 0.1)
    assert told.startswith("another forward on rank 1 alone")


def test_a_micro_batch_of_few_targets_overflows_by_its_own_share_of_the_scale():
    reference = _reference(torch.nn.Linear(1, 1, bias=False))
    many, few = torch.tensor([[1.0]]), torch.tensor([[3.0]])
    weights = {"weight": torch.ones(1, 1, dtype=torch.float16)}
    step = reference.step(reference.native, weights, [(many, 0.75), (few, 0.25)], 2.0**15)  # 3 * 2^15 is beyond FP16
    assert finite(step.grads)
    assert step.grads["weight"].item() == pytest.approx(0.75 * 1 + 0.25 * 3, rel=2**-9)


@pytest.mark.parametrize(("ranks", "numbers"), [(1, 2), (2, 1)])
def test_a_factor_is_told_of_ranks_and_of_micro_batches_only_where_there_are_several(ranks, numbers):
    right = RightStep(_reference(torch.nn.Linear(1, 1)), {}, [[(0, 1.0)] * numbers] * ranks)
    (twice,) = (text for factor, text in right.meanings() if factor == 2)
    absent = "ranks" if ranks == 1 else "micro-batches"
    assert "added up over" in twice
    assert absent not in twice


@pytest.mark.parametrize("group", [[0, 1], [0, 2]])
def test_the_gradient_of_one_row_or_column_of_a_mesh_is_named(group):
    plain = torch.nn.Linear(3, 2, bias=False)
    reference = _reference(plain, lambda out: out.square().sum())
    batches = [[(torch.eye(3)[:1] * (rank + 1) + rank, 0.25)] for rank in range(4)]
    right = RightStep(reference, dict(plain.named_parameters()), batches)
    assert right.explain("weight", {"weight": 2 * right.whole["weight"]}, 1e-9).startswith("2 times the right one")
    assert "parts" not in vars(right)  # a factor alone takes no further step
    found = {"weight": torch.stack([right.parts[rank][0]["weight"] for rank in group]).sum(0) * 2}
    told = right.explain("weight", found, 1e-9)
    assert told == f"that of ranks {group} alone, not reduced over the others"


@pytest.mark.parametrize(("updates", "wrong"), [([0], []), ([1], ["0.running_mean", "0.running_var"])])
def test_a_skipped_step_may_put_back_what_forward_moved_and_an_update_may_not(updates, wrong):
    plain = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    kept = {name: buffer.clone() for name, buffer in plain.named_buffers() if buffer.is_floating_point()}
    weights = {name: param.detach().clone() for name, param in plain.named_parameters()}
    right = RightStep(_reference(plain), weights | kept, [[(torch.arange(12.0).view(4, 3), 1.0)]])
    seen, verdict = SeenStep(weights=weights, buffers=kept, updates=updates), Verdict()
    check_buffers(verdict, right, seen, seen)
    assert [one.where for one in verdict.differences] == wrong
