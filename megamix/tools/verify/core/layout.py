"""Names of layouts, and the settings they mean.

Imports no torch, so that a wrong name is reported at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megamix.base.axes import AXES, OWN_AXES
from megamix.config import Config, ConfigError, check_world_size, reading_ranks, resized
from megamix.config.checks import check_config

_SHARDS = ("states", "gradients", "parameters")
ACCUMULATION = 2  # micro-batches of a step: with one alone, a wrong sum over them would not show


@dataclass(frozen=True, slots=True)
class Layout:
    """Number of ranks along each axis, and of ep inside them; and the tensors of which each rank keeps a share."""

    name: str
    sizes: tuple[tuple[str, int], ...]  # (axis, ranks), in the order of the name
    sequence_parallel: bool = False
    shard: str | None = None  # None: as in the configuration

    @property
    def world_size(self) -> int:
        return math.prod(size for axis, size in self.sizes if axis != "ep")

    def size(self, axis: str) -> int:
        return dict(self.sizes).get(axis, 1)

    def apply(self, config: Config, accumulation: int = 0) -> Config:
        """Return the same training on this layout.

        `accumulation`: micro-batches a step for each data-parallel rank; 0: as many as `verify` takes.
        """
        accumulation = accumulation or ACCUMULATION * self.size("pp")  # every schedule can run 2 * pp micro-batches
        settings: dict[str, Any] = {"shard": self.shard} if self.shard else {}
        # An axis of a plugin that the job does not have stays away.
        axes = [axis for axis in AXES if axis in OWN_AXES or getattr(config.parallelism, axis) is not None]
        settings |= resized(config.parallelism, **{axis: self.size(axis) for axis in (*axes, "ep")})
        if tensor := settings["tensor"]:
            settings["tensor"] = tensor.model_copy(update={"sequence_parallel": self.sequence_parallel})
        config = config.with_keys(parallelism=settings)
        batch = config.training.micro_batch_size * reading_ranks(config.parallelism, self.size("dp")) * accumulation
        config = config.with_keys(lr_schedule=_by_updates(config))
        return config.with_keys(training={"global_batch_size": batch, "batch_ramp": (), "tokens": 0})


def _by_updates(config: Config) -> dict[str, object]:
    """Return the lengths of the learning rate's schedule in updates, of a run that has them in tokens."""
    schedule, training = config.lr_schedule, config.training
    if not training.tokens:
        return {}
    warmup = schedule.warmup_tokens * training.steps // training.tokens
    decay = None if schedule.decay_tokens is None else max(1, schedule.decay_tokens * training.steps // training.tokens)
    return {"warmup_steps": warmup, "decay_steps": decay, "warmup_tokens": 0, "decay_tokens": None}


def parse_layout(name: str) -> Layout:
    """Return the layout that `name` means. Raises: ValueError if it means none."""
    axes, _, shard = name.partition("-")
    known = (*AXES, "ep")
    axis = "|".join(map(re.escape, known))
    if not re.fullmatch(rf"(({axis})[1-9]\d*)+(sp)?", axes):
        raise ValueError(
            f"--layouts: got {name}, must name axes ({', '.join(known)}) and their ranks; write dp2, cp2 or dp2tp2sp"
        )
    if name != axes and shard not in _SHARDS:
        raise ValueError(
            f"--layouts: got {name}, must end in what ranks keep a share of; write {axes}, {axes}-gradients or "
            f"{axes}-parameters"
        )
    sizes = tuple((axis, int(size)) for axis, size in re.findall(rf"({axis})(\d+)", axes))
    if len(dict(sizes)) < len(sizes):
        raise ValueError(f"--layouts: got {name}, which names an axis twice; write each one once")
    layout = Layout(name, sizes, axes.endswith("sp"), shard or None)
    if layout.sequence_parallel and layout.size("tp") == 1:
        fixed = name.replace("sp", "tp2sp", 1)
        raise ValueError(f"--layouts: got {name}, but sequence parallel needs tp; write {fixed}")
    return layout


def parse_layouts(config: Config, names: Sequence[str]) -> list[Layout]:
    """Return the layouts that these names mean. Raises: ConfigError for names that are none, or do not fit this
    model.
    """
    problems, layouts = [], []
    for name in names:
        try:
            layouts.append(layout := parse_layout(name))
        except ValueError as error:
            problems.append(str(error))
        else:
            here = layout.apply(config)
            found = dict.fromkeys([*check_config(here), *check_world_size(here, layout.world_size)])
            problems += [f"{name}: {problem}" for problem in found]
    if problems:
        raise ConfigError(problems, "--layouts")
    return layouts
