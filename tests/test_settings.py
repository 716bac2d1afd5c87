"""A setting that the library and jobs share has the same limits in both, and its refusals name it."""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Annotated, get_args

import numpy as np
import pytest
import torch
from torch import nn

from megamix import (
    NAG,
    AdamW,
    DeepSpeedLossScale,
    DynamicLossScale,
    HeadroomLossScale,
    MegatronLossScale,
    Muon,
    ParamGroup,
    ShardedEngine,
    Sharding,
    StaticLossScale,
    TorchLossScale,
)
from megamix.config import Config
from megamix.config.choices import section_at
from megamix.config.sections import SECTIONS
from megamix.plugins import LOSS_SCALES, OPTIMIZERS, texts
from megamix.settings import limits
from megamix.settings.limits import PowerOfTwo, Share, check

# Classes of a program that share settings with a job, by the table that has these there.
LIBRARY = {
    "optimizer.adamw": (AdamW,),
    "optimizer.nag": (NAG,),
    "optimizer.muon": (Muon,),
    "optimizer.groups": (ParamGroup,),
    "precision.loss_scale.dynamic": (DynamicLossScale,),
    "precision.loss_scale.headroom": (HeadroomLossScale,),
    "precision.loss_scale.torch": (TorchLossScale,),
    "precision.loss_scale.megatron": (MegatronLossScale,),
    "precision.loss_scale.deepspeed": (DeepSpeedLossScale,),
}


def job_tables():
    """Return the tables of a job whose settings a class of the library has."""
    tables = {name: section_at(Config, [name], {}) for name in SECTIONS}
    tables |= {f"optimizer.{name}": section for name, section in OPTIMIZERS.sections.items()}
    tables |= {f"precision.loss_scale.{name}": section for name, section in LOSS_SCALES.sections.items()}
    tables["optimizer.groups"] = section_at(Config, ["optimizer", "groups", 0], {"optimizer": {"groups": [{}]}})
    return {name: section for name, section in tables.items() if name in LIBRARY}


def declaration(kind, key):
    """Return the class among the shared ones that declares a setting of a class; None: it has its own declaration."""
    owner = next((base for base in getattr(kind, "__mro__", ()) if key in vars(base).get("__annotations__", {})), None)
    return owner if owner is not None and owner.__module__.startswith("megamix.settings.") else None


def declared_once():
    """Return the settings that a program and a job have from one class, and that class."""
    found = {}
    for name, section in job_tables().items():
        for key, kind in ((key, kind) for key in section.model_fields for kind in LIBRARY.get(name, ())):
            if (owner := declaration(kind, key)) is not None and declaration(section, key) is owner:
                found[f"{name}.{key}"] = owner
    return found


ONCE = declared_once()


# Values of every kind, at the limits that settings have, and beyond them.
VALUES = (
    -1, 0, 1, 2, 5, 100, 101, True, False, None, "", "1e-3", "gradient", "velocity", "original", "match_rms_adamw", (),
    -1.0, 0.0, 1e-50, 2.0**-127, 2.0**-126, 0.3, 0.5, 0.999, 1.0, 1.5, 2.0, 4.0, 2.0**126, 2.0**127, math.inf, math.nan,
    (0.9,), (0.9, 0.95), (0.9, 1.0), (0.9, -0.1), (0.9, "0.95"), (0.9, True), "ab", [0.0, 0.5], (1, 0.5),
    (1.0, 2.0, 3.0), (1.0, 2.0, math.nan), (1, 2, 3), (1.0, 2.0, 3.0, 4.0), 10**9, 10**9 + 1, 2**31,
    ((1.0, 2.0, 3.0), (1, 2, 3)), ((1.0, 2.0),), ((1.0, 2.0, math.inf),),
)  # fmt: skip
# Settings that a program gives beside one: what it must give, and a range for any first scale.
OTHERS = {
    "optimizer.groups": {"pattern": "*"},
    **{f"optimizer.{name}": {"lr": 1.0} for name in OPTIMIZERS.sections},
    "optimizer.nag": {"lr": 1.0, "nesterov": False},
    **{
        f"precision.loss_scale.{name}": {"min_scale": 2.0**-126, "max_scale": 2.0**126} for name in LOSS_SCALES.sections
    },
}


