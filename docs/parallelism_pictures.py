"""The pictures of docs/parallelism.md, drawn from the objects that a run uses.

`python docs/parallelism_pictures.py` writes docs/pictures/*.png. For each picture one function finds what there is to
see (places, shards, blocks, shapes, times), and one draws it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megamix.comm.collectives import Collectives
from megamix.comm.topology import Axis, Topology
from megamix.config import ModelConfig, ParallelismConfig, TensorConfig
from megamix.mixed_precision.flat_layout import FlatLayout, ParamSpec, build_layout
from megamix.mixed_precision.settings import Placement
from megamix.model.transformer import Transformer
from megamix.parallel.borders import Border
from megamix.parallel.build import outline
from megamix.parallel.pipeline_parallel import SCHEDULES
from megamix.parallel.stages import V_SHAPED
from megamix.parallel.tensor_parallel import divide_layers

PICTURES = Path(__file__).parent / "pictures"
# Of ranks and of micro-batches: apart for every eye (Okabe and Ito 2008).
COLOURS = ("#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#0072b2", "#d55e00", "#f0e442", "#999999")
PALE, INK = "#eeeeee", "#333333"
BLOCK = ModelConfig(
    vocab_size=256, seq_len=64, hidden_size=64, num_layers=1, num_heads=4, ffn_hidden_size=192, tie_embeddings=False
)


def places() -> list[Topology]:
    """Every rank of a mesh of 2 stages, 2 data-parallel and 2 tensor-parallel ranks."""
    return [Topology.place(rank, pp=2, dp=2, tp=2) for rank in range(8)]


def draw_mesh(axes: Any) -> None:
    for place in places():
        x, y = 6.0 * place.pp.rank + 2 * place.tp.rank, -1.3 * place.dp.rank
        _box(axes, x, y, 1.8, 1.0, COLOURS[place.pp.rank], f"rank {place.world.rank}", size=13, dy=0.16)
        axes.text(x + 0.9, y + 0.26, f"dp {place.dp.rank}, tp {place.tp.rank}", ha="center", va="center", fontsize=10)
    for stage in (0, 1):
        left = 6.0 * stage
        axes.text(left + 1.9, 1.75, f"stage pp {stage}", ha="center", fontsize=13, weight="bold")
        _arrow(axes, (left, 1.3), (left + 3.8, 1.3), "<->")
        axes.text(left + 1.9, 1.4, "tp: parts of each layer, same samples", ha="center", fontsize=10)
        _arrow(axes, (left - 0.25, 1.0), (left - 0.25, -1.3), "<->")
        axes.text(left - 0.35, -0.15, "dp: other samples", ha="right", va="center", rotation=90, fontsize=10)
    for row in (0.5, -0.8):
        _arrow(axes, (3.95, row), (5.3, row), "->")
        axes.text(4.6, row + 0.1, "pp: next\nlayers", ha="center", fontsize=10)


def flat_layout(ranks: int = 4) -> FlatLayout:
    """The buckets of a model of one block, for data-parallel ranks."""
    with torch.device("meta"):
        model = Transformer(BLOCK)
    specs = [
        ParamSpec.whole(name, tuple(param.shape), int(param.dim() > 1)) for name, param in model.named_parameters()
    ]
    return build_layout(specs, [ranks], bucket_size=30_000)


def draw_shards(axes: Any) -> None:
    layout = flat_layout()
    widest = max(bucket.padded_numel for bucket in layout.buckets)
    for number, bucket in enumerate(layout.buckets):
        y, scale = -2.3 * number, 12 / widest
        axes.text(-0.15, y + 0.9, f"bucket {number}", ha="right", va="center", fontsize=12)
        for slot in bucket.slots:
            width = slot.spec.numel * scale
            name = slot.spec.name.removesuffix(".weight").rpartition(".")[2]
            _box(axes, slot.start * scale, y + 0.9, width, 0.7, PALE, name if width > 0.9 else "", size=10)
        for shard in range(bucket.num_shards):
            width = bucket.shard_numel * scale
            _box(axes, shard * width, y, width, 0.7, COLOURS[shard], f"rank {shard}" if width > 0.6 else "", size=10)
    axes.text(12.2, 1.25, "parameters: views\ninto a flat buffer", va="center", fontsize=10)
    axes.text(12.2, 0.35, "shards: who owns\nmasters and states", va="center", fontsize=10)


class Block(NamedTuple):
    """Which part of a parameter one tensor-parallel rank holds."""

    name: str
    rank: int
    placement: Placement
    shape: tuple[int, ...]


MATRICES = (
    ("embedding.weight", "embedding,\nhead"), ("attention.query.weight", "query, key,\nvalue"),
    ("attention.out.weight", "out"), ("feed_forward.up.weight", "gate, up"), ("feed_forward.down.weight", "down"),
    ("attention_norm.weight", "norm"),
)  # fmt: skip


def blocks(tp_size: int = 4) -> Iterator[Block]:
    for rank in range(tp_size):
        topology = Topology.place(rank, tp=tp_size)
        model, placements = outline(BLOCK, ParallelismConfig(tensor=TensorConfig(size=tp_size)), topology)
        for name, param in model.named_parameters():
            yield Block(name, rank, placements[name], tuple(param.shape))


def draw_blocks(axes: Any) -> None:
    x, found = 0.0, [*blocks()]
    for suffix, title in MATRICES:
        own = [block for block in found if block.name.endswith(suffix)]
        height, width = _drawn(own[0].placement.full_shape)
        for block in own:
            whole = block.shape == block.placement.full_shape
            start = (0, 0) if whole else block.placement.offset
            (top, left), (tall, wide) = _drawn(start), _drawn(block.shape)
            colour, label = (PALE, "") if whole else (COLOURS[block.rank], str(block.rank))
            _box(axes, x + left, -top - tall, wide, tall, colour, label, size=12)
        axes.text(x + width / 2, 0.25, title, ha="center", fontsize=11)
        axes.text(x + width / 2, -height - 0.2, _divided(own[1]), ha="center", va="top", fontsize=10)
        x += width + 0.85


def _divided(block: Block) -> str:
    if block.shape == block.placement.full_shape:
        return "whole on\nevery rank"
    if block.name == "embedding.weight":
        return "by tokens"
    return "by output\nfeatures" if block.placement.offset[0] else "by input\nfeatures"


def _drawn(shape: tuple[int, ...]) -> tuple[float, float]:
    """Height and width of a matrix (out, in); a vector is a thin row."""
    rows, columns = shape if len(shape) == 2 else (4 * (shape[0] > 0), shape[0])
    return rows / 48, columns / 48


class Held(NamedTuple):
    """What a rank holds of a tensor between two operations of a block."""

    name: str
    positions: float  # share of them
    features: float  # share of them


class _Recorder(Collectives):
    """Two ranks of which one is here: shapes as they would be, and a note of what would travel."""

    def __init__(self) -> None:
        super().__init__(Axis(range(2), 0))
        self.seen: list[Held | str] = []

    def gather(self, part: Tensor) -> Tensor:
        self.seen.append("gather\npositions")
        return part.expand(2, -1)

    def sum_parts(self, parts: Tensor) -> Tensor:
        self.seen.append("sum, each\nits positions")
        return parts[0]


STREAM = "residual\nstream"


def block_shapes() -> list[Held | str]:
    """What one of two ranks holds on the way through a block, and what travels in between (a text)."""
    topology, recorder = Topology.place(0, tp=2), _Recorder()
    model, _ = outline(BLOCK, ParallelismConfig(tensor=TensorConfig(size=2)), topology)
    divide_layers(model, Border(recorder, sequence=True))
    model.to_empty(device="cpu")
    block: Any = model.blocks[0]
    hidden, ffn = BLOCK.hidden_size, BLOCK.ffn_hidden_size or 0
    passed: list[Held | str] = []

    def note(name: str, x: Tensor, features: int) -> None:
        recorder.seen.append(Held(name, x.shape[1] / BLOCK.seq_len, x.shape[2] / features))

    def begin(module: Any, args: Any) -> None:
        recorder.seen.clear()
        note(STREAM, args[0], hidden)

    block.register_forward_pre_hook(begin)
    for path, name, features in (
        ("attention_norm", "norm", hidden), ("attention.query", "heads", hidden), ("attention", STREAM, hidden),
        ("feed_forward_norm", "norm", hidden), ("feed_forward.up", "inner\nfeatures", ffn),
        ("feed_forward", STREAM, hidden),
    ):  # fmt: skip
        block.get_submodule(path).register_forward_hook(
            lambda _, args, out, name=name, features=features: note(name, out, features)
        )
    for path, name in (("attention", "attention's\ninput"), ("feed_forward", "feed-fwd\ninput")):
        block.get_submodule(path).register_forward_pre_hook(lambda _, args, name=name: note(name, args[0], hidden))
    block.register_forward_hook(lambda *_: passed.extend(recorder.seen))
    tokens = torch.zeros(1, BLOCK.seq_len, dtype=torch.int64)
    model(tokens, tokens)
    return passed


def draw_sequence(axes: Any) -> None:
    x = 0.0
    for step in block_shapes():
        if isinstance(step, str):
            _arrow(axes, (x - 0.25, -0.95), (x + 1.15, -0.95), "->")
            axes.text(x + 0.45, -0.8, step, ha="center", va="bottom", fontsize=9, weight="bold")
            x += 1.45
            continue
        for rank in (0, 1):
            top = -2.1 * rank
            axes.add_patch(_rectangle(x, top - 1.6, 1.0, 1.6, "white", linestyle=":"))
            left = rank * (1 - step.features)
            down = rank * 1.6 * (1 - step.positions)
            tall = 1.6 * step.positions
            _box(axes, x + left, top - down - tall, step.features, tall, COLOURS[rank], "")
        axes.text(x + 0.5, 0.12, step.name, ha="center", va="bottom", fontsize=9)
        x += 1.35
    for rank in (0, 1):
        axes.text(-0.2, -0.8 - 2.1 * rank, f"rank {rank}", ha="right", va="center", fontsize=11)
    axes.text(0, -4.1, "each dotted box is the whole tensor, positions downwards, features to the right", fontsize=10)


class Slot(NamedTuple):
    """One computation of a pipeline rank. Units of time: a micro-batch's forward through all that a rank has."""

    rank: int
    stage: int
    kind: str  # F forward, B backward, I and W its halves: for the stage before, and for the weights
    micro_batch: int
    start: float
    seconds: float


