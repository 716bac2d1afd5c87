"""The axes of a mesh, as data, with what the ranks along each have in common. Plugins add others.

No torch here, because a configuration's mesh is checked before torch is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class AxisKind:
    """Says what the ranks along an axis have in common.

    `weights`: "divided": each rank holds another part of the model. "sharded": all hold the same half weights, and each
    owns a share of their FP32 masters. "copied": all hold the same half weights, and all own the same masters.
    `reads`: the ranks read different samples. `parts`: they read the same samples, and each computes the loss of its
    own targets; the step's loss is the sum. Without either the ranks compute one loss together, and one of them counts
    it. Raises: ValueError for both.
    """

    weights: Literal["divided", "sharded", "copied"]
    reads: bool = False
    parts: bool = False

    def __post_init__(self) -> None:
        if self.reads and self.parts:
            raise ValueError("got reads=True and parts=True: ranks with parts of one loss read the same; write one")


# In the order of a job's mesh. Neighbouring ranks differ in the last axis first, so the axes that communicate most stay
# within a machine.
AXES = {
    "pp": AxisKind("divided"),
    "replicas": AxisKind("copied", reads=True),
    "dp": AxisKind("sharded", reads=True),
    "cp": AxisKind("sharded", parts=True),
    "tp": AxisKind("divided"),
}
OWN_AXES = tuple(AXES)


def add_axis(name: str, kind: AxisKind) -> None:
    """Add an axis behind dp and those added before, in front of cp and tp. The caller checks the name."""
    last = {axis: AXES.pop(axis) for axis in ("cp", "tp")}
    AXES[name] = kind
    AXES.update(last)
