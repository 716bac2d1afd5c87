"""`verify --trainer` judges foreign trainings: torch's wrappers pass, planted bugs are named by their kind."""

import sys
from pathlib import Path

import pytest
import torch

from megamix.cli import main
from megamix.tools.ranks import RankPool
from megamix.tools.verify.core.table import result_lines, row
from megamix.tools.verify.core.verdict import Verdict
from megamix.tools.verify.foreign.judge_trainer import judge_trainer
from megamix.tools.verify.foreign.plain_optimizer import torch_update
from megamix.tools.verify.foreign.trainer import load_trainer
from megamix.tools.verify.foreign.trainer_lines import verify_trainer
from megamix.tools.verify.foreign.watch import _watch, watch_trainer
from tests.conftest import FULL

TRAINERS = str(Path(__file__).parent / "trainers.py")
STEPS = 4


def _verify(run_ranks, name, ranks):
    where = f"{TRAINERS}:{name}"
    return judge_trainer(load_trainer(where, ranks=ranks), run_ranks(watch_trainer, ranks, where, STEPS))


@pytest.mark.parametrize(
    ("name", "ranks", "skipped"),
    [
        ("Fsdp", 2, 0),
        ("FsdpEvaluates", 2, 0),
        ("InFabric", 2, 0),
        ("Zero", 2, 0),
        ("Scaled", 2, 1),
        ("TwoOptimizers", 2, 0),
        ("Factored", 2, 0),
    ]
    + ([("Plain", 1, 0), ("Ddp", 2, 0), ("Scheduled", 2, 0)] if FULL else []),  # test_right.py has similar ones
)
def test_a_right_training_passes(run_ranks, name, ranks, skipped):
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
        ("MeansLost", "weight", "states lost: this update began with zeros"),
        ("OneNeverSteps", "updates", "1 and 0 updates in one step"),
        ("AddedUp", "gradient", "before that 2 times the right one (counted twice"),
    ],
)
def test_a_planted_bug_is_named_by_its_kind(run_ranks, name, check, kind):
    first = _verify(run_ranks, name, 2).differences[0]
    assert first.check == check
    assert kind in first.looks_like


def test_initial_weights_of_another_parameter_are_told_as_such():
    said = {}
    for name in ("RowsMoved", "OthersValues"):
        where = f"{TRAINERS}:{name}"
        first = judge_trainer(load_trainer(where), [_watch(load_trainer(where), 1, bisect=False)]).differences[0]
        said[first.check, first.where] = first.looks_like
    assert said == {
        ("initial weight", "0.weight"): "other values in 100% of its elements",
        ("initial weight", "4.weight"): "that of 3.weight",
    }


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "OtherNames",
            "at the start: name of 0.weight: a parameter that only the plain model has; yours has inner.0.weight: "
            "return plain names from weights, gradients, groups and states",
        ),
        ("Padded", "at the start: name of 0.weight: of shape (64, 32), in the plain model of (50, 32)"),
    ],
)
def test_names_and_shapes_of_another_model_are_told_before_any_step_is_taken(name, told):
    where = f"{TRAINERS}:{name}"
    verdict = judge_trainer(load_trainer(where), [_watch(load_trainer(where), 1, bisect=False)])
    assert told in [str(one) for one in verdict.differences]
    assert {one.check for one in verdict.differences} == {"name"}


@pytest.mark.parametrize(
    ("name", "first", "left"),
    [
        ("Factored", None, ""),
        ("More", None, "  shard of 7 tensor(s): not compared: the plain optimizer keeps none of this shape"),
        ("Listed", None, "  weight of 7 tensor(s): not compared: the plain optimizer goes on from last, no tensor "),
        ("AnotherOptimizer", "another optimizer's: the plain one keeps exp_avg, exp_avg_sq", "  square_avg of 7 "),
    ],
)
def test_states_of_any_shape_are_compared_and_what_is_not_is_told(name, first, left):
    where = f"{TRAINERS}:{name}"
    verdict = judge_trainer(load_trainer(where), [_watch(load_trainer(where), STEPS, bisect=False)])
    assert [one.looks_like for one in verdict.differences[:1]] == ([first] if first else [])
    assert verdict.worst["weight"] > 0  # in the first update, at least
    lines = [str(line) for line in result_lines("1", "cpu", verdict) if "not compared" in line]
    assert all(line.startswith(left) for line in lines[:1])
    assert bool(lines) == bool(left)


