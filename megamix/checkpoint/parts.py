"""What one rank holds of a run's state, and where it belongs in the full, unsharded parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from megamix.checkpoint.boxes import Box, boxes_of_range
from megamix.mixed_precision.engine import ShardedEngine
from megamix.mixed_precision.flat_layout import ParamSpec

MASTER = "master"  # the state name of the weights themselves; the others are the optimizer's


@dataclass(frozen=True, slots=True)
class StateBox:
    """A box of one state of one parameter."""

    param: str
    state: str
    box: Box


@dataclass(frozen=True, slots=True)
class Part(StateBox):
    """The same with the memory that holds it: FP32 (box.numel,), contiguous."""

    tensor: Tensor


def state_names(engine: ShardedEngine) -> tuple[str, ...]:
    return MASTER, *engine.optimizer.state_names


def parts_of_range(spec: ParamSpec, state: str, start: int, flat: Tensor) -> Iterator[Part]:
    """Cut a flat range of the block that the rank trains into parts of the full parameter.

    `start`: the place in the block of the first of `flat`'s elements. Shapes: flat FP32 (n,) -> views of it.
    """
    done = 0
    for box in boxes_of_range(start, start + flat.numel(), Box(spec.offset, spec.shape)):
        yield Part(spec.name, state, box, flat[done : done + box.numel])
        done += box.numel


def owned_parts(engine: ShardedEngine) -> list[Part]:
    """Everything that this rank owns: views of its masters and optimizer states, good until the next step.

    Raises: RuntimeError in the middle of a step.
    """
    parts: list[Part] = []
    for owned in engine.owned_ranges():
        for state, flat in zip(state_names(engine), owned.tensors, strict=True):
            parts += parts_of_range(owned.spec, state, owned.start, flat)
    return parts
