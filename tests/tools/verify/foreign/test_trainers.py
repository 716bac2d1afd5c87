"""`verify --trainer` judges foreign trainings: unusual ones pass, and what is wrong with a trainer is told. It compares
every rank's buffers with the plain model's before the first step, in the dtype that is kept: a wrong, lost or missing
buffer is named, one that is merely rounded by its dtype is noted.
"""

import sys
from collections import UserDict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megamix.cli.verbs import main
from megamix.tools.verify.core.reference import moved
from megamix.tools.verify.core.table import result_lines, row
from megamix.tools.verify.core.tape import tensors_in
from megamix.tools.verify.core.verdict import Verdict
from megamix.tools.verify.foreign.judge_buffers import check_first_buffers
from megamix.tools.verify.foreign.judge_trainer import judge_trainer
from megamix.tools.verify.foreign.plain_optimizer import torch_update
from megamix.tools.verify.foreign.trainer import load_trainer
from megamix.tools.verify.foreign.watch import SeenStep, _watch
from tests.tools.verify.catalogue import foreign
from tests.tools.verify.catalogue.run import judged
from tests.tools.verify.foreign.trainers import TABLE

TRAINERS = Path(__file__).parent / "trainers.py"
BY_HAND = f"{foreign.__file__}:ByHand"
STEPS = 4


def _alone(name, steps=1):
    where = f"{TRAINERS}:{name}"
    return judge_trainer(load_trainer(where), [_watch(load_trainer(where), steps, bisect=False)])


def test_unusual_trainings_pass(run_ranks):
    names = ("FsdpEvaluates", "TwoOptimizers", "Factored", "Renamed")
    for verdict in judged(run_ranks, 2, [f"{TRAINERS}:{name}" for name in names], STEPS):
        assert verdict.differences == []
        assert (verdict.attempts, verdict.skipped) == (STEPS, 0)
        assert 0 < verdict.worst["gradient"] < 1  # it was compared, and rounds
        assert 0 < verdict.worst["weight"] < 1


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("RowsMoved", ("initial weight", "embed.weight", "other values in 100% of its elements")),
        ("OthersValues", ("initial weight", "head.weight", "that of embed.weight")),
        (
            "OtherNames",
            (
                "name",
                "embed.weight",
                "a parameter that only the plain model has; yours has inner.embed.weight: "
                "return plain names from weights, gradients, groups and states",
            ),
        ),
        ("Padded", ("name", "embed.weight", "of shape (64, 16), in the plain model of (40, 16)")),
    ],
)
def test_another_model_is_told_before_any_step_is_taken(name, told):
    at_start = [one for one in _alone(name).differences if one.attempt < 0]
    assert {one.check for one in at_start} == {told[0]}
    assert told in [(one.check, one.where, one.looks_like) for one in at_start]


@pytest.mark.parametrize(
    ("name", "first", "left"),
    [
        ("Factored", None, ""),
        ("More", None, "  shard of 8 tensor(s): not compared: the plain optimizer keeps none of this shape"),
        ("Listed", None, "  weight of 8 tensor(s): not compared: the plain optimizer goes on from last, no tensor "),
        ("AnotherOptimizer", "another optimizer's: the plain one keeps exp_avg, exp_avg_sq", "  square_avg of 8 "),
    ],
)
def test_states_of_any_shape_are_compared_and_what_is_not_is_told(name, first, left):
    verdict = _alone(name, STEPS)
    assert [one.looks_like for one in verdict.differences[:1]] == ([first] if first else [])
    assert verdict.worst["weight"] > 0  # in the first update, at least
    lines = [str(line) for line in result_lines("1", "cpu", verdict) if "not compared" in line]
    assert all(line.startswith(left) for line in lines[:1])
    assert bool(lines) == bool(left)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("NeverClipped", ["skipping: no step overflowed", "clipping: no gradient was longer than clip_grad 100"]),
        ("AtRateZero", ["the update: lr was 0 in every step"]),
        ("Factored", []),
    ],
)
def test_what_no_step_shows_is_not_judged(name, told):
    verdict = _alone(name)
    lines = [str(line) for line in result_lines("1", "cpu", verdict) if "not judged" in line]
    assert verdict.differences == []
    assert [line.partition(";")[0] for line in lines] == [f"  not judged: {each}" for each in told]


def test_an_eps_that_is_not_given_is_that_of_the_dtype_which_is_trained():
    weight = torch.ones(4, 4)
    param = torch.nn.Parameter(weight.clone())
    param.grad = torch.full_like(param, 1e-8)  # below the bounds of both
    optimizer = torch.optim.Adafactor([param])
    group, grad = optimizer.param_groups[0], param.grad.double()
    alone = torch_update(optimizer, group, grad, {"master": weight}, lr=1e-2, weight_decay=0.0, update=1)
    optimizer.step()
    assert not torch.equal(param, weight)
    torch.testing.assert_close(alone["master"].float(), param.detach(), rtol=1e-6, atol=0.0)


