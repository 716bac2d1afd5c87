"""What a checkpoint keeps of its run, as plain JSON, and whether some run can have saved it: a manifest is checked
against itself and its own configuration, before anything is built from it.
"""

from __future__ import annotations

import copy
import functools
import json
import math
import operator
import re
import struct
from collections.abc import Mapping
from typing import Any, TypeVar, cast

from pydantic import Field, ValidationError

from megamix.checkpoint.manifest import BUFFER, Count, Manifest, states_text
from megamix.checkpoint.snapshot import state_set
from megamix.config import Config, DecoderConfig
from megamix.config.sections import SECTIONS
from megamix.mixed_precision.loss_scale import StaticLossScale
from megamix.model.decoder import EMBEDDING_WEIGHT, HEAD_WEIGHT
from megamix.model.family import family_of, section_of
from megamix.plugins import Section, require_plugins
from megamix.train.batch_plan import LARGEST_COUNT, PlanState, check_state
from megamix.train.build import build_loss_scale, build_optimizer
from megamix.train.build_data import token_prefixes
from megamix.train.run_folder import METRICS, SET_ASIDE

_Section = TypeVar("_Section", bound=Section)
_DIGEST = re.compile(r"[0-9a-f]{16,128}")


def check_if_run(manifest: Manifest) -> None:
    """`check_run`, unless it is what a script of its own has saved: there, the engine's state is all that is known."""
    if manifest.run.rng_rule:
        check_run(manifest)


def check_run(manifest: Manifest) -> None:
    """Refuse what neither a run nor `megamix import` can have saved.

    Raises: ValueError naming what is wrong.
    """
    tables = manifest.run.tables()
    if manifest.weights_only:
        keys = tables.get("model", {})
        check_params(manifest, _validated(section_of(keys), keys, tables))
        return
    config = saved_config(manifest)
    check_params(manifest, config.model)
    optimizer = build_optimizer(config.optimizer, [config.optimizer.lr], config.model)
    for param in manifest.params:
        held, needed = manifest.states[param.state_set], state_set(optimizer, param.name, param.shape)
        if held != needed and BUFFER not in held:
            raise ValueError(
                f"states: {param.name} has {states_text(held)}, but {config.optimizer.name} has {states_text(needed)}"
            )
    layout = manifest.layout
    if (ranks := layout.dp_size * layout.tp_size * layout.pp_size) != len(manifest.files):
        raise ValueError(f"layout: {ranks} ranks, but {len(manifest.files)} files")
    _check_counters(manifest, config)
    prefixes = [key for key in token_prefixes(config) if not key.startswith("data.valid")]
    fingerprints = manifest.run.fingerprints
    if missing := [key for key in prefixes if key not in fingerprints]:
        raise ValueError(f"fingerprints: there is none of {missing[0]}")
    if not all(map(_DIGEST.fullmatch, fingerprints.values())):
        raise ValueError("fingerprints: they are no digests")


def saved_config(manifest: Manifest) -> Config:
    """Return the configuration of a run's. Raises: as `check_run`."""
    tables = manifest.run.tables()
    return _validated(Config, {name: {} for name in SECTIONS} | tables, tables)


def _check_counters(manifest: Manifest, config: Config) -> None:
    progress, applied, skipped = Progress.read(manifest.run.progress), manifest.applied_updates, manifest.skipped_steps
    if max(config.training.global_batch_size, applied + skipped) > LARGEST_COUNT:
        raise ValueError(f"applied_updates, skipped_steps: {applied} and {skipped}, no run gets that far")
    if applied > config.training.steps:
        raise ValueError(f"applied_updates is {applied}, of a run of {config.training.steps} steps")
    progress.check(applied, skipped, config.training.global_batch_size)
    loss_scale = build_loss_scale(config.precision) or StaticLossScale()
    if manifest.loss_scale_rule not in (None, loss_scale.rule):
        raise ValueError(f"loss_scale_rule is {manifest.loss_scale_rule}, its configuration's is {loss_scale.rule}")
    loss_scale.check_state(manifest.loss_scale, applied, skipped)