def taken(build, key):
    """Return the values that a setting may have."""
    found = []
    for value in VALUES:
        with suppress(TypeError, ValueError):  # pydantic's, too
            build({key: value})
            found.append(value)
    return found


BY_UPDATE = ("lr_factor", "momentum", "weight_decay")  # a program may give a number for each update


@pytest.mark.parametrize("setting", ONCE)
def test_a_program_and_a_job_take_the_same_values(setting):
    name, _, key = setting.rpartition(".")
    (kind,), section = LIBRARY[name], job_tables()[name]
    pattern = {"pattern": "*"} if "pattern" in section.model_fields else {}
    by_program = taken(lambda setting: kind(**OTHERS[name] | setting), key)
    by_job = taken(lambda setting: section.model_validate(pattern | setting), key)
    if key in BY_UPDATE:
        assert [0.9] in [[*value] for value in by_program if isinstance(value, tuple)] or key == "weight_decay"
        by_program = [value for value in by_program if not isinstance(value, tuple | list)]
    assert by_job == by_program
    assert 0 < len(by_job) < len(VALUES)


CHOSEN_OR_SEVERAL = ("betas", "ns_coefficients", "ns_table", "momentum_form", "adjust_lr")  # others: number or truth


@pytest.mark.parametrize("setting", ONCE)
def test_a_setting_has_a_text_and_its_refusal_names_it_the_value_and_what_to_do(setting):
    name, _, key = setting.rpartition(".")
    assert len(texts(job_tables()[name])[key]) > 10
    with pytest.raises(
        ValueError if key in CHOSEN_OR_SEVERAL else TypeError,
        match=rf"^{key} of .* must be .*, got '1e-3'; leave it out",
    ):
        LIBRARY[name][0](**OTHERS[name] | {key: "1e-3"})


@pytest.mark.parametrize("wrong", [{"betas": (0.9, 1.0)}, {"weight_decay": math.nan}, {"eps": 0.0}])
def test_a_class_that_declares_a_setting_anew_keeps_its_limits(wrong):
    kinds = [("betas", tuple[float, float], (0.8, 0.9)), ("weight_decay", "float", 0.3), ("eps", float, 1e-6)]
    own = dataclasses.make_dataclass("Own", kinds, bases=(AdamW,), frozen=True, kw_only=True)
    (key,) = wrong
    usual = re.escape(str(getattr(own(lr=1.0), key)))
    with pytest.raises(ValueError, match=rf"^{key} of Own must be .*; leave it out for {usual}$"):
        own(lr=1.0, **wrong)


def test_types_that_are_no_single_known_kind_are_not_looked_at():
    kinds = [
        float | str | None, int | float | None, Callable[[], None], Callable[[], None] | None, Mapping[int, None],
        Annotated[tuple[float, float], "two"], "Half", None | float, Annotated[float, "in metres"],
    ]  # fmt: skip
    own = dataclasses.make_dataclass("Own", [(f"setting_{number}", kind) for number, kind in enumerate(kinds)])
    fine = ["auto", 0.5, print, print, (), None, None, None, 1e9]
    check(own(*fine))
    for number in (7, 8):
        with pytest.raises(TypeError, match=f"setting_{number} of Own must be a number, got 'x'$"):
            check(own(*fine[:number], "x", *fine[number + 1 :]))


def engine_of(**settings):
    return ShardedEngine(nn.Linear(2, 2), AdamW(lr=1.0), compile_update=False, **settings)