COSTS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}  # backward has twice the products of forward


def timetable(name: str, pp_size: int = 4, micro_batches: int = 8) -> list[Slot]:
    """When each computation runs if it starts as soon as its rank is free and its input is there, in the order that
    torch's schedule gives each rank.
    """
    per_rank = 1 if name == "1f1b" else 2
    last = pp_size * per_rank - 1
    waiting = _order(name, pp_size, micro_batches)
    free, done, slots = dict.fromkeys(waiting, 0.0), dict[tuple[int, str, int], float](), list[Slot]()
    while any(waiting.values()):
        ready = [rank for rank, actions in waiting.items() if actions and _needs(*actions[0], last) <= done.keys()]
        assert ready, f"{name}: no rank can go on"
        for rank in ready:
            stage, kind, number = waiting[rank].pop(0)
            start = max([free[rank], *(done[need] for need in _needs(stage, kind, number, last))])
            slots.append(Slot(rank, stage, kind, number, start, COSTS[kind] / per_rank))
            # Whoever needs a stage's backward needs what it sends on: a whole one, or its first half.
            free[rank] = done[stage, "I" if kind == "B" else kind, number] = start + slots[-1].seconds
    return slots


def _needs(stage: int, kind: str, number: int, last: int) -> set[tuple[int, str, int]]:
    """What must be done before."""
    if kind == "F":
        return {(stage - 1, "F", number)} if stage else set()
    if kind == "W":
        return {(stage, "I", number)}
    return {(stage, "F", number)} | ({(stage + 1, "I", number)} if stage < last else set())