@pytest.mark.parametrize(
    ("name", "wrong", "skipped"),
    [("AutocastInStep", None, 1), ("AutocastInForward", None, 0), ("AutocastAlone", "gradient of 1.weight", 0)],
)
def test_autocast_around_the_loss_is_the_precision_in_which_it_is_judged(run_ranks, name, wrong, skipped):
    where = f"{TRAINERS}:{name}"
    enter = torch.autocast.__enter__
    (seen,) = run_ranks(watch_trainer, 1, where, STEPS)
    verdict = judge_trainer(load_trainer(where), [seen])
    assert [f"{one.check} of {one.where}" for one in verdict.differences[:1]] == ([wrong] if wrong else [])
    assert verdict.skipped == skipped
    assert torch.autocast.__enter__ is enter


def test_an_eps_that_is_not_given_is_that_of_the_dtype_which_is_trained():
    weight = torch.ones(4, 4)
    param = torch.nn.Parameter(weight.clone())
    param.grad = torch.full_like(param, 1e-8)  # below the bounds of both
    optimizer = torch.optim.Adafactor([param])
    group, grad = optimizer.param_groups[0], param.grad.double()
    alone = torch_update(optimizer, group, "", grad, {"master": weight}, lr=1e-2, weight_decay=0.0, update=1)
    optimizer.step()
    assert not torch.equal(param, weight)
    torch.testing.assert_close(alone["master"].float(), param.detach(), rtol=1e-6, atol=0.0)


