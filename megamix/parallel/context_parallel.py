"""Attention of ranks that divide the positions of sequences. A block's other operations are those of single positions.

Either keys and values of all positions are gathered, and a rank attends with its own queries; or ranks exchange
positions for heads, and a rank attends with all positions of its heads (Jacobs et al. 2023, DeepSpeed Ulysses).

What is gathered is not kept: backward gathers again. With gathered keys no mask is made: a CPU attends in pieces that
are whole or causal, whose results are merged by their logsumexp; a GPU's kernels take borders.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megamix.comm.collectives import Collectives
from megamix.model.context import Documents
from megamix.model.decoder import Decoder
from megamix.model.ops import SEES_ALL, Attend, AttentionRule, Keep, Ops, Segmented, change_ops
from megamix.model.span import AttentionPiece, Chunks, Span
from megamix.model.wide import Crossing, apply, aten


def divide_positions(model: Decoder, cp: Collectives, *, by_heads: bool = False) -> None:
    """Make a model compute this rank's positions of sequences with targets. Its calls are collective then. `by_heads`:
    attend with all positions of some heads.

    Raises: ValueError for a family whose blocks read other positions by themselves.
    """
    if model.head_dim() == 0:
        raise ValueError(
            f"parallelism.context.size: got {cp.axis.size}, but the family {model.name!r} does not attend by "
            "ops.attention alone (its head_dim() is 0): nothing would hand it the other ranks' positions; write "
            "parallelism.context = false"
        )
    model.span = span = Span(cp.axis.size, cp.axis.rank, by_heads=by_heads)
    way = _with_exchanged_heads if by_heads else _with_gathered_keys

    def divided(ops: Ops) -> Ops:
        # As in borders.py: the compiler can trace only some collectives of some backends.
        attend: Attend = torch.compiler.disable(partial(way, cp, ops.attend))  # type: ignore[no-untyped-call]  # untyped in torch
        return replace(
            ops,
            attend=partial(_attend, attend, ops.attend),
            keep=partial(_keep_own, span, ops.keep),
            over_sequence=lambda _, counts: cp.gather(counts.flatten()).sum(0).view_as(counts),
        )

    change_ops(model.modules(), divided)
    for block in model.blocks:
        # Backward may run a block again after the forwards of other micro-batches.
        block.register_forward_pre_hook(lambda _, args: span.enter(args[2]))


def _keep_own(span: Span, keep: Keep, ops: Ops, x: Tensor, share: float) -> Tensor:
    """Return the mask of dropout on this rank's positions: it drops the same units as in one process."""
    if (part := span.part) is None:
        return keep(ops, x, share)
    whole = x.new_empty(()).expand(x.shape[0], part.num_positions, x.shape[2])
    return part.own(keep(ops, whole, share))


def _attend(divided: Attend, whole: Attend, ops: Ops, *inputs: Any) -> Tensor:
    """Return attention of sequences whose positions ranks divide. Without targets every rank has all positions, and
    attends as one process does.
    """
    _, _, _, documents, _ = inputs
    return (divided if isinstance(documents, Chunks) else whole)(ops, *inputs)


def _with_gathered_keys(
    cp: Collectives, run: Attend, ops: Ops, query: Tensor, key: Tensor, value: Tensor, part: Chunks, rule: AttentionRule
) -> Tensor:
    """Return attention of this rank's queries with everybody's keys and values. `run`: attends with all keys here."""
    # (2, B, T / ranks, kv_heads, head_dim): in this order a GPU's kernels read it without a copy.
    own = torch.stack((key.transpose(1, 2), value.transpose(1, 2)))
    if not part.pieces:
        return apply(_BySegments, query, own, part, cp, ops, rule.window)
    if not rule.window:
        return apply(_InPieces, query, own, part, cp, ops.compute_dtype(query))
    # Pieces have no window: gather keys and values, keep them, and attend with a mask.
    gather, sum_own = (partial(way, part=part, cp=cp) for way in (_gather, _sum_own))
    key, value = apply(Crossing, own, gather, sum_own).transpose(2, 3)
    return run(ops, query, key, value, Documents(mask=part.seen(rule.window)), SEES_ALL)


