"""Stand-ins for a model's operations where only memory counts: tensors without memory, a GPU's kernels, few slices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor

from megamix.model import fp8, wide
from megamix.model import ops as operations
from megamix.model.context import Documents
from megamix.model.fp8 import Codes
from megamix.model.ops import AttentionRule, Ops, Segmented, Segments
from megamix.model.wide import Crossing, apply
from megamix.parallel import expert_parallel


def few_slices() -> AbstractContextManager[object]:
    """Let loops over slices take only the first two slices and the last.

    Slices in between hold as much as the second, and nobody reads what they write. On a CPU the loss of 8,192 tokens
    has 60,000 slices.
    """
    all_slices = wide.row_slices

    def few(num_rows: int, row_size: int, max_elements: int = wide.MAX_WIDE_ELEMENTS) -> Iterator[slice]:
        slices = [*all_slices(num_rows, row_size, max_elements)]
        return iter(slices[:2] + slices[2:][-1:])

    return mock.patch.object(wide, "row_slices", few)


@contextlib.contextmanager
def crowded_experts(top_k: int, num_here: int) -> Iterator[None]:
    """Let every token, of whatever rank, choose as many experts as it can of the `num_here` of this rank: on a CPU the
    same ones, on a GPU such that groups are padded as far as they ever are. No routing brings more rows to a rank, and
    none takes more memory there.
    """
    even_groups, even_ranks, most = operations.host_counts, expert_parallel.rows_of_ranks, min(top_k, num_here)

    def groups(counts: Tensor, total: int) -> list[int]:
        if counts.is_meta and len(counts) > 1:
            largest = min(total, operations.MAX_PADDED * total // len(counts))
            return [largest, *even_groups(counts[1:], total - largest)]
        return even_groups(counts[:most], total) + [0] * (len(counts) - most)

    def ranks(to: Tensor, of: Tensor, num_rows: int) -> tuple[list[int], list[int]]:
        return even_ranks(to, of, num_rows)[0], [num_rows // top_k * most] * len(of)

    with (
        mock.patch.object(operations, "host_counts", groups),
        mock.patch.object(expert_parallel, "rows_of_ranks", ranks),
    ):
        yield


def fused_codes() -> AbstractContextManager[object]:
    """Let codes in FP8 be made without tensors in between, as by kernels of torch.compile."""

    def fused(x: Tensor, dtype: torch.dtype, by_row: bool) -> Codes:
        return Codes(x.new_empty(x.shape, dtype=dtype), x.new_empty(len(x) if by_row else 1, dtype=torch.float32))

    return mock.patch.object(fp8, "quantise", fused)


@contextlib.contextmanager
def without_memory(*, on_gpu: bool) -> Iterator[torch.device]:
    """Yield a device whose tensors have only a shape and a dtype.

    It is "meta" in place of a GPU. In place of a CPU the tensors claim to be on the CPU, because some operations ask.
    """
    if on_gpu:
        yield torch.device("meta")
        return
    from torch._subclasses.fake_tensor import FakeTensorMode  # the import takes a second or more

    with FakeTensorMode():
        yield torch.device("cpu")


def with_kernels(ops: Ops, kernels: type[GpuShapes]) -> Ops:
    """Return these operations, fields included, with a GPU's kernels in place of torch's own operations."""
    return cast(Ops, type(kernels.__name__, (kernels, type(ops)), {})(**vars(ops)))


class GpuShapes(Ops):
    """Fused kernels that torch calls on a GPU, with their memory only: kept tensors and scratch.

    On the meta device torch would divide these operations into smaller ones. Other operations keep the same on any
    device.
    """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return apply(_Kernel, x.shape[:-1], 0, x, weight)  # keeps 1 / rms of each row

    def whole_attention(
        self, query: Tensor, key: Tensor, value: Tensor, documents: Documents | None, rule: AttentionRule
    ) -> Tensor:
        if rule.softcap:  # no kernel
            return super().whole_attention(query, key, value, documents, rule)
        if documents is not None and documents.borders is not None:
            # mha_varlen_bwd puts 128 rows of FP32 between two documents.
            rows = query.shape[0] * query.shape[2] + 128 * len(documents.borders)
            return apply(_Kernel, query.shape[:-1], 4 * rows * query.shape[1] * query.shape[3], query, key, value)
        if query.dtype == torch.float32:  # as Ops does
            group = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
        # FlashAttention-2 (csrc/flash_attn/flash_api.cpp, mha_bwd) sums the query's gradient in FP32.
        return apply(_Kernel, query.shape[:-1], 4 * query.numel(), query, key, value)

    def segments(self, query: Tensor, key: Tensor, value: Tensor, borders: Segments, window: int) -> Segmented:
        logsumexp = query.new_empty(query.shape[:2], dtype=torch.float32)
        return Segmented(torch.empty_like(query), logsumexp, query.new_empty(2, dtype=torch.uint64))

    def segments_backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, found: Segmented, borders: Segments, window: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = len(query) + 128 * len(borders.queries)
        scratch = query.new_empty(rows, *query.shape[1:], dtype=torch.float32)
        # With groups the kernel writes a gradient for each query head, and sums them.
        heads = [query.new_empty(len(x), *query.shape[1:]) for x in (key, value) if query.shape[1] > key.shape[1]]
        grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        del scratch, heads
        return grads


class CompiledGpuShapes(GpuShapes):
    """Kernels that torch.compile fuses on top: elementwise operations keep their inputs and nothing in between."""

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        return apply(_Kernel, (0,), 0, gate, up)

    def gelu(self, x: Tensor, approximate: str = "none") -> Tensor:
        return apply(_Kernel, (0,), 0, x)

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return apply(Crossing, x, torch.empty_like, torch.empty_like)  # its backward needs the tables alone


class _Kernel(torch.autograd.Function):
    """Fused kernel that keeps inputs, output and an FP32 statistic, and makes a gradient like each input."""

    @staticmethod
    def forward(ctx: Any, statistic: tuple[int, ...], scratch_bytes: int, *inputs: Tensor) -> Tensor:
        out = torch.empty_like(inputs[0])
        kept = out if len(inputs) == 3 else None  # attention's backward reads its output, a norm's does not
        ctx.save_for_backward(*inputs, inputs[0].new_empty(statistic, dtype=torch.float32), kept)
        ctx.num_inputs, ctx.scratch_bytes = len(inputs), scratch_bytes
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors[: ctx.num_inputs]
        scratch = grad.new_empty(ctx.scratch_bytes, dtype=torch.uint8)
        grads = tuple(torch.empty_like(x) for x in inputs)
        del scratch
        return None, None, *grads
