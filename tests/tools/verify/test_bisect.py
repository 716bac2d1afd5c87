"""`verify --bisect` names the module that is wrong, forward or backward, in a foreign training and in a layout."""

from pathlib import Path
from unittest import mock

import pytest
import torch

from megamix.parallel import build
from megamix.tools.verify.foreign import trainer as foreign
from megamix.tools.verify.foreign import watch
from megamix.tools.verify.foreign.judge_trainer import judge_trainer
from megamix.tools.verify.foreign.trainer import load_trainer
from megamix.tools.verify.layouts.judge_steps import judge
from megamix.tools.verify.layouts.observe import observe
from tests.conftest import FULL
from tests.tools.verify.foreign.trainers import spoil
from tests.tools.verify.jobs import make_config

TRAINER = f"{Path(__file__).parent / 'foreign/trainers.py'}:Deep"
MODULES = [f"{block}.{part}" for block in (1, 2, 3) for part in ("norm", "up", "down")] + ["4"]
PLANTED = [(name, what) for name in MODULES for what in ("output", "gradient")]


def watch_planted(name, what):
    def planted(*place):
        trainer = load_trainer(*place)
        trainer.spoiled = name, what
        return trainer

    with mock.patch.object(foreign, "load_trainer", planted):
        return watch.watch_trainer(TRAINER, 1, bisect=True)


@pytest.mark.parametrize(("name", "what"), [("", ""), *PLANTED] if FULL else [("", ""), *PLANTED[2::9]])
def test_the_planted_module_is_named_and_none_of_a_right_training(run_ranks, name, what):
    seen = run_ranks(watch_planted, 2, name, what)
    verdict = judge_trainer(load_trainer(TRAINER, ranks=2), seen)
    assert seen[0][1].tape
    assert bool(verdict.differences) == bool(name)
    where, _, told = verdict.culprit.partition(": ")
    assert where == name
    assert told.startswith({"output": "its output is", "gradient": "its input gradient is", "": ""}[what])


def observe_planted(config, name, what):
    right = build.build_model

    def planted(*args, **kwargs):
        model, placements = right(*args, **kwargs)
        if module := dict(model.named_modules()).get(name):  # a stage has only some
            spoil(module, what)
        return model, placements

    with mock.patch.object(build, "build_model", planted):
        return observe(config, 1, None, bisect=True)


@pytest.mark.parametrize(
    ("layout", "name", "what"),
    [
        ("dp2", "blocks.1.feed_forward", "output"),
        ("tp2", "blocks.0.attention_norm", "gradient"),
        ("pp2", "blocks.1.attention", "output"),
        ("cp2", "blocks.1.attention", "output"),
        ("cp2", "blocks.0.attention_norm", "gradient"),
    ],
)
def test_the_planted_module_of_a_layout_is_named(run_ranks, layout, name, what):
    config = make_config(layout, dtype="fp32")
    verdict = judge(config, run_ranks(observe_planted, 2, config, name, what), torch.device("cpu"), 1, None)
    assert verdict.culprit.split(": ")[0] == name


def test_modules_of_several_dtypes_are_judged_by_the_coarsest(run_ranks):
    where = TRAINER.replace("Deep", "Mixed")
    seen = run_ranks(watch.watch_trainer, 2, where, 1, True)
    trainer = load_trainer(where, ranks=2)
    assert judge_trainer(trainer, seen).differences == []
    for rank in seen:
        rank[1].gradients["3.weight"] = rank[1].gradients["3.weight"] * 2
    verdict = judge_trainer(trainer, seen)
    assert verdict.differences[0].where == "3.weight"
    assert verdict.culprit == ""  # a gradient that is wrong behind backward has no module