def check_params(manifest: Manifest, model: DecoderConfig) -> None:
    """Refuse parameters that are not the model's. Raises: ValueError."""
    unlike = "its parameters are not those of the model that its configuration names"
    if model.num_layers > len(manifest.params):  # before anything is made for each of them
        raise ValueError(unlike)
    try:
        shapes = family_of(model).shapes(model)
    except ValueError as error:
        raise ValueError(f"{unlike}: {error}") from None
    aliases = {EMBEDDING_WEIGHT: {HEAD_WEIGHT}} if model.tie_embeddings else {}
    for saved in manifest.params:
        if BUFFER in manifest.states[saved.state_set]:
            continue  # loading compares it with the model's
        if saved.shape != shapes.pop(saved.name, None) or not aliases.get(saved.name, set()).issuperset(saved.aliases):
            raise ValueError(f"params: {saved.name} is no parameter of the model that its configuration names")
    if shapes:
        raise ValueError(f"params: there is no {next(iter(shapes))}")


def _validated(kind: type[_Section], tree: dict[str, Any], saved: Mapping[str, Any]) -> _Section:
    """A section, or all of them, as some version has saved it. What only a later one knows is left out here: to say so
    is for `same_run.changes`. Raises: ValueError naming the key; PluginError if it may be one of a plugin's.
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
            raise ValueError(f"its configuration: {where}: {detail['msg']}")
        del functools.reduce(operator.getitem, above, cast(Any, known))[key]
    return _validated(kind, known, saved)


class Progress(PlanState):
    """What a run keeps beside the engine's state."""

    skipped: Count = 0  # attempts that overflowed
    interval_losses: tuple[str, ...] = ()  # of the log interval so far, as float.hex
    validated: Count = 0  # the update after which the last validation was
    tokens: Count | None = None  # of all updates; None: the run was saved before it was counted
    log_sizes: dict[str, Count] = Field(default_factory=dict)  # bytes, by file name; what lies behind came later

    @staticmethod
    def read(values: Mapping[str, Any]) -> Progress:
        """Raises: ValueError naming the field."""
        return Progress.from_json(json.dumps(values))  # in JSON a tuple is a list

    def losses(self) -> list[float]:
        return [float.fromhex(text) for text in self.interval_losses]

    def check(self, applied: int, skipped: int, global_batch_size: int) -> None:
        """Refuse what no run can have saved beside the engine's counters.

        Raises: ValueError naming the field.
        """
        if (self.applied, self.skipped) != (applied, skipped):
            raise ValueError(
                f"{self.applied} applied and {self.skipped} skipped, the engine's are {applied}, {skipped}"
            )
        check_state(self, self.skipped, global_batch_size)
        if self.validated > self.applied:
            raise ValueError(f"validated is {self.validated}, after update {self.applied}")
        if self.tokens is not None and not self.applied <= self.tokens <= LARGEST_COUNT:
            raise ValueError(f"tokens is {self.tokens} after update {self.applied}")
        # The first update's line ends an interval, so that one is in none.
        if len(self.interval_losses) > max(self.applied - 1, 0) or not all(map(_is_loss, self.interval_losses)):
            raise ValueError("interval_losses: not the losses of updates since the last line")
        if not set(self.log_sizes) <= {METRICS, SET_ASIDE}:
            raise ValueError(f"log_sizes: the logs are {METRICS} and {SET_ASIDE}")


def _is_loss(text: str) -> bool:
    """Whether it is what `hex` writes of a finite FP32 number: a finite gradient has a finite loss."""
    try:
        loss = float.fromhex(text)
        return loss.hex() == text and math.isfinite(loss) and struct.unpack("f", struct.pack("f", loss))[0] == loss
    except (ValueError, OverflowError):
        return False
