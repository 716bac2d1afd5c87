"""Each setting of the library and of jobs has one default in both, or is in a table with the reason."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest

from megamix import (
    NAG,
    AdamW,
    Checkpoints,
    DeepSpeedLossScale,
    DynamicLossScale,
    HeadroomLossScale,
    MegatronLossScale,
    Muon,
    Optimizer,
    ParamGroup,
    Precision,
    ShardedEngine,
    Sharding,
    StaticLossScale,
    TorchLossScale,
    schedules,
)
from megamix.builders.objects import DTYPES
from megamix.config import Config
from megamix.config.choices import section_at
from megamix.config.sections import SECTIONS
from megamix.plugins import LOSS_SCALES, OPTIMIZERS, Section

Keys = dict[str, Any]
_MISSING = object()
# Callables that take settings in a program, by the table that has these in a job.
LIBRARY: dict[str, tuple[Callable[..., object], ...]] = {
    "optimizer": (Optimizer, ShardedEngine),
    "optimizer.adamw": (AdamW,),
    "optimizer.nag": (NAG,),
    "optimizer.muon": (Muon,),
    "optimizer.groups": (ParamGroup,),
    "lr_schedule": (schedules.rule,),
    "precision": (Precision,),
    "precision.loss_scale.dynamic": (DynamicLossScale,),
    "precision.loss_scale.headroom": (HeadroomLossScale,),
    "precision.loss_scale.torch": (TorchLossScale,),
    "precision.loss_scale.megatron": (MegatronLossScale,),
    "precision.loss_scale.deepspeed": (DeepSpeedLossScale,),
    "precision.loss_scale.static": (StaticLossScale,),
    "parallelism": (Sharding,),
    "checkpoint": (Checkpoints,),
}
OBJECT = "an object of the program's, which a job builds from its other tables"
BY_TABLE = "a job has a table instead"
DTYPE = "a job names the format, a program gives torch's dtype; the default is the same"
LIMIT = "a limit that is not there: in TOML a key that is left out, in a program a number"
OF_A_RUN = "only a run has it: a program has a loop of its own"
# Settings of one side alone, or with another default, and why.
DIFFERS = {
    "optimizer.name": "the class says it in a program",
    "optimizer.min_lr": "a job's schedule ends there; an argument of the schedules",
    "optimizer.weight_decay": "0.1 in a job, whichever optimizer; in a program each optimizer has its own",
    "optimizer.clip_grad": "1 in a job, as models are pretrained; an engine that nobody asked clips nothing",
    "optimizer.compile": "the engine's compile_update, for it compiles nothing else",
    "optimizer.compile_update": "a job's optimizer.compile",
    "optimizer.model": OBJECT,
    "optimizer.optimizer": OBJECT,
    "optimizer.precision": OBJECT,
    "optimizer.sharding": OBJECT,
    "optimizer.fill": OBJECT,
    "optimizer.grad_accum_steps": "a job's batch sizes and ranks say it",
    "optimizer.adamw.state_dtype": DTYPE,
    "optimizer.nag.state_dtype": DTYPE,
    "optimizer.muon.state_dtype": DTYPE,
    "optimizer.muon.ns_dtype": DTYPE,
    "optimizer.muon.tables": "a job's model family says it",
    "optimizer.muon.fused": "a job's model family says it",
    "lr_schedule.lr": "a job's optimizer.lr",
    "lr_schedule.min_lr": "a job's optimizer.min_lr",
    "lr_schedule.steps": "a job's training.steps",
    "lr_schedule.decay_style": "a program calls the function of that name",
    "precision.dtype": DTYPE,
    "precision.grad_dtype": "a job says half for what dtype is; a program leaves it out, or gives torch's dtype",
    "precision.loss_scale": BY_TABLE,
    "precision.on_overflow": OF_A_RUN,
    "precision.max_retries": OF_A_RUN,
    "precision.max_overflows_in_a_row": OF_A_RUN,
    "precision.max_overflows_at_floor": OF_A_RUN,
    "precision.max_overflows_per_window": OF_A_RUN,
    "precision.loss_scale.torch.min_scale": LIMIT,
    "precision.loss_scale.torch.max_scale": LIMIT,
    "precision.loss_scale.megatron.max_scale": LIMIT,
    "precision.loss_scale.deepspeed.max_scale": LIMIT,
    "precision.loss_scale.headroom.window": "no job has needed another one",
    "precision.loss_scale.static.init_scale": "a job names it; 1 in a program, which is no scale",
    **{f"parallelism.{key}": OBJECT for key in ("units", "topology", "placements", "collectives")},
    **{
        f"parallelism.{key}": "an argument of Topology.connect, or of a pipeline, in a program"
        for key in ("dp_size", "tp_size", "pp_size", "pp_schedule", "pp_stages_per_rank", "sequence_parallel")
    },
    "parallelism.timeout_s": "of the whole run in a job; an argument of start_ranks and of Checkpoints in a program",
    "checkpoint.engine": OBJECT,
    "checkpoint.timeout_s": "a job's parallelism.timeout_s",
    "checkpoint.frozen": "a job saves all that it trains",
    "checkpoint.save_interval": OF_A_RUN,
    "checkpoint.async_save": OF_A_RUN,
    "checkpoint.on_save_failure": OF_A_RUN,
    "checkpoint.resume": OF_A_RUN,
    "checkpoint.max_restarts": OF_A_RUN,
    "checkpoint.replica_check_interval": OF_A_RUN,
}
# Tables that no class of the library has.
OF_JOBS = {"model", "data", "training", "metrics", "profiling", "precision.loss_scale.off"}


def job_tables() -> dict[str, type[Section]]:
    """Return every table of a job that has a place of its own."""
    tables = {name: section_at(Config, [name], {}) for name in SECTIONS}
    tables |= {f"optimizer.{name}": section for name, section in OPTIMIZERS.sections.items()}
    tables |= {f"precision.loss_scale.{name}": section for name, section in LOSS_SCALES.sections.items()}
    tables["optimizer.groups"] = section_at(Config, ["optimizer", "groups", 0], {"optimizer": {"groups": [{}]}})
    return {name: section for name, section in tables.items() if section is not None}


def arguments(kind: Callable[..., object]) -> Keys:
    """Return the arguments with their defaults."""
    takes = kind.__init__ if isinstance(kind, type) else kind  # type: ignore[misc]  # of a class, and not of one object
    return {key: given.default for key, given in inspect.signature(takes).parameters.items() if key != "self"}


def of_library(name: str) -> Keys:
    """Return the settings of a table in a program, with their defaults; an optimizer's without those of all."""
    common = arguments(Optimizer) if name.removeprefix("optimizer.") in OPTIMIZERS.sections else {}
    found = [*chain.from_iterable(arguments(kind).items() for kind in LIBRARY[name])]
    return {key: default for key, default in found if key not in common}


def of_job(name: str, section: type[Section]) -> Keys:
    """Return the settings of a table in a job, without the tables in it, with their defaults."""
    fields = {key: field for key, field in section.model_fields.items() if field.default != {} and key != "rule"}
    return {key: inspect.Parameter.empty if field.is_required() else field.default for key, field in fields.items()}


def test_every_setting_has_one_default_or_differs_for_a_reason() -> None:
    tables = job_tables()
    assert tables.keys() == LIBRARY.keys() | OF_JOBS
    differ, shared = set(), set()
    for name in LIBRARY:
        ours, theirs = of_library(name), of_job(name, tables[name])
        for key in ours.keys() | theirs.keys():
            (shared if key in theirs and ours.get(key, _MISSING) == theirs[key] else differ).add(f"{name}.{key}")
    assert sorted(differ) == sorted(DIFFERS)
    assert len(shared) >= 45


@pytest.mark.parametrize("key", [key for key, reason in DIFFERS.items() if reason == DTYPE])
def test_a_format_has_the_same_default_under_both_spellings(key: str) -> None:
    name, _, setting = key.rpartition(".")
    assert DTYPES[job_tables()[name].model_fields[setting].default] == of_library(name)[setting]