def _order(name: str, pp_size: int, micro_batches: int) -> dict[int, list[tuple[int, str, int]]]:
    """(stage, kind, micro-batch) of each rank, as torch's schedule has them before it adds what travels."""
    if name == "1f1b":  # it has no table; `Schedule1F1B._step_microbatches` is this
        return {rank: [*_one_forward_one_backward(rank, pp_size - rank, micro_batches)] for rank in range(pp_size)}
    count = 2 * pp_size
    stages: list[Any] = [
        SimpleNamespace(
            stage_index=number, num_stages=count, group_size=pp_size, group_rank=0, group=None, has_backward=True,
            submod=torch.nn.Module(), is_first=number == 0, is_last=number == count - 1, device=torch.device("cpu"),
        )
        for number in (0, count - 1 if name in V_SHAPED else pp_size)
    ]  # fmt: skip
    schedule = SCHEDULES[name](stages, micro_batches, lambda loss, target: loss)
    return {
        rank: [
            (action.stage_index, action.computation_type.value, action.microbatch_index)
            for action in actions
            if action is not None
        ]
        for rank, actions in schedule.pipeline_order.items()
    }


def _one_forward_one_backward(rank: int, ahead: int, micro_batches: int) -> Iterator[tuple[int, str, int]]:
    for number in range(micro_batches + ahead):
        if number >= ahead:
            yield rank, "B", number - ahead
        if number < micro_batches:
            yield rank, "F", number


