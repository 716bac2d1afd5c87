"""The drawing of one step on the README, from the engine's own stages.

`python docs/step_picture.py` writes docs/pictures/step.svg. A small engine takes a step: the order of the stages, the
dtypes of their buffers, and who owns which part are its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from examples import step as plain
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from parallelism_pictures import COLOURS, INK, PALE, flat_layout

import megamix
from megamix.mixed_precision import grad_stats
from megamix.mixed_precision.bucket import Bucket
from megamix.mixed_precision.flat_layout import FlatLayout
from megamix.mixed_precision.optim.optimizer import BucketUpdate

PICTURE = Path(__file__).parent / "pictures/step.svg"
RANKS = 2
DTYPES = {torch.float16: "FP16", torch.float32: "FP32"}


class Stage(NamedTuple):
    """A row of the drawing: a function that the engine calls, what it does in words, and the plain step's function."""

    function: Callable[..., Any]
    title: str
    plain: Callable[..., Any]

    @property
    def line(self) -> int:
        """Return the line at which the plain function begins in docs/examples/step.py."""
        return self.plain.__code__.co_firstlineno


# In the order of the drawing; the engine's own is checked against it.
STAGES = {
    "forward": Stage(megamix.ShardedEngine.__call__, "forward", plain.forward),
    "loss": Stage(megamix.ShardedEngine.backward, "loss x scale", plain.scale_loss),
    "backward": Stage(Bucket.collect, "backward", plain.backward),
    "reduce-scatter": Stage(Bucket.launch_sum, "reduce-scatter", plain.reduce_scatter),
    "agreement": Stage(grad_stats.agree, "agreement", plain.agree),
    "update": Stage(BucketUpdate.in_turn, "update", plain.update),
    "all-gather": Stage(Bucket.launch_gather, "all-gather", plain.all_gather),
}


class Step(NamedTuple):
    """Holds what a step of a real engine showed."""

    order: list[str]  # names in STAGES, by their first call
    params: str  # dtypes
    grads: str
    loss: str
    masters: str


@contextmanager
def _calls(found: list[str]) -> Iterator[None]:
    """Note each stage in the block at its first call."""
    codes = {stage.function.__code__: name for name, stage in STAGES.items()}

    def note(frame: FrameType, event: str, _: object) -> None:
        name = codes.get(frame.f_code)
        if event == "call" and name is not None and name not in found:
            found.append(name)

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def observed_step() -> Step:
    """Take one step in FP16 on this rank alone, which makes the same calls as one of many ranks."""
    torch.manual_seed(0)
    precision = megamix.Precision(torch.float16, loss_scale=megamix.DynamicLossScale(1024.0))
    engine = megamix.ShardedEngine(torch.nn.Linear(64, 64), megamix.AdamW(lr=1e-3), precision, compile_update=False)
    order: list[str] = []
    with torch.autograd.set_multithreading_enabled(False), _calls(order):  # else hooks run in a thread of their own
        loss = engine(torch.ones(4, 64, dtype=torch.float16)).float().mean()
        engine.backward(loss)
        engine.step()
    bucket = engine.buckets[0]
    return Step(order, *(DTYPES[tensor.dtype] for tensor in (bucket.params, bucket.grads, loss, bucket.master)))


def layout() -> FlatLayout:
    """Return the buckets of a model of one block, for RANKS data-parallel ranks."""
    return flat_layout(RANKS)


def draw(axes: Any, step: Step) -> None:
    """Draw the stages from top to bottom, a column for each rank."""
    middles = [_left(rank) + _WIDE / 2 for rank in range(RANKS)]
    for rank, x in enumerate(middles):
        axes.text(x, 1.45, f"rank {rank}", ha="center", fontsize=17, weight="bold")
    rows = {name: -1.5 * number for number, name in enumerate(step.order)}
    for name, y in rows.items():
        axes.text(-0.2, y + 0.5, STAGES[name].title, ha="right", va="center", fontsize=16, weight="bold")
        axes.text(-0.2, y + 0.08, f"step.py, line {STAGES[name].line}", ha="right", va="center", fontsize=12)
    for rank, x in enumerate(middles):
        _buffer(axes, rank, rows["forward"], whole=True)
        _note(axes, x, rows["forward"], f"parameters, {step.params}")
        _plain(axes, _left(rank), rows["loss"], _WIDE, f"loss of its own batch, {step.loss}")
        _buffer(axes, rank, rows["backward"], whole=True)
        _note(axes, x, rows["backward"], f"gradients, {step.grads}")
        _buffer(axes, rank, rows["update"], whole=False)
        _note(axes, x, rows["update"], f"masters, states: {step.masters}")
    for name, words in (
        ("reduce-scatter", "sums to their owners, while backward runs"),
        ("all-gather", "new parameters to all, while the next forward runs"),
    ):
        _crossing(axes, middles, rows[name], words)
    both = _left(RANKS - 1) + _WIDE
    _plain(axes, 0.0, rows["agreement"], both, "inf or NaN on any rank? norm of all gradients")
    _note(axes, both / 2, rows["agreement"], "if so: nothing changes, the scale falls, the batch comes again")


_WIDE, _GAP = 5.2, 0.6  # of a rank's column, and between two


def _left(rank: int) -> float:
    return rank * (_WIDE + _GAP)


def _buffer(axes: Any, rank: int, y: float, *, whole: bool) -> None:
    """Draw a rank's buckets, each part in its owner's colour; without `whole` the parts of others are empty."""
    buckets = layout().buckets
    scale, x = _WIDE / sum(bucket.padded_numel for bucket in buckets), _left(rank)
    for bucket in buckets:
        for owner in range(bucket.num_shards):
            width = bucket.shard_numel * scale
            colour = COLOURS[owner] if whole or owner == rank else "white"
            axes.add_patch(Rectangle((x, y + 0.12), width, 0.66, facecolor=colour, edgecolor=INK, linewidth=0.8))
            x += width


def _plain(axes: Any, x: float, y: float, width: float, words: str) -> None:
    axes.add_patch(Rectangle((x, y + 0.12), width, 0.66, facecolor=PALE, edgecolor=INK, linewidth=0.8))
    axes.text(x + width / 2, y + 0.45, words, ha="center", va="center", fontsize=15)


def _note(axes: Any, x: float, y: float, words: str) -> None:
    axes.text(x, y - 0.06, words, ha="center", va="top", fontsize=14)


def _crossing(axes: Any, middles: list[float], y: float, words: str) -> None:
    """Draw what travels between ranks."""
    for start in middles:
        for end in middles:
            arrow = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.4}
            axes.annotate("", (end, y + 0.05), (start, y + 0.95), arrowprops=arrow)
    axes.text(sum(middles) / len(middles), y - 0.1, words, ha="center", va="top", fontsize=14)


def write(path: Path) -> None:
    """Write the drawing. Raises: AssertionError if a step has other stages than the drawing."""
    step = observed_step()
    assert step.order == [*STAGES], f"the drawing has {[*STAGES]}, a step {step.order}"
    figure = Figure(figsize=(9, 7.4))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-3.5, 11.2), ylim=(-9.5, 2.0))
    axes.axis("off")
    draw(axes, step)
    # Without metadata, and with names of shapes that do not change, the same drawing is the same file.
    with rc_context({"svg.hashsalt": "step"}):
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None}, facecolor="white")


if __name__ == "__main__":
    write(PICTURE)