def _with_exchanged_heads(
    cp: Collectives, run: Attend, ops: Ops, query: Tensor, key: Tensor, value: Tensor, part: Chunks, rule: AttentionRule
) -> Tensor:
    """Return attention of all positions with this rank's part of the heads. `run`: attends with all keys here."""
    size = cp.axis.size
    if key.shape[1] % size:  # a family of a plugin may name its heads otherwise: no check saw them
        raise ValueError(
            f'parallelism.context.method: got "heads", with which {size} context-parallel ranks must divide the '
            f'{key.shape[1]} heads of keys and values of a rank; write method = "gather"'
        )
    heads = [x.shape[1] // size for x in (query, key, value)]
    # The heads of query, key and value that each rank gets, for one call: (ranks, B, heads, T / ranks, D).
    own = torch.cat([torch.unflatten(x, 1, (size, -1)) for x in (query, key, value)], 2).movedim(1, 0)
    exchange = partial(_exchanged, cp=cp)
    arrived = apply(Crossing, own, exchange, exchange).permute(1, 2, 0, 3, 4).flatten(2, 3)
    query, key, value = torch.split(arrived, heads, 1)
    out = run(ops, query, key, value, part.documents, rule)
    parts = torch.unflatten(out, 2, (size, -1)).movedim(2, 0)
    return apply(Crossing, parts, exchange, exchange).transpose(0, 1).flatten(1, 2)


def _exchanged(parts: Tensor, cp: Collectives) -> Tensor:
    """Send the r-th part to rank r, and return the parts that arrive, in rank order. Shapes: (ranks, ...), kept."""
    parts = parts.contiguous()
    arrived, even = torch.empty_like(parts), [parts[0].numel()] * cp.axis.size
    cp.exchange(parts.view(-1), arrived.view(-1), even, even).wait()
    return arrived


def _gather(own: Tensor, part: Chunks, cp: Collectives) -> Tensor:
    """Return all positions, in order. Shapes: (..., T / ranks, heads, D) -> (..., T, heads, D)."""
    return part.whole(cp.gather(own.reshape(-1)).view(cp.axis.size, *own.shape))


def _sum_own(whole: Tensor, part: Chunks, cp: Collectives) -> Tensor:
    """Return this rank's positions of the ranks' sum. Shapes: (..., T, heads, D) -> (..., T / ranks, heads, D)."""
    parts = part.by_rank(whole)
    return cp.sum_parts(parts.view(cp.axis.size, -1)).view(parts.shape[1:])


class _BySegments(torch.autograd.Function):
    """Attention on a GPU: query (B, heads, T / ranks, D), own (2, B, T / ranks, kv_heads, D) -> like query.

    The kernel takes a chunk's queries and all keys in one call. Keeps query, own, the output and its logsumexp.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, own: Tensor, part: Chunks, cp: Collectives, ops: Ops, window: int) -> Tensor:
        key, value = _gather(own, part, cp).flatten(1, 2)
        chunks = zip(_chunks(query, part), part.segments, strict=True)
        found = [ops.segments(chunk, key, value, borders, window) for chunk, borders in chunks]
        ctx.save_for_backward(query, own, *(x for one in found for x in one))
        ctx.part, ctx.cp, ctx.ops, ctx.window = part, cp, ops, window
        return _joined([one.out for one in found], query)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        part: Chunks = ctx.part
        query, own, *kept = ctx.saved_tensors
        found = [Segmented(*kept[first : first + 3]) for first in range(0, len(kept), 3)]
        whole = _gather(own, part, ctx.cp)
        key, value = whole.flatten(1, 2)
        of_queries, of_whole = [], torch.zeros_like(whole)
        chunks = zip(_chunks(grad, part), _chunks(query, part), found, part.segments, strict=True)
        for of_chunk, chunk, one, borders in chunks:
            of_query, of_key, of_value = ctx.ops.segments_backward(
                of_chunk, chunk, key, value, one, borders, ctx.window
            )
            of_queries.append(of_query)
            of_whole[0] += of_key.view(whole.shape[1:])
            of_whole[1] += of_value.view(whole.shape[1:])
        return _joined(of_queries, query), _sum_own(of_whole, part, ctx.cp), None, None, None, None


def _chunks(x: Tensor, part: Chunks) -> list[Tensor]:
    """Return the chunks of a rank's positions. Shapes: (B, heads, T / ranks, D) -> (B * chunk, heads, D) each."""
    return [chunk.flatten(0, 1) for chunk in torch.split(x.transpose(1, 2), part.chunk, 1)]


def _joined(chunks: list[Tensor], like: Tensor) -> Tensor:
    """Undo `_chunks`."""
    return torch.cat([chunk.view(len(like), -1, *chunk.shape[1:]) for chunk in chunks], 1).transpose(1, 2)


class _InPieces(torch.autograd.Function):
    """Attention on a CPU: query (B, heads, T / ranks, D), own (2, B, T / ranks, kv_heads, D) -> like query.

    Every piece is computed in `dtype` by torch's flash kernel, whose FP32 logsumexp merges the pieces of a query. In
    backward the kernel takes the merged output and logsumexp, so each piece's gradients are those of the whole softmax
    (Dao 2023, FlashAttention-2, equations of section 3.1). Keeps query, own, the output and the FP32 logsumexp.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, own: Tensor, part: Chunks, cp: Collectives, dtype: torch.dtype) -> Tensor:
        key, value = _gather(own, part, cp).transpose(2, 3)
        out = query.new_empty(query.shape, dtype=torch.float32)
        logsumexp = query.new_empty(query.shape[:3], dtype=torch.float32)
        for piece in part.pieces:
            for at, *inputs in _calls(query, key, value, piece, dtype):
                new, new_sum = aten._scaled_dot_product_flash_attention_for_cpu(*inputs, 0.0, piece.causal)
                new, new_sum = new.reshape(out[at].shape), new_sum.reshape(logsumexp[at].shape)
                if piece.causal:  # comes first of a query's pieces
                    out[at], logsumexp[at] = new, new_sum
                    continue
                before = logsumexp[at]
                total = torch.logaddexp(before, new_sum)
                out[at] *= (before - total).exp()[..., None]
                out[at] += new * (new_sum - total).exp()[..., None]
                logsumexp[at] = total
        result = out.to(query.dtype)
        ctx.save_for_backward(query, own, result, logsumexp)
        ctx.part, ctx.cp, ctx.dtype = part, cp, dtype
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        query, own, out, logsumexp = ctx.saved_tensors
        whole = _gather(own, ctx.part, ctx.cp)
        key, value = whole.transpose(2, 3)
        grad_query = torch.zeros_like(query, dtype=torch.float32)
        grads = torch.zeros_like(whole, dtype=torch.float32)
        for piece in ctx.part.pieces:
            for at, *inputs in _calls(query, key, value, piece, ctx.dtype):
                shape = inputs[0].shape
                of_out, mine = (x[at].to(ctx.dtype).reshape(shape) for x in (grad, out))
                own_sum = logsumexp[at].reshape(shape[:3])
                of_query, of_key, of_value = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    of_out, *inputs, mine, own_sum, 0.0, piece.causal
                )
                grad_query[at] += of_query.reshape(grad_query[at].shape)
                columns = grads.transpose(2, 3)[:, piece.sequences, :, piece.columns]
                columns[0] += of_key
                columns[1] += of_value
        return grad_query.to(query.dtype), _sum_own(grads.to(own.dtype), ctx.part, ctx.cp), None, None, None


def _calls(
    query: Tensor, key: Tensor, value: Tensor, piece: AttentionPiece, dtype: torch.dtype
) -> Iterator[tuple[Any, Tensor, Tensor, Tensor]]:
    """Yield the calls for a piece: the place of the queries in a tensor (B, heads, T / ranks, ...), then query, key and
    value, with as many heads each. Keys and values are not copied for each head of a group. Without a mask a group's
    heads are further rows; a causal kernel takes them one after the other.
    """
    kv_heads, group = key.shape[1], query.shape[1] // key.shape[1]
    key, value = (x[piece.sequences, :, piece.columns].to(dtype) for x in (key, value))
    if not piece.causal and group > 1:
        at = (piece.sequences, slice(None), piece.rows)
        rows = query[at].to(dtype)
        yield at, rows.reshape(len(rows), kv_heads, -1, rows.shape[3]), key, value
        return
    for number in range(group):
        at = (piece.sequences, slice(number, None, group), piece.rows)
        yield at, query[at].to(dtype), key, value
