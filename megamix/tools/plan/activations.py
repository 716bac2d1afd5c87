"""The memory of forward and backward beside parameters and gradients, counted without any: the model's own code runs
on tensors that have a shape and a dtype and no memory.

No formula to fall behind the code: what an operation keeps, what recompute drops, and every tensor that lives in
between is seen as it happens. Of each kind of block one and two are run, since all of a kind are alike.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal

import torch
from torch import Tensor, nn

from megamix.comm.collectives import ShapesAlone
from megamix.comm.topology import Topology
from megamix.config import DecoderConfig
from megamix.live_storage import LiveStorage
from megamix.model.decoder import Decoder
from megamix.model.family import family_of
from megamix.model.ops import Ops
from megamix.parallel.borders import Border
from megamix.parallel.stages import Stage
from megamix.parallel.tensor_parallel import divide_layers, take_blocks
from megamix.tools.plan.stand_ins import CompiledGpuShapes, GpuShapes, few_slices, without_memory

Machine = Literal["cpu", "gpu"]


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes of a step's forward and backward on one rank, beside what it holds between steps."""

    blocks: int  # at the peak: what all blocks keep from forward to backward
    others: int  # likewise the rest: embedding, norm, head and loss, and the batch
    forward: int  # the most that lives at once until the loss is there
    backward: int  # and after it, until backward has left the blocks
    end: int  # and after that
    moved: int  # of buffers that a forward writes


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedWork:
    """All that decides what forward and backward of a micro-batch take in one stage, or in the whole model."""

    model: DecoderConfig
    batch: tuple[int, int]  # (B, T) of a micro-batch
    dtype: torch.dtype
    machine: Machine
    packed: bool = False
    tp_size: int = 1
    sequence_parallel: bool = False
    in_halves: bool = False  # each backward, but the first stage's

    @property
    def hidden(self) -> tuple[int, int, int]:
        """Return the shape of what passes between stages, in `dtype`, while activations are kept."""
        parts = self.tp_size if self.sequence_parallel else 1
        return self.batch[0], self.batch[1] // parts, self.model.hidden_size

    @property
    def batch_bytes(self) -> int:
        """Return those of a micro-batch: tokens, targets and positions."""
        return (2 + self.packed) * torch.int64.itemsize * math.prod(self.batch)

    def build(self, like: Sequence[int]) -> Decoder:
        """Build a rank's part of a model of such layers' blocks with both ends, on the meta device; nothing needs to be
        connected.
        """
        part = family_of(self.model).on_meta(self.model, like)
        take_blocks(part, self.tp_size)
        if self.tp_size > 1:
            tp = ShapesAlone(Topology.place(0, tp_size=self.tp_size).tp)
            divide_layers(part, Border(tp, sequence=self.sequence_parallel))
        return part


@dataclass(slots=True, kw_only=True)
class StageMemory:
    """Bytes of one micro-batch in one stage, beside parameters, flat gradients, its batch, and the buffers in which its
    input and its gradient arrive. The most of each pass has in it what is kept for it.
    """

    blocks: int = 0  # kept by the blocks from forward to backward
    kept: int = 0  # by all, with the output
    forward: int = 0
    backward_blocks: int = 0
    backward_end: int = 0  # the rest of it, when nothing of the blocks is kept any more
    # Of a backward in two halves: the most of each, and what is kept between them.
    input: int = 0
    between: int = 0
    weight: int = 0
    moved: int = 0  # of buffers that a forward writes

    @property
    def backward(self) -> int:
        return max(self.backward_blocks, self.backward_end)


def trace_stage(work: TracedWork, layers: range, *, is_first: bool = True, is_last: bool = True) -> StageMemory:
    """Trace one micro-batch in a stage of these blocks; one that is first and last is the whole model.

    On a CPU compiled blocks are counted as if they were not: an upper bound, unless halves are computed wide, of which
    a compiled block keeps FP32 copies. So are blocks of a kind that end before those of another begin.
    """
    alike = family_of(work.model).alike(work.model)
    counts = Counter(alike[layer] for layer in reversed(layers))
    kinds = [*reversed(counts)]  # in the order of the last block of each
    one = _trace(work, tuple(kinds), is_first, is_last)
    # What a second block of a kind adds in front of all others, each further one does at most.
    twice = {kind: _trace(work, (kind, *kinds), is_first, is_last) for kind in kinds}
    found = dataclasses.replace(one)
    for kind, count in counts.items():
        for name in (field.name for field in dataclasses.fields(one)):
            added = getattr(twice[kind], name) - getattr(one, name)
            setattr(found, name, getattr(found, name) + (count - 1) * added)
        found.blocks += count * (twice[kind].kept - one.kept)
    return found