def test_the_verb_starts_the_ranks_and_prints_a_row_for_each_number(capsys):
    assert main(["verify", "--trainer", BY_HAND, "--ranks", "1"]) == 0
    head, line, _ = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["ranks", "on", "attempts", "skipped"]
    assert line.split()[:4] == ["1", "cpu", "4", "0"]
    assert line.split()[-1] == "passes"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--trainer", "nowhere.py:Mine"], "there is no file nowhere.py; write the path of your"),
        (["--trainer", f"{BY_HAND}s"], "which has ByHand, Ddp, Fsdp"),
        (["--trainer", BY_HAND, "--ranks", "two"], "must be numbers of ranks; write --ranks 1,2"),
        (["--trainer", BY_HAND, "--steps", "0"], "must be a number of steps, 1 or more; write --steps 4"),
        ([], "the config file is missing"),
        (["mine.py:Mine"], "CONFIG: got mine.py:Mine, no TOML file; write --trainer mine.py:MyTrainer"),
        (["job.toml", "--ranks", "4"], "--ranks has no effect beside a configuration's layouts"),
        (["job.toml", "--trainer", BY_HAND], "CONFIG has no effect beside --trainer"),
        (["job.toml", "--twice", "--bisect"], "--bisect has no effect beside --twice"),
    ],
)
def test_wrong_arguments_are_told_before_any_rank_is_started(capsys, arguments, told):
    with pytest.raises(SystemExit) as ended:
        main(["verify", *arguments])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def _mine(folder, body):
    file = folder / "mine.py"
    file.write_text(f"from tests.tools.verify.catalogue.foreign import *\nclass Mine(ByHand):\n    {body}\n")
    return f"{file}:Mine"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("def model(self): return nn.Linear(4, 4)", "Mine.model() returned other weights when called again"),
        ("def batches(self, *_): return [torch.randint(40, (2, 16))]", "returned other samples when called again"),
        ("def batches(self, *_): return []", "returned nothing, must be a list of micro-batches"),
        ("def batches(self, *_): yield torch.ones(1)", "returned generator, must be a list of micro-batches"),
        ("def model(self): super().model()", "Mine.model() returned NoneType, must be an nn.Module; return it"),
        ("setup = ForeignTrainer.setup", "Mine lacks setup(self, model): return (module, optimizer)"),
        ("def optimizer(self, model): return {}", "of type dict, must be a torch.optim.Optimizer or a list"),
        ("def loss(self, *a): return super().loss(*a), 1", "returned tuple, must be the mean loss"),
        ("def loss(self, model, batch): return model(batch[0])", "returned a Tensor (16, 40), must be the mean loss"),
        ("def model(self): return nn.Sequential(super().model(), nn.Dropout(0.1))", "set dropout to 0 in model()"),
        ("optimizer = setup = model = ForeignTrainer.model", "Mine lacks model(self): return the plain nn.Module"),
        (
            "def batches(self, *_): return [(torch.ones(16).long(), torch.tensor([1] * k + [-100] * (16 - k)))"
            " for k in (8, 16)]",
            "micro-batches of step 0 have 8 to 16 targets, and Mine.targets is not defined; write def targets(self, b",
        ),
        (
            "def batches(self, *_): return [torch.ones(k, 3) for k in (2, 4)]",
            "micro-batches of step 0 have 2 to 4 targ",
        ),
        ("def model(:", "SyntaxError"),
        ("step = None", "Mine.step is None, must be a method; write def step(self, ...)"),
        ("def loss(self, *a): return 1 / 0", "Mine raised ZeroDivisionError: division by zero\n  File"),
        (
            "def loss(self, model, batch): return (torch.ones(2, 2) @ torch.ones(2, 2).half()).sum()",
            "; verify also calls loss with the model in FP64: cast to a weight's dtype, as x.to(weight.dtype)\n",
        ),
    ],
)
def test_a_trainer_that_is_no_reference_is_refused_before_any_rank_is_started(
    capsys, monkeypatch, tmp_path, body, told
):
    monkeypatch.setattr("megamix.tools.verify.foreign.trainer_lines.verify_trainer", None)
    with pytest.raises(SystemExit) as ended:
        main(["verify", "--trainer", _mine(tmp_path, body)])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert told in said
    assert "/megamix/tools/" not in said


def test_a_mistake_on_a_rank_is_told_without_our_traceback(capsys, tmp_path):
    assert main(["verify", "--trainer", _mine(tmp_path, "def setup(self, model): return model"), "--ranks", "1"]) == 1
    fault = "rank 0: Mine.setup returned (Net), must be (module, optimizer); write return module, optimizer"
    assert capsys.readouterr().out.splitlines()[1:3] == [row("1", "cpu", "fails"), fault]


@pytest.mark.parametrize(("told", "read"), [({"loss": torch.tensor(2.0), "run": "mine"}, {"loss": 2.0}), (None, {})])
def test_of_what_a_step_reports_the_loss_and_the_norm_are_read(told, read):
    trainer = load_trainer(BY_HAND)
    trainer.step = lambda batches: told
    start, step = _watch(trainer, 1, bisect=False)
    assert step.told == read
    first = judge_trainer(load_trainer(BY_HAND), [[start, step]]).differences[0]
    assert str(first).endswith("took no step; if a GradScaler skipped it, set self.scaler to it in setup")