def bubble(slots: list[Slot]) -> float:
    """The share of their time that ranks wait."""
    ranks = {slot.rank for slot in slots}
    end = max(slot.start + slot.seconds for slot in slots)
    return 1 - sum(slot.seconds for slot in slots) / (end * len(ranks))


# By kind, of a rank's first stage and of its second.
KINDS = {
    "F": ("forward", "#9ed2f2", "#3a9bd9"),
    "B": ("backward", "#f2b64b", "#d98e00"),
    "I": ("backward, or its first half", "#f2b64b", "#d98e00"),
    "W": ("its second half: weights", "#8fd6bd", "#2fa37e"),
}


def draw_schedules(axes: Any) -> None:
    for row, name in enumerate(SCHEDULES):
        slots, top = timetable(name), -5.7 * row
        axes.text(0, top + 0.3, f"{name}: a rank waits {bubble(slots):.0%} of the time", fontsize=12)
        axes.add_patch(_rectangle(0, top - 4, max(slot.start + slot.seconds for slot in slots), 4, PALE))
        for slot in slots:
            colour = KINDS[slot.kind][1 + (slot.stage >= 4)]
            size = 9 if slot.seconds >= 1 else 7
            _box(axes, slot.start, top - slot.rank - 1, slot.seconds, 1, colour, str(slot.micro_batch), size=size)
        for rank in range(4):
            axes.text(-0.3, top - rank - 0.5, f"rank {rank}", ha="right", va="center", fontsize=10)
    for number, (kind, colour, second) in enumerate(KINDS[kind] for kind in "FIW"):
        x = 12.0 * number
        _box(axes, x, 1.9, 0.9, 0.9, colour, "")
        _box(axes, x + 0.9, 1.9, 0.9, 0.9, second, "")
        axes.text(x + 2.1, 2.35, kind, va="center", fontsize=11)
    axes.text(27, -13.2, "numbers: micro-batches\ndarker: of a rank's second stage", va="center", fontsize=10)


def _rectangle(x: float, y: float, width: float, height: float, colour: str, **style: Any) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, **{"facecolor": colour, "edgecolor": INK, "linewidth": 0.8} | style)


def _box(
    axes: Any, x: float, y: float, width: float, height: float, colour: str, label: str, *, size: float = 10,
    dy: float = 0.0,
) -> None:  # fmt: skip
    """A rectangle from (x, y) to the right and up, with text in its middle or `dy` above it."""
    axes.add_patch(_rectangle(x, y, width, height, colour))
    axes.text(x + width / 2, y + height / 2 + dy, label, ha="center", va="center", fontsize=size)


def _arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], style: str) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": style, "color": INK, "shrinkA": 0, "shrinkB": 0})


class Picture(NamedTuple):
    draw: Callable[[Any], None]
    size: tuple[float, float]  # inches
    x: tuple[float, float]
    y: tuple[float, float]


ALL = {
    "mesh": Picture(draw_mesh, (9, 3.2), (-0.9, 10.1), (-1.5, 2.1)),
    "data_parallel": Picture(draw_shards, (9.5, 2.5), (-1.6, 15.0), (-2.5, 1.8)),
    "tensor_parallel": Picture(draw_blocks, (9.5, 4.2), (-0.5, 15.6), (-6.2, 1.2)),
    "sequence_parallel": Picture(draw_sequence, (11, 3.6), (-1.2, 18.6), (-4.3, 0.9)),
    "pipeline_schedules": Picture(draw_schedules, (11, 7), (-3, 36.3), (-21.3, 3)),
}


def write(folder: Path) -> None:
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in ALL.items():
        figure = Figure(figsize=picture.size)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=picture.x, ylim=picture.y)
        axes.axis("off")
        picture.draw(axes)
        # Without metadata the same picture is the same file.
        figure.savefig(folder / f"{name}.png", dpi=100, metadata={"Software": None})


if __name__ == "__main__":
    write(PICTURES)
