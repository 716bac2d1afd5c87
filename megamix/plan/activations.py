"""The memory of forward and backward beside parameters and gradients, counted without any: the model's own code runs
on tensors that have a shape and a dtype and no memory.

No formula to fall behind the code: what an operation keeps, what recompute drops, and every tensor that lives in
between is seen as it happens. Only one and two blocks are run, since every block is alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megamix.config import ModelConfig
from megamix.live_storage import LiveStorage
from megamix.model import sizes
from megamix.model.context import Documents
from megamix.model.ops import Ops
from megamix.model.wide import apply

Machine = Literal["cpu", "gpu"]
Batch = tuple[Tensor, ...]
Run = Callable[[nn.Module, torch.device], tuple[Tensor, Batch]]


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes of one micro-batch on one rank, beside parameters, buffers and flat gradients."""

    blocks: int  # what all blocks keep from forward to backward
    others: int  # what the rest (embedding, norm, head and loss) keeps
    forward: int  # the most that lives at once until the loss is there
    backward: int  # until the last block's backward has ended, what is kept included
    backward_end: int  # in the rest of backward, when nothing of the blocks is kept any more


def trace_activations(
    build: Callable[[int], nn.Module],
    run: Run,
    num_blocks: int,
    dtype: torch.dtype,
    machine: Machine,
    *,
    compiled: bool = False,
) -> Activations:
    """Trace a rank's part of the model.

    `build(n)`: the part on the meta device with n of its `blocks`. `run(part, device)`: its forward on a micro-batch
    made there: the loss, or what the next stage gets, and the batch, which a job holds until backward has ended.
    `compiled`: blocks run through torch.compile; on a CPU they are counted as if they did not, an upper bound.
    """
    one, two = (_trace(build(blocks), run, dtype, machine, compiled) for blocks in (1, 2))
    block = two.kept - one.kept
    further = block * (num_blocks - 1)  # alive whenever forward or the last block's backward needs the most
    blocks = block * num_blocks
    return Activations(
        blocks, one.kept + further - blocks, one.forward + further, one.backward + further, one.backward_end
    )


@dataclass(slots=True)
class _ModelPeaks:
    kept: int = 0
    forward: int = 0
    backward: int = 0
    backward_end: int = 0


def _trace(part: nn.Module, run: Run, dtype: torch.dtype, machine: Machine, compiled: bool) -> _ModelPeaks:
    device = torch.device("cpu" if machine == "cpu" else "meta")
    found = _ModelPeaks()
    with without_memory(machine):
        place(part, dtype, device)
        if machine == "gpu":
            use_gpu_kernels(part, compiled)
        with LiveStorage(counts_meta=True) as tracker:
            for tensor in (*part.parameters(), *part.buffers()):
                tensor.detach()  # counted as soon as touched
            meter = Meter(tracker)

            def blocks_are_done() -> None:
                found.backward = max(found.backward, meter.peak())

            stop_watching = watch_backward(part, part.get_submodule("blocks.0"), blocks_are_done)
            loss, batch = run(part, device)
            stop_watching()
            found.kept, found.forward = meter.live(), meter.peak()
            loss.backward(torch.empty_like(loss))  # type: ignore[no-untyped-call]
            found.backward_end = meter.peak()
            del batch
    return found


def without_memory(machine: Machine) -> contextlib.AbstractContextManager[object]:
    """On a CPU as fake tensors, which say that they lie there, as the model's own operations ask; meta tensors count
    as a GPU's.
    """
    if machine == "gpu":
        return contextlib.nullcontext()
    from torch._subclasses.fake_tensor import FakeTensorMode  # a second or more

    return FakeTensorMode()


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
        args[0].register_hook(lambda grad: blocks_are_done())  # type: ignore[no-untyped-call]

    def drop_grad(param: Tensor) -> None:
        param.grad = None

    for param in part.parameters():
        param.register_post_accumulate_grad_hook(drop_grad)  # type: ignore[no-untyped-call]
    return first_block.register_forward_pre_hook(watch).remove


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


