"""`megamix audit -- COMMAND` watches one update of a script that does not know of it, as `megamix.audit` would, and
ends the script; if it cannot watch, it says why. It names the first number that is not finite, and ranks that train
apart.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

import megamix
from megamix.cli.verbs import main
from megamix.tools.audit.script import audit_script
from tests.tools.audit.forked import ForkedScript, audit_forked
from tests.tools.audit.scripts import LR, adamw, loss_of, model, train

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _in_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_it_tells_what_an_audit_in_the_loop_tells(capfd):
    module = model().bfloat16()
    optimizer = adamw(module, LR)
    train(module, optimizer, steps=2)
    with megamix.audit(module, optimizer) as report:
        train(module, optimizer, lambda module, step: loss_of(module, 2), steps=1)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", "--standalone"]
    assert main(["audit", "--", *torchrun, "-m", "tests.tools.audit.scripts", "half"]) == 1
    head, *page = capfd.readouterr().out.splitlines()
    assert head.startswith("update 3 of ")
    last = "judged: update 3; those before it for NaN alone; --updates N goes further"
    assert page == [*str(report).splitlines(), last]


@pytest.mark.parametrize(
    ("name", "updates", "where", "what"),
    [
        ("half_without_masters", 4, "0.weight", r"is NaN or infinite, first after update 1, and the gradient and"),
        ("log_of_negative", 4, "the loss", "is NaN or infinite, first at update 2: the training is lost"),
        ("root_of_zero", 3, "1.bias", "its gradient is NaN or infinite, first at update 3, and the loss was finite"),
    ],
)
def test_the_first_number_that_is_not_finite_is_wrong(name, updates, where, what):
    report = audit_forked(name, updates).report
    (wrong, *others) = report.warnings
    assert (wrong.harms, wrong.where, wrong.what[: len(what)]) == (True, where, what)
    assert not any(one.harms or "gradient" in one.what for one in others)


@pytest.mark.parametrize(
    ("name", "wrong", "wire"),
    [
        ("each_alone", "differs between the 2 ranks", "-"),
        ("never_met", "differs between the 2 ranks", "-"),
        ("averaging", "", "?"),
        ("never_synced", "that DistributedDataParallel keeps equal", "?"),
        ("inner_called", "that DistributedDataParallel keeps equal", "?"),
        ("last_synced", "", "f"),
    ],
)
def test_ranks_that_train_apart_are_told(name, wrong, wire):
    seen = audit_forked(name, 2, ranks=2)
    harms = [one for one in seen.report.warnings if one.harms]
    assert [(one.where, wrong in one.what) for one in harms] == [("0.weight, 1.weight, 1.bias", True)] * bool(wrong)
    assert seen.ranks == 2
    assert {row.dtypes["wire"][0] for row in seen.report.rows} == {wire}


def test_what_no_rank_averages_is_wrong_beside_what_is_equal():
    (wrong,) = audit_forked("forgotten_head", 2, ranks=2).report.warnings
    names = {"DistributedDataParallel.1.bias", "Linear.weight", "Linear.bias"}
    assert (wrong.harms, {*wrong.where.split(", ")}) == (True, names)
    assert "differs between the 2 ranks, while others are equal" in wrong.what


@pytest.mark.parametrize("name", ["tensor_parallel", "expert_parallel"])
def test_parts_of_a_model_that_ranks_divide_are_not_accused(name):
    (look,) = audit_forked(name, 2, ranks=2).report.warnings
    assert (look.harms, look.where) == (False, "1.part.weight")
    assert look.fix.startswith("That is right if each rank holds a part of the model")


def test_a_step_without_a_backward_moves_the_count_of_updates_unless_a_state_is_loaded_after_it():
    (wrong,) = audit_forked("begun_by_dcp", 3).report.warnings
    assert (wrong.harms, wrong.where) == (True, "the optimizer")
    assert "its first update had number 2" in wrong.what
    assert audit_forked("resumed_by_dcp", 3).report.warnings == []


def test_an_attempt_that_overflows_is_watched_anew_on_all_ranks():
    seen = audit_forked("overflowing", 3, ranks=2)
    assert (seen.ranks, seen.report.loss_scale, seen.report.warnings) == (2, 2.0**10, [])
    assert {row.dtypes["wire"] for row in seen.report.rows} == {"fp32"}


@pytest.mark.parametrize(
    ("name", "updates", "column"),
    [
        ("by_closure", 2, "gradient"),
        ("by_epochs", 3, "master"),  # an optimizer that is made anew is audited from its second update
        ("masters_by_hand", 2, "master"),  # the parameters' values come behind the step
        ("evaluating", 2, "compute"),  # no part of the updates
        ("accumulating", 3, "master"),  # many micro-batches are no sign of updates by hand
        ("from_an_edge", 2, "gradient"),
    ],
)
def test_what_is_unusual_in_a_script_is_seen_and_no_mistake(name, updates, column):
    report = audit_forked(name, updates).report
    assert report.warnings == []
    assert {(row.dtypes[column], row.lost is None) for row in report.rows} == {("fp32", False)}


def test_optimizers_take_turns_and_the_one_that_waits_is_not_judged():
    seen = audit_forked("in_turns", 3)
    names = [row.name.removeprefix("Sequential0.") for row in seen.report.rows]
    assert names == ["0.weight", "1.weight", "1.bias"]
    assert (seen.report.warnings, seen.unseen) == ([], 1)
    both = audit_forked("in_turns", 9).report
    (wrong,) = (one for one in both.warnings if one.harms)
    assert "no FP32 master" in str(wrong)
    assert wrong.where.startswith("Sequential1.")


def test_the_parameters_of_an_optimizer_that_waits_are_counted(capfd):
    with mock.patch.object(subprocess, "Popen", ForkedScript):
        assert main(["audit", "--", "in_turns", "1"]) == 0
    assert "the optimizer of 3 parameter(s) made no step meanwhile: not judged" in capfd.readouterr().err


def test_a_parameter_that_is_not_held_accuses_no_other_one_and_another_model_is_not_trained():
    report = audit_forked("partly_held", 2).report
    (wrong,) = report.warnings
    assert (wrong.where, wrong.what[:20]) == ("1.weight", "requires a gradient,")
    assert {row.name for row in report.rows} == {"0.weight", "1.weight", "1.bias"}


def test_what_a_compiled_function_computes_with_is_unknown():
    report = audit_forked("compiled_step", 2).report
    assert {row.dtypes[column][0] for row in report.rows for column in ("compute", "gradient")} == {"?"}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("once", r"it made 1 update\(s\) that can be audited; give it more to do"),
        ("twice", r"it made 2 update\(s\) that can be audited; write --updates 2, or give"),
        ("by_many", "one optimizer must make two in a row"),
        ("inside_backward", "its optimizers step inside backward"),
        ("flat", "the weights of FullyShardedDataParallel cannot be watched"),
        ("by_hand", "no torch.optim.Optimizer made an update"),
        ("by_hand_forever", "512 backward passes in a row made no update that can be seen.*verify --trainer"),
        ("by_grad_forever", "512 backward passes in a row made no update that can be seen"),
        ("loose_tensor", "no nn.Module holds what the optimizer moves"),
        ("by_engine", r"write with megamix.audit\(model, engine\): around a step"),
    ],
)
def test_where_it_cannot_see_it_says_why(name, why):
    with pytest.raises(ValueError, match=why):
        audit_forked(name, 3)


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ([sys.executable, "-c", "pass"], "no Python of this command has imported torch"),
        ([sys.executable, "-c", "raise SystemExit(3)"], "ended with status 3 before its update 3"),
    ],
)
def test_a_command_that_ends_too_early_is_told_why(command, why):
    with pytest.raises(ValueError, match=why):
        audit_script(command, 3)


def test_another_sitecustomize_still_runs(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.told = 5\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ValueError, match="ended with status 5"):
        audit_script([sys.executable, "-c", "raise SystemExit(told)"], 3)


def test_a_script_ends_with_its_audit():
    script = [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(600)"]
    command = [sys.executable, "-m", "megamix", "audit", "--", *script]
    audit = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert audit.stdout.readline() == "begun\n"
    audit.terminate()
    assert audit.communicate(timeout=60)[0] == ""  # both have closed it
    assert audit.returncode == 143


class _AskedAtOnce(subprocess.Popen):
    """A script whose audit is asked to end before it knows of it."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        _AskedAtOnce.last = self
        os.kill(os.getpid(), signal.SIGTERM)


def test_so_it_does_if_it_is_asked_to_end_as_the_script_starts():
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit("too early"))
    try:
        with mock.patch.object(subprocess, "Popen", _AskedAtOnce), pytest.raises(SystemExit, match="143"):
            audit_script([sys.executable, "-c", "import time; time.sleep(60)"], 3)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert _AskedAtOnce.last.poll() is not None


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["audit", "job.toml", "--", "python"], "it takes either CONFIG or -- COMMAND"),
        (["audit", "configs/quickstart.toml", "--updates", "0"], "--updates: got 0, must be at least 1"),
        (["audit", "--updates", "1", "--", "python"], "--updates: got 1, must be at least 2"),
        (["audit", "--", "no-such-program"], "No such file"),
        (["plan", "job.toml", "--", "python", "x.py"], "plan runs no command, got -- python x.py"),
    ],
)
def test_a_wrong_command_line_is_one_message(arguments, why, capsys):
    try:
        status = main(arguments)
    except SystemExit as error:
        status = int(str(error.code))
    assert (status, why in capsys.readouterr().err) == (2, True)