def test_the_verb_starts_the_ranks_and_prints_a_row_for_each_number(capsys):
    assert main(["verify", "--trainer", f"{TRAINERS}:Plain", "--ranks", "1"]) == 0
    head, line, _ = capsys.readouterr().out.splitlines()
    assert head.split() == ["ranks", "on", "attempts", "skipped", "loss", "gradients", "norm", "weights", "moments"]
    assert line.split()[:4] == ["1", "cpu", "4", "0"]
    assert line.split()[-1] == "passes"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--trainer", "nowhere.py:Mine"], "there is no file nowhere.py; write the path of your"),
        (["--trainer", f"{TRAINERS}:Ddpp"], "which has Plain, Ddp, Fsdp"),
        (["--trainer", f"{TRAINERS}:Ddp", "--ranks", "two"], "must be numbers of ranks; write --ranks 1,2"),
        (["--trainer", f"{TRAINERS}:Ddp", "--steps", "0"], "must be a number of steps, 1 or more; write --steps 4"),
        ([], "the config file is missing"),
        (["mine.py:Mine"], "CONFIG: got mine.py:Mine, no TOML file; write --trainer mine.py:MyTrainer"),
        (["job.toml", "--ranks", "4"], "--ranks has no effect beside a configuration's layouts"),
        (["job.toml", "--trainer", f"{TRAINERS}:Ddp"], "CONFIG has no effect beside --trainer"),
        (["job.toml", "--twice", "--bisect"], "--bisect has no effect beside --twice"),
    ],
)
def test_wrong_arguments_are_told_before_any_rank_is_started(capsys, arguments, told):
    with pytest.raises(SystemExit) as ended:
        main(["verify", *arguments])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("def model(self): return nn.Linear(4, 4)", "Mine.model() returned other weights when called again"),
        ("def batches(self, *_): return [torch.randint(50, (2, 16))]", "returned other samples when called again"),
        ("def batches(self, *_): return []", "returned nothing, must be a list of micro-batches"),
        ("def batches(self, *_): yield torch.ones(1)", "returned generator, must be a list of micro-batches"),
        ("def model(self): super().model()", "Mine.model() returned NoneType, must be an nn.Module; return it"),
        ("setup = ForeignTrainer.setup", "Mine lacks setup(self, model): return (module, optimizer)"),
        ("step = ForeignTrainer.step", "Mine lacks step(self, batches): train on them"),
        ("def optimizer(self, model): return {}", "of type dict, must be a torch.optim.Optimizer or a list"),
        ("def loss(self, *a): return super().loss(*a), 1", "returned tuple, must be the mean loss"),
        ("def loss(self, model, batch): return model(batch[0])", "returned a Tensor (16, 50), must be the mean loss"),
        ("def model(self): return super().model().append(nn.Dropout(0.1))", "set dropout to 0 in model()"),
        ("optimizer = setup = model = ForeignTrainer.model", "Mine lacks model(self): return the plain nn.Module"),
        ("import nothing_of_this_name", "No module named 'nothing_of_this_name'"),
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
    monkeypatch.syspath_prepend(Path(TRAINERS).parent)
    file = tmp_path / "mine.py"
    file.write_text(f"import torch\nfrom torch import nn\nfrom trainers import *\nclass Mine(Plain):\n    {body}\n")
    with pytest.raises(SystemExit) as ended:
        main(["verify", "--trainer", f"{file}:Mine"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert told in said
    assert "/megamix/tools/" not in said


def test_a_mistake_on_a_rank_is_told_without_our_traceback(capsys, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(Path(TRAINERS).parent)
    file = tmp_path / "mine.py"
    file.write_text("from trainers import *\nclass Mine(Plain):\n    def setup(self, model): return model\n")
    assert main(["verify", "--trainer", f"{file}:Mine", "--ranks", "1"]) == 1
    fault = "rank 0: Mine.setup returned (Sequential), must be (module, optimizer); write return module, optimizer"
    assert capsys.readouterr().out.splitlines()[1:3] == [row("1", "cpu", "fails"), fault]


@pytest.mark.parametrize(("told", "read"), [({"loss": torch.tensor(2.0), "run": "mine"}, {"loss": 2.0}), (None, {})])
def test_of_what_a_step_reports_the_loss_and_the_norm_are_read(told, read):
    trainer = load_trainer(f"{TRAINERS}:Plain")
    trainer.step = lambda batches: told
    assert _watch(trainer, 1, bisect=False)[1].told == read


def test_what_setup_and_step_return_is_told_where_it_is_of_another_type():
    trainer = load_trainer(f"{TRAINERS}:Plain")
    trainer.step = lambda batches: 2.3
    with pytest.raises(ValueError, match=r"Plain.step returned float, must be as {'loss': 2.3}, or None"):
        _watch(trainer, 1, bisect=False)
    trainer.setup = lambda model: (model, None, 3)
    with pytest.raises(ValueError, match=r"returned \(Sequential, NoneType, int\), must be \(module, optimizer\)"):
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
    wrong = Verdict()
    wrong.note("gradient", "up.weight", 3.0, 1e-5)
    assert [*result_lines("2", "cpu", wrong, bisect=True)][-1].startswith(
        "  first module: none, up to a factor: look after"
    )
    assert not any(
        "first module" in line
        for line in (*result_lines("2", "cpu", wrong), *result_lines("2", "cpu", Verdict(), bisect=True))
    )


def test_a_skipped_step_without_a_known_scaler_asks_for_it():
    trainer = load_trainer(f"{TRAINERS}:Plain")
    trainer.step = lambda batches: None
    first = judge_trainer(load_trainer(f"{TRAINERS}:Plain"), [_watch(trainer, 1, bisect=False)]).differences[0]
    assert str(first).endswith("took no step; if a GradScaler skipped it, set self.scaler to it in setup")


def test_numbers_of_many_digits_keep_to_their_columns():
    verdict = Verdict(worst={"loss": 51.8, "gradient": 165491.2})
    assert next(result_lines("2", "cpu", verdict)).split() == [
        "2",
        "cpu",
        "0",
        "0",
        "51.800",
        "1.65e+05",
        "-",
        "-",
        "-",
        "passes",
    ]


@pytest.mark.parametrize(
    ("package", "name"),
    [
        ("accelerate", "Accelerated"),
        ("deepspeed", "DeepSpeed"),
        ("deepspeed", "DeepSpeed2"),
        ("lightning_fabric", "Fabric"),
    ],
)
def test_a_training_by_a_package_passes(package, name):
    pytest.importorskip(package, reason=f"{package} is not installed")
    verdict = verify_trainer(f"{Path(__file__).parent / 'packages.py'}:{name}", RankPool(2), STEPS)  # ranks of its own
    assert verdict.differences == []
    assert verdict.skipped == 0


def test_a_file_may_have_the_name_of_a_module_and_takes_nobodys_place(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])  # processes of later tests would import the file as torch
    file = tmp_path / "torch.py"
    file.write_text("from megamix import ForeignTrainer\n\n\nclass Mine(ForeignTrainer): ...\n")
    assert type(load_trainer(f"{file}:Mine")).__name__ == "Mine"
    assert sys.modules["torch"] is torch
