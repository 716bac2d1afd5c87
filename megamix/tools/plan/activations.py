"""Memory of forward and backward beside parameters and gradients, counted without using any.

The model's own code runs on tensors that have a shape and a dtype and no memory. So no formula can fall behind the
code: every tensor that an operation keeps, that recompute drops, or that lives in between is seen as it happens. One
and two blocks of each kind are run, since all blocks of a kind are alike.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from megamix.base.live_storage import LiveStorage
from megamix.comm.collectives import ShapesAlone
from megamix.comm.topology import Topology
from megamix.config import DecoderConfig, FP8Config, ParallelismConfig, axis_sizes, ranks_along
from megamix.model.family import family_of
from megamix.model.fp8 import compute_in_fp8, fp8_names
from megamix.model.language_model import LanguageModel
from megamix.model.ops import Ops
from megamix.parallel.build import divide_work
from megamix.parallel.stages import Stage
from megamix.parallel.tensor_parallel import take_blocks
from megamix.tools.plan.stand_ins import (
    CompiledGpuShapes,
    GpuShapes,
    crowded_experts,
    few_slices,
    fused_codes,
    with_kernels,
    without_memory,
)

Machine = Literal["cpu", "gpu"]


class Activations(NamedTuple):
    """Bytes of a step's forward and backward on one rank, beside the bytes that it holds between steps."""

    blocks: int  # bytes that all blocks keep from forward to backward, at the peak
    others: int  # bytes kept by embedding, norm, head and loss, and the batch, at the peak
    forward: int  # the most that lives at once until the loss is computed
    backward: int  # the most from then until backward has left the blocks
    end: int  # the most after that
    moved: int  # bytes of buffers that a forward writes


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedWork:
    """Settings that decide the memory of a micro-batch's forward and backward, in one stage or in the whole model."""

    model: DecoderConfig
    batch: tuple[int, int]  # (B, T) of a micro-batch
    dtype: torch.dtype
    machine: Machine
    packed: bool = False
    division: ParallelismConfig = field(default_factory=ParallelismConfig)
    fp8: FP8Config | None = None
    in_halves: bool = False  # each backward is in halves, except the first stage's
    crowded: bool = False  # all tokens choose experts of this rank; else experts get equally many

    @property
    def hidden(self) -> tuple[int, int, int]:
        """Return the shape of the tensor that passes between stages, in `dtype`, while activations are kept."""
        parts = ranks_along(self.division, "cp") * self.division.sequence_parallel_ranks
        return self.batch[0], self.batch[1] // parts, self.model.hidden_size

    def routing(self) -> AbstractContextManager[None]:
        """Return a context in which tokens choose experts as this work says."""
        experts = getattr(self.model, "experts", None)
        if not self.crowded or experts is None:
            return nullcontext()
        return crowded_experts(experts.top_k, experts.num_experts // ranks_along(self.division, "ep"))

    @property
    def batch_bytes(self) -> int:
        """Return the bytes of a micro-batch: tokens, targets and positions."""
        return (2 + self.packed) * torch.int64.itemsize * math.prod(self.batch)

    def build(self, like: Sequence[int]) -> LanguageModel:
        """Build a rank's part of a model with blocks like these layers' and with both ends, on the meta device.

        It needs no connection to other ranks.
        """
        part, division = family_of(self.model).on_meta(self.model, like), self.division
        ep_size = ranks_along(division, "ep")
        topology = Topology.place(0, dp=ep_size, ep_size=ep_size, **axis_sizes(division))
        take_blocks(part, topology)
        if self.fp8 is not None:
            in_fp8 = self._in_fp8()
            blocks = zip(part.get_submodule("blocks").children(), like, strict=True)
            names = ((name, block.get_submodule(name)) for block, layer in blocks for name in in_fp8.get(layer, ()))
            compute_in_fp8(names, self.fp8)
        divide_work(part, division, topology, ShapesAlone)
        return part

    def _in_fp8(self) -> dict[int, list[str]]:
        names = defaultdict[int, list[str]](list)
        for name in fp8_names(family_of(self.model), self.model, self.fp8) if self.fp8 is not None else ():
            _, layer, part = name.split(".", 2)
            names[int(layer)].append(part)
        return names

    def alike(self) -> list[int]:
        """Return for each layer the first one whose block is of the same kind, with the same products in FP8."""
        first, in_fp8 = dict[tuple[int | str, ...], int](), self._in_fp8()
        kinds = enumerate(family_of(self.model).alike(self.model))
        return [first.setdefault((kind, *in_fp8.get(layer, ())), layer) for layer, kind in kinds]


@dataclass(slots=True)
class StageMemory:
    """Bytes of one micro-batch in one stage.

    They leave out parameters, flat gradients, the micro-batch, and the buffers in which the stage's input and its
    gradient arrive. The maximum of each pass includes the bytes kept for that pass.
    """

    blocks: int = 0  # kept by the blocks from forward to backward
    kept: int = 0  # kept by the whole stage, its output included
    forward: int = 0
    backward_blocks: int = 0
    backward_end: int = 0  # the rest of backward, after the blocks' activations are freed
    # A backward in two halves: the maximum of each half, and the bytes kept between them.
    input: int = 0
    between: int = 0
    weight: int = 0
    moved: int = 0  # bytes of buffers that a forward writes

    @property
    def backward(self) -> int:
        return max(self.backward_blocks, self.backward_end)


def trace_stage(work: TracedWork, layers: range, *, is_first: bool = True, is_last: bool = True) -> StageMemory:
    """Return the memory of one micro-batch in a stage of these blocks. A first and last stage is the whole model.

    On a CPU, compiled blocks are counted as if they were not compiled. That is an upper bound, unless halves are
    computed wide: a compiled block keeps FP32 copies of those. Blocks of a kind that end before those of another kind
    begin are counted with an upper bound, too.
    """
    alike = work.alike()
    counts = Counter(alike[layer] for layer in reversed(layers))
    kinds = [*reversed(counts)]  # in the order of each kind's last block
    one = _trace(work, tuple(kinds), is_first, is_last)
    # The bytes that a second block of a kind adds in front of all others bound those of each further block.
    twice = {kind: _trace(work, (kind, *kinds), is_first, is_last) for kind in kinds}
    found = asdict(one)
    for kind, count in counts.items():
        for name, size in asdict(one).items():
            found[name] += (count - 1) * (getattr(twice[kind], name) - size)
        found["blocks"] += count * (twice[kind].kept - one.kept)
    return StageMemory(**found)


@cache  # tracing takes most of a plan's time, and advice plans the same work for many ranks
def _trace(work: TracedWork, like: tuple[int, ...], is_first: bool, is_last: bool) -> StageMemory:
    found = StageMemory()
    on_gpu = work.machine == "gpu"
    quantising = fused_codes() if on_gpu and work.model.compile else nullcontext()
    on_meta = on_gpu and family_of(work.model).runs_on_meta
    with without_memory(on_gpu=on_meta) as device, few_slices(), work.routing(), quantising:
        model = work.build((*like[: not is_first], *like, *like[: not is_last]))  # missing ends get blocks of their own
        place(model, work.dtype, device)
        for module in model.modules() if on_gpu else ():
            if isinstance(ops := getattr(module, "ops", None), Ops):
                module.ops = with_kernels(ops, CompiledGpuShapes if work.model.compile else GpuShapes)  # type: ignore[assignment]  # nn.Module's attributes are tensors or modules to mypy
        stage = Stage(model, range(not is_first, len(like) + (not is_first)))
        targets = torch.zeros(work.batch, dtype=torch.int64, device=device)
        x, came_back = (torch.zeros(work.hidden, dtype=work.dtype, device=device) for _ in range(2))
        x = targets.clone() if is_first else x.requires_grad_()
        with LiveStorage(counts_meta=True) as tracker:
            for tensor in (*model.parameters(), *model.buffers(), targets, x, came_back):
                tensor.detach()  # a tensor is counted once it is touched
            meter = Meter(tracker)
            grads = None if is_last else [came_back]
            halves = work.in_halves and not is_first  # the first stage's second half is its whole backward
            # Most batches have few documents. On a CPU each document is computed alone, in less memory than without
            # packing.
            packed = (torch.zeros_like(targets), 1) if work.packed and on_gpu else ()
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
    """Reader of a tracker's bytes above those of its start."""

    def __init__(self, tracker: LiveStorage):
        self._tracker, self._base = tracker, tracker.live_bytes
        self.peak()

    def live(self) -> int:
        return self._tracker.live_bytes - self._base

    def peak(self) -> int:
        """Return the most bytes since the last call."""
        highest, self._tracker.peak_bytes = self._tracker.peak_bytes, self._tracker.live_bytes
        return highest - self._base


def watch_backward(part: nn.Module, first_block: nn.Module, blocks_are_done: Callable[[], None]) -> Callable[[], None]:
    """Call `blocks_are_done` once a backward has left the blocks, and drop gradients, as the engine does.

    The engine drops them once they are in its buffers. Returns a function that ends the watching, to be called after
    the forward.
    """

    def watch(block: nn.Module, args: tuple[Tensor, ...]) -> None:
        args[0].register_hook(lambda grad: blocks_are_done())  # type: ignore[no-untyped-call]  # untyped in torch

    def drop_grad(param: Tensor) -> None:
        param.grad = None

    for param in part.parameters():
        param.register_post_accumulate_grad_hook(drop_grad)  # type: ignore[no-untyped-call]  # untyped in torch
    return first_block.register_forward_pre_hook(watch).remove


def _trace_halves(
    stage: Stage, run: Callable[[], Tensor], x: Tensor, grads: list[Tensor] | None, meter: Meter, found: StageMemory
) -> None:
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    out = run()
    meter.peak()
    passed, groups = stage_backward_input([out], grads, [x], stage.parameters())
    found.input = meter.peak()
    del passed
    x.grad = None  # the gradient is counted with the transfers
    found.between = meter.live()
    stage_backward_weight(stage.parameters(), groups)
    found.weight = meter.peak()
    for param in stage.parameters():
        param.grad = None


def place(part: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Give a module of the meta device parameters in half on `device`; shared ones stay shared."""
    placed = dict[nn.Parameter, nn.Parameter]()
    for module in part.modules():
        for name, param in module._parameters.items():
            if param is not None and param not in placed:
                # The tensors are made here: nn.Module.to() cannot swap tensors to which a tracker refers.
                placed[param] = nn.Parameter(torch.empty(param.shape, dtype=dtype, device=device), param.requires_grad)
            module._parameters[name] = None if param is None else placed[param]
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