def use_gpu_kernels(part: nn.Module, compiled: bool) -> None:
    """Not where a divided layer has operations of its own (parallel/tensor_parallel.py): no kernel fuses those."""
    for module in part.modules():
        if type(getattr(module, "ops", None)) is Ops:
            module.ops = CompiledGpuShapes() if compiled else GpuShapes()  # type: ignore[assignment]


class GpuShapes(Ops):
    """The fused kernels that torch calls on a GPU, as far as memory goes: what they keep and what scratch they take.

    On the meta device torch would take these operations apart. What it keeps of the others is the same anywhere.
    """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return apply(_Kernel, x.shape[:-1], 0, x, weight)  # keeps 1 / rms of each row

    def attention(self, query: Tensor, key: Tensor, value: Tensor, documents: Documents | None = None) -> Tensor:
        if query.dtype == torch.float32:  # as Ops does
            group = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
        # FlashAttention-2 (csrc/flash_attn/flash_api.cpp, mha_bwd): the query's gradient is summed in FP32.
        return apply(_Kernel, query.shape[:-1], 4 * query.numel(), query, key, value)


class CompiledGpuShapes(GpuShapes):
    """What torch.compile fuses as well: elementwise operations keep their inputs and nothing in between."""

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        return apply(_Kernel, (0,), 0, gate, up)

    def gelu(self, x: Tensor, approximate: str = "none") -> Tensor:
        return apply(_Kernel, (0,), 0, x)

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return apply(_Turned, x)


class _Turned(torch.autograd.Function):
    """Rotary positions in one kernel: the way back needs the tables alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.empty_like(grad)


class _Kernel(torch.autograd.Function):
    """A fused kernel: keeps inputs, output and an FP32 statistic, makes a gradient like each input."""

    @staticmethod
    def forward(ctx: Any, statistic: tuple[int, ...], scratch_bytes: int, *inputs: Tensor) -> Tensor:
        out = torch.empty_like(inputs[0])
        kept = out if len(inputs) == 3 else None  # attention's backward reads its output, a norm's does not
        ctx.save_for_backward(*inputs, inputs[0].new_empty(statistic, dtype=torch.float32), kept)
        ctx.num_inputs, ctx.scratch_bytes = len(inputs), scratch_bytes
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors[: ctx.num_inputs]
        scratch = grad.new_empty(ctx.scratch_bytes, dtype=torch.uint8)
        grads = tuple(torch.empty_like(x) for x in inputs)
        del scratch
        return None, None, *grads


def kept_bytes_per_token(config: ModelConfig, itemsize: int = 2) -> int:
    """Return the bytes that one block keeps of each token, with activations of `itemsize` bytes and weights left out.

    It is what our own operations keep (FP16 on a CPU) and what torch's fused kernels keep on a GPU. Compiled blocks
    keep a little less with "selective", and packed sequences on a CPU attention's output once more.
    """
    hidden, query, key = config.hidden_size, *_head_sizes(config)
    if config.recompute == "full":
        return itemsize * hidden
    gates = 2 if config.activation == "swiglu" else 1
    numbers = 2 * hidden  # the residual stream, in front of each norm
    numbers += query + 2 * key + query  # query, key, value and output of attention
    numbers += gates * sizes.ffn_hidden_size(config)
    if config.recompute == "none":
        numbers += 2 * hidden + sizes.ffn_hidden_size(config)  # outputs of norms and activation function
    if config.qk_norm:
        numbers += query + key if config.recompute == "none" else 0  # as projected, and as normed and rotated
    masks = 2 * hidden if config.dropout else 0
    return itemsize * numbers + 4 * _statistics(config) + masks


def _head_sizes(config: ModelConfig) -> tuple[int, int]:
    head_dim = sizes.head_dim(config)
    return config.num_heads * head_dim, sizes.num_kv_heads(config) * head_dim


def _statistics(config: ModelConfig) -> int:
    """FP32 numbers: of attention's softmax one a head, of RMSNorm one a row, of LayerNorm two."""
    of_norms = 2 * (2 if config.norm == "layernorm" else 1)
    of_heads = config.num_heads + sizes.num_kv_heads(config) if config.qk_norm else 0
    return config.num_heads + of_norms + of_heads