# Wrong in a program alone: a job's file holds no such value, or its section says more.
WRONG_IN_PROGRAMS = [
    (lambda: AdamW(lr="111"), "lr of AdamW must be a number, or a sequence .*, got '111'"),
    (lambda: AdamW(lr=[1.0, float("nan"), 2.0]), r"lr of AdamW must be finite, got \[1.0, nan, 2.0\]"),
    (lambda: AdamW(lr=[1.0, -1.0, 2.0]), "lr of AdamW must be at least 0"),
    (lambda: AdamW(lr=iter([1.0, 2.0])), "lr of AdamW must be a number"),
    (lambda: NAG(lr=1.0, momentum=[0.9, 1.0]), r"momentum of NAG must be less than 1, got \[0.9, 1.0\]; leave it out"),
    (lambda: NAG(lr=1.0, momentum=[]), "momentum of NAG must have at least one number"),
    (lambda: NAG(lr=1.0, groups=(ParamGroup(pattern="x", eps=1.0),)), "eps of group 'x' is 1.0, but NAG takes no eps"),
    (lambda: AdamW(lr=1.0, groups=ParamGroup(pattern="*")), r"groups takes a tuple .*; write groups=\(ParamGroup"),
    (lambda: ParamGroup(pattern=["*.bias"]), r"pattern of group .* must be text, got \['\*.bias'\]"),
    (lambda: Sharding(units=iter([])), r"units takes a sequence of submodules, .*; write \[\*model.blocks\]"),
    (lambda: StaticLossScale(True), "init_scale of StaticLossScale must be a number, got True"),
    (lambda: StaticLossScale(2.0**200), r"init_scale must be a power of two .*; use 1.70141e\+38"),
    (lambda: engine_of(grad_accum_steps=2.5), "grad_accum_steps must be a whole number, got 2.5; leave it out for 1"),
    (lambda: engine_of(clip_grad=True), "clip_grad must be a number, got True; 0 turns clipping off"),
]


@pytest.mark.parametrize(("build", "message"), WRONG_IN_PROGRAMS)
def test_a_program_is_refused_what_would_be_read_otherwise(build, message):
    with pytest.raises((TypeError, ValueError), match=message):
        build()


@pytest.mark.filterwarnings("error")
def test_numbers_of_numpy_become_python_s_own():
    of_numpy = Muon(
        lr=1.0, betas=[np.float32(0.5), np.float64(0.75)], ns_steps=np.int64(3), momentum=np.float64(0.5),
        groups=(ParamGroup(pattern="*", weight_decay=np.float16(0.5)),),
    )  # fmt: skip
    same = Muon(
        lr=1.0, betas=(0.5, 0.75), ns_steps=3, momentum=0.5, groups=(ParamGroup(pattern="*", weight_decay=0.5),)
    )
    assert repr(of_numpy) == repr(same)
    scales = (DynamicLossScale(np.float32(2), growth_interval=np.int64(7)), DynamicLossScale(2.0, growth_interval=7))
    assert repr(scales[0]) == repr(scales[1])
    assert type(StaticLossScale(np.float32(1024)).max_scale) is float
    assert type(engine_of(clip_grad=np.float32(1.0), grad_accum_steps=np.int64(2)).clip_grad) is float


def test_rates_for_each_update_may_be_an_array_or_a_tensor():
    """Whoever computes a schedule by numpy or torch."""
    for rates in (np.array([0.5, 0.25]), torch.tensor([0.5, 0.25]), [torch.tensor(0.5), np.float32(0.25)]):
        assert AdamW(lr=rates).lr == (0.5, 0.25)
    with pytest.raises(TypeError, match="lr of AdamW must be a number"):
        AdamW(lr=torch.ones(2, 2))


def test_a_rate_for_each_update_of_a_long_run_is_read_in_one_pass(monkeypatch):
    """Whoever trains for a million updates: only the extremes of floats are looked at one by one."""
    looked, own = [], limits._own
    monkeypatch.setattr(limits, "_own", lambda kind, value: looked.append(value) or own(kind, value))
    rates = [0.5] * 10_000
    assert len(AdamW(lr=rates).lr) == len(rates)
    assert len(looked) < 100


def test_what_a_class_works_out_is_no_setting():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Own(AdamW):
        first: float = dataclasses.field(init=False)

        def __post_init__(self):
            super().__post_init__()
            object.__setattr__(self, "first", self.betas[0] / 2)

    assert Own(lr=1.0, betas=(0.5, 0.9)).first == 0.25
    with pytest.raises(ValueError, match=r"^betas of Own must be less than 1"):
        Own(lr=1.0, betas=(1.0, 0.9))


def test_a_type_shows_all_of_its_limits():
    assert [repr(note) for note in (*get_args(Share)[1:], *get_args(PowerOfTwo)[1:])] == [
        "Limits(ge=0, lt=1)", "Limits(gt=0, power_of_two=True)",
    ]  # fmt: skip