@cache  # most of the time of a plan; advice plans the same work for many ranks
def _trace(work: TracedWork, like: tuple[int, ...], is_first: bool, is_last: bool) -> StageMemory:
    found = StageMemory()
    with without_memory(on_gpu=work.machine == "gpu") as device, few_slices():
        model = work.build((*like[: not is_first], *like, *like[: not is_last]))  # the ends are those of other blocks
        place(model, work.dtype, device)
        kernels = CompiledGpuShapes() if work.model.compile else GpuShapes()
        for module in model.modules() if work.machine == "gpu" else ():
            # Not where a divided layer has operations of its own (parallel/tensor_parallel.py): no kernel fuses those.
            if type(getattr(module, "ops", None)) is Ops:
                module.ops = kernels  # type: ignore[assignment]  # nn.Module's attributes are tensors or modules to mypy
        stage = Stage(model, range(not is_first, len(like) + (not is_first)))
        targets = torch.zeros(work.batch, dtype=torch.int64, device=device)
        x, came_back = (torch.zeros(work.hidden, dtype=work.dtype, device=device) for _ in range(2))
        x = targets.clone() if is_first else x.requires_grad_()
        with LiveStorage(counts_meta=True) as tracker:
            for tensor in (*model.parameters(), *model.buffers(), targets, x, came_back):
                tensor.detach()  # counted as soon as touched
            meter = Meter(tracker)
            grads = None if is_last else [came_back]
            halves = work.in_halves and not is_first  # the first stage's second half is all of it
            # Most batches have few documents. On a CPU each is computed alone, in less memory than without packing.
            packed = (torch.zeros_like(targets), 1) if work.packed and work.machine == "gpu" else ()
            run = partial(stage, x, targets, *packed)
            if halves:
                _trace_halves(stage, run, x, grads, meter, found)

            def blocks_are_done() -> None:
                found.backward_blocks = max(found.backward_blocks, meter.peak())

            stop_watching = watch_backward(model, model.blocks[stage.layers.start], blocks_are_done)
            versions = [(buffer, buffer._version) for buffer in model.buffers()]
            meter.peak()
            out = run()
            both = zip(model.buffers(), versions, strict=True)
            found.moved = sum(now.nbytes for now, then in both if now is not then[0] or now._version != then[1])
            stop_watching()
            found.kept, found.forward = meter.live(), meter.peak()
            torch.autograd.backward(out, grads or torch.empty_like(out))
            found.backward_end = meter.peak()
    if not halves:
        found.input, found.between, found.weight = found.kept, found.kept, found.backward
    return found


class Meter:
    """Reads a tracker from where it stood."""

    def __init__(self, tracker: LiveStorage):
        self._tracker, self._base = tracker, tracker.live_bytes
        self.peak()

    def live(self) -> int:
        """Bytes."""
        return self._tracker.live_bytes - self._base

    def peak(self) -> int:
        """Return the most bytes since it was asked for last."""
        highest, self._tracker.peak_bytes = self._tracker.peak_bytes, self._tracker.live_bytes
        return highest - self._base


def watch_backward(part: nn.Module, first_block: nn.Module, blocks_are_done: Callable[[], None]) -> Callable[[], None]:
    """Hear when a backward has left the blocks, and drop gradients, as the engine does once they are in its buffers.

    Returns what ends the watching; call it when the forward is done.
    """

    def watch(block: nn.Module, args: tuple[Tensor, ...]) -> None:
        args[0].register_hook(lambda grad: blocks_are_done())  # type: ignore[no-untyped-call]  # no types

    def drop_grad(param: Tensor) -> None:
        param.grad = None

    for param in part.parameters():
        param.register_post_accumulate_grad_hook(drop_grad)  # type: ignore[no-untyped-call]  # no types
    return first_block.register_forward_pre_hook(watch).remove


def _trace_halves(
    stage: Stage, run: Callable[[], Tensor], x: Tensor, grads: list[Tensor] | None, meter: Meter, found: StageMemory
) -> None:
    """A backward in halves, by what torch's stages call."""
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    out = run()
    meter.peak()
    passed, groups = stage_backward_input([out], grads, [x], stage.parameters())
    found.input = meter.peak()
    del passed
    x.grad = None  # counted with what is sent
    found.between = meter.live()
    stage_backward_weight(stage.parameters(), groups)
    found.weight = meter.peak()
    for param in stage.parameters():
        param.grad = None


def place(part: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Give a module of the meta device parameters in half on `device`; shared ones stay shared."""
    placed: dict[nn.Parameter, nn.Parameter] = {}
    for module in part.modules():
        for name, param in module._parameters.items():
            if param is not None and param not in placed:
                # Tensors made here and not moved here: nn.Module.to() cannot swap those that a tracker refers to.
                placed[param] = nn.Parameter(torch.empty(param.shape, dtype=dtype, device=device), param.requires_grad)
            module._parameters[name] = None if param is None else placed[param]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
