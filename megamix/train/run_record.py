"""The record of a run in a checkpoint, as plain JSON, and a check whether the present code can go on with it."""

from __future__ import annotations

import copy
import functools
import json
import operator
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import Field, ValidationError

from megamix.base.log_file import cut_log, parsed
from megamix.base.names import first_few
from megamix.checkpoint.manifest import AVERAGE, BUFFER, Manifest, states_text
from megamix.checkpoint.snapshot import state_set
from megamix.config import ConfigError, DecoderConfig
from megamix.config.problems import short
from megamix.config.sections import SECTIONS, Tables
from megamix.launch.run_folder import LOGS, SET_ASIDE
from megamix.log.metrics import TAGS, TRANSFERS, is_overflow
from megamix.mixed_precision.loss_scale import StaticLossScale
from megamix.mixed_precision.optim.optimizer import Optimizer
from megamix.model.family import family_of, section_of
from megamix.plugins import OPTIMIZERS, PluginError, Section, require_plugins
from megamix.train.batch_plan import PlanState
from megamix.train.objects import build_loss_scale

_Section = TypeVar("_Section", bound=Section)


def check_if_run(manifest: Manifest) -> None:
    """Call `check_run`, unless a user's own script saved the checkpoint: there is no run then, only an engine's
    state.
    """
    if manifest.run.rng_rule:
        check_run(manifest)


def check_run(manifest: Manifest) -> None:
    """Refuse a manifest that the present families, rules and sections, those of plugins included, contradict: it may
    have been right for the code that saved it.

    Raises: ConfigError naming what the present code refuses.
    """
    tables = manifest.run.tables()
    try:
        if manifest.weights_only:
            keys = tables.get("model", {})
            check_params(manifest, _validated(section_of(keys), keys, tables))
            return
        saved_by = saved_tables(manifest)
        check_params(manifest, saved_by.model)
        loss_scale = build_loss_scale(saved_by.precision) or StaticLossScale()
        saved = (manifest.loss_scale_rule, sorted(manifest.loss_scale))
        if saved != (now := (loss_scale.rule, sorted(loss_scale.state_names))):
            raise ValueError(f"loss_scale_rule and loss_scale: it holds {saved}, the present rule has {now}")
    except PluginError:  # a plugin is not imported; the message says how to import it
        raise
    except Exception as error:  # a plugin may raise anything
        savers = ", ".join(["megamix", *tables.get("plugins", [])])
        problem = f"{_reason(error)}; the checkpoint is whole: bring back the code that saved it ({savers})"
        raise ConfigError([problem], "job") from error


def _reason(error: Exception) -> str:
    """Return an error in one line, with its type unless the error is meant for users."""
    return " ".join((str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}").split())


def check_states(path: Path, manifest: Manifest, name: str, build: Callable[[], Optimizer]) -> None:
    """Refuse one of the run's own checkpoints if its states are not those of the optimizer as configured now.

    `build`: builds that optimizer, of this name. Raises: ConfigError naming the optimizer and both sets of states.
    """
    home = OPTIMIZERS.sections[name].__module__
    what = f"optimizer.name: {name}" + f" of plugin {home}" * (not home.startswith("megamix."))
    try:
        optimizer = build()
        sets = [
            (
                param.name,
                {state: dtype for state, dtype in held.items() if state != AVERAGE},
                state_set(optimizer, param.name, param.shape),
            )
            for param in manifest.params
            if BUFFER not in (held := manifest.states[param.state_set])
        ]
    except Exception as error:  # a plugin may raise anything
        raise ConfigError([f"{what} cannot be built: {_reason(error)}; {path} stays as it is"], "job") from error
    if other := [one for one in sets if one[1] != one[2]]:
        _, held, needed = other[0]
        problem = (
            f"{what}: of {first_few([one[0] for one in other], 1)} {path} holds {states_text(held)}, but the present "
            f"optimizer has {states_text(needed)}; bring back the code and the keys that saved it, or begin a new run "
            "from its weights, with another checkpoint.folder and this path as checkpoint.resume"
        )
        raise ConfigError([problem], "job")


def saved_tables(manifest: Manifest) -> Tables:
    """Return the configuration of the run that saved a manifest. Raises: as `check_run`."""
    tables = manifest.run.tables()
    return _validated(Tables, {name: {} for name in SECTIONS} | tables, tables)


def check_params(manifest: Manifest, model: DecoderConfig) -> None:
    """Refuse parameters that are not the model's. Raises: ValueError."""
    shapes = family_of(model).shapes(model)
    aliases = family_of(model).aliases(model)
    for saved in manifest.params:
        if BUFFER in manifest.states[saved.state_set]:
            continue  # loading compares a buffer with the model's
        if saved.shape != shapes.pop(saved.name, None) or not aliases.get(saved.name, set()).issuperset(saved.aliases):
            raise ValueError(f"params: {saved.name} is no parameter of the model that its configuration names")
    if shapes:
        raise ValueError(f"params: there is no {next(iter(shapes))}")


def _validated(kind: type[_Section], tree: dict[str, Any], saved: Mapping[str, Any]) -> _Section:
    """Return a section, or all sections, as another version may have saved them.

    Keys that the present version does not know are left out; `resume_rules.changes` reports them.
    Raises: ValueError naming the key; PluginError if the key may be a plugin's.
    """
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        details = error.errors(include_url=False)
    known = copy.deepcopy(tree)
    for detail in details:
        *above, key = detail["loc"]
        if detail["type"] != "extra_forbidden":
            require_plugins(saved.get("plugins", []))
            where = ".".join(map(str, detail["loc"]))
            was = "" if detail["type"] == "missing" else f" was saved as {short(detail['input'])}"
            raise ValueError(f"its configuration: {where}{was}: {detail['msg']}")
        del functools.reduce(operator.getitem, above, cast(Any, known))[key]
    return _validated(kind, known, saved)


class Progress(PlanState):
    """The progress of a run, which a checkpoint keeps beside the engine's state."""

    skipped: int = 0  # attempts that overflowed
    interval_losses: tuple[str, ...] = ()  # losses of the log interval so far, as float.hex
    validated: int = 0  # the update after which the last validation was
    tokens: int = 0  # tokens of all updates
    log_sizes: dict[str, int] = Field(default_factory=dict)  # of checkpoints of earlier versions; not read

    @staticmethod
    def read(values: Mapping[str, Any]) -> Progress:
        """Return progress read from a manifest. Raises: ValueError naming the field."""
        return Progress.from_json(json.dumps(values))  # in JSON a tuple is a list

    def losses(self) -> list[float]:
        return [float.fromhex(text) for text in self.interval_losses]


def cut_logs(folder: Path, progress: Progress) -> None:
    """Bring the logs back to their state at a checkpoint. Raises: OSError."""
    for name in LOGS:
        cut_log(folder / name, partial(_is_later, name, progress))


def _is_later(log: str, progress: Progress, line: bytes) -> bool:
    """Return whether a row of the log `log` is later than the checkpoint with this progress."""
    row, attempt = parsed(line), "attempt" if log == SET_ASIDE else TRANSFERS + "attempt"
    count, last = "step", progress.applied
    if log == SET_ASIDE or attempt in row:
        count, last = attempt, progress.attempts - 1
    elif TAGS["valid_loss"] in row:
        last = progress.validated
    elif TAGS["resumed"] in row:  # by a start that went on from this checkpoint
        last -= 1
    elif is_overflow(row):  # the row is of an attempt on the way to that update
        count, last = TAGS["skipped_steps"], progress.skipped
    return bool(row.get(count, last) > last)