def test_what_setup_and_step_return_is_told_where_it_is_of_another_type():
    trainer = load_trainer(BY_HAND)
    trainer.step = lambda batches: 2.3
    with pytest.raises(ValueError, match=r"ByHand.step returned float, must be as {'loss': 2.3}, or None"):
        _watch(trainer, 1, bisect=False)
    trainer.make = lambda module: SimpleNamespace(step=None)
    with pytest.raises(ValueError, match="an optimizer of type SimpleNamespace, must be a torch.optim.Optimizer"):
        _watch(trainer, 1, bisect=False)
    trainer.setup = lambda model: (model, None, 3)
    with pytest.raises(ValueError, match=r"returned \(Net, NoneType, int\), must be \(module, optimizer\)"):
        _watch(trainer, 1, bisect=False)


def test_a_difference_without_a_distance_is_told_as_what_it_is():
    verdict = Verdict()
    verdict.expect("optimizer", "up.weight", False, "not among the optimizer's parameters")
    verdict.attempt = 2
    verdict.note("gradient", "up.weight", 3.0, 1e-5, "its sign turned")
    assert [*map(str, verdict.differences)] == [
        "at the start: optimizer of up.weight: not among the optimizer's parameters",
        "attempt 2: gradient of up.weight is off by 3, bound 1e-05; it looks like its sign turned",
    ]


def test_a_bisection_that_finds_no_module_says_so():
    wrong, told = Verdict(), "  first module: none, up to a factor: look after"
    wrong.note("gradient", "up.weight", 3.0, 1e-5)
    for verdict, bisect, says in ((wrong, True, True), (wrong, False, False), (Verdict(), True, False)):
        assert str([*result_lines("2", "cpu", verdict, bisect)][-1]).startswith(told) is says


def test_a_file_may_have_the_name_of_a_module_and_takes_nobodys_place(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])  # processes of later tests would import the file as torch
    file = tmp_path / "torch.py"
    file.write_text("from megamix import ForeignTrainer\n\n\nclass Mine(ForeignTrainer): ...\n")
    assert type(load_trainer(f"{file}:Mine")).__name__ == "Mine"
    assert sys.modules["torch"] is torch


@pytest.mark.parametrize(
    ("kept", "told"),
    [
        (TABLE, None),
        (TABLE.bfloat16(), None),
        (TABLE * 1.7, "1.7 times the right one"),
        (TABLE**1.25, "the right one to the power of 1.25, as rotary frequencies of another base"),
        (torch.zeros(8), "nothing but zeros"),
        (torch.full((8,), torch.nan), "memory that nobody has filled, as to_empty() leaves it"),
        (TABLE.sin(), "that of sines"),
        (TABLE.flip(0), "other values in 100% of its elements"),
        (TABLE[:4], "of shape (8,) in the plain model, and here of shape (4,)"),
        (None, "of shape (8,) in the plain model, and here there is none"),
        (torch.polar(torch.ones(8), TABLE), None),
    ],
)
def test_a_buffer_is_compared_in_the_dtype_that_is_kept(kept, told):
    right = kept if kept is not None and kept.is_complex() else TABLE
    others = {"sines": TABLE.sin(), "mask": torch.ones(3, dtype=torch.bool)}
    plain, mine = others | {"table": right}, others | ({} if kept is None else {"table": kept})
    verdict = Verdict()
    check_first_buffers(verdict, plain, [SeenStep(buffers=plain), SeenStep(buffers=mine)])
    assert [(one.where, one.looks_like) for one in verdict.differences] == ([("table on rank 1", told)] if told else [])
    rounded = kept is not None and kept.dtype == torch.bfloat16
    assert bool(verdict.left) == rounded


def test_what_is_rounded_added_or_moved_on_purpose_is_noted_and_passes(run_ranks):
    (verdict,) = judged(run_ranks, 1, [f"{TRAINERS}:Kept"])
    assert verdict.differences == []
    assert {str(line) for line in result_lines("1", "cpu", verdict)} >= {
        "  initial buffer of 1 tensor(s): rounded to BF16, as it is kept, and compared so",
        "  initial buffer of 1 tensor(s): not compared: the plain model has none of this name",
        "  buffer of 1 tensor(s): not compared: your step moves it, the plain model's forward does not",
    }


@pytest.mark.parametrize(
    "kind", [type("Batch", (list,), {}), type("Row", (tuple,), {}), lambda parts: UserDict(x=parts)]
)
def test_the_tensors_of_a_batch_of_any_class_are_moved_and_seen(kind):
    batch = kind([torch.ones(2)])
    (tensor,) = tensors_in(batch)
    assert tensor.dtype == torch.float32
    (tensor,) = tensors_in(moved(batch, torch.float64))
    assert tensor.dtype == torch.float64
