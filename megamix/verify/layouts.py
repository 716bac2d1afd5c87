"""The names of layouts: dp2, tp4, dp2tp2pp2, with sp for sequence parallel behind tp."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from megamix.config import Config

_AXES = {"dp": "dp_size", "tp": "tp_size", "pp": "pp_size"}


@dataclass(frozen=True, slots=True)
class Layout:
    """How many ranks there are along each axis."""

    name: str
    sizes: tuple[tuple[str, int], ...]  # (axis, ranks), in the order of the name
    sequence_parallel: bool = False

    @property
    def world_size(self) -> int:
        return math.prod(size for _, size in self.sizes)

    def size(self, axis: str) -> int:
        return dict(self.sizes).get(axis, 1)

    def apply(self, config: Config, accumulation: int) -> Config:
        """Return the same training on this layout: `accumulation` micro-batches a step for each data-parallel rank."""
        settings: dict[str, object] = {key: self.size(axis) for axis, key in _AXES.items()}
        settings["sequence_parallel"] = self.sequence_parallel
        batch = config.training.micro_batch_size * self.size("dp") * accumulation
        return config.model_copy(
            update={
                "parallelism": config.parallelism.model_copy(update=settings),
                "training": config.training.model_copy(update={"global_batch_size": batch}),
            }
        )


def parse_layout(name: str) -> Layout:
    """Return the layout of that name. Raises: ValueError for a name that is none."""
    if not re.fullmatch(r"((dp|tp|pp)[1-9]\d*)+(sp)?", name):
        raise ValueError(f"--layouts: got {name}, must name axes and their ranks; write dp2, dp4 or dp2tp2")
    sizes = tuple((axis, int(size)) for axis, size in re.findall(r"(dp|tp|pp)(\d+)", name))
    if len({axis for axis, _ in sizes}) < len(sizes):
        raise ValueError(f"--layouts: got {name}, which names an axis twice; write each one once")
    layout = Layout(name, sizes, name.endswith("sp"))
    if layout.sequence_parallel and layout.size("tp") == 1:
        raise ValueError(f"--layouts: got {name}, but sequence parallel needs tp; write {name[:-2]}tp2sp")
    return layout
