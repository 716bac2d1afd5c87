"""The operations of a block: torch's own, or those of wide.py for half tensors on a CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megamix.base.machine import native_halves, torch_version
from megamix.base.values import has_values
from megamix.model import wide
from megamix.model.context import Documents
from megamix.model.wide import aten

_VARLEN_KNOWS_GROUPS = torch_version() >= (2, 12)


@functools.cache
def _flash_takes_borders(device: torch.device) -> bool:
    """Return whether torch has FlashAttention's kernels for documents."""
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device) >= (8, 0)


def takes_borders(x: Tensor, head_dim: int) -> bool:
    """Return whether attention on hidden states like x takes documents as borders instead of a mask: on a GPU, in half.
    A meta tensor stands for a GPU's.
    """
    fits = x.dtype in (torch.float16, torch.bfloat16) and head_dim % 8 == 0 and 0 < head_dim <= 256
    return fits and (x.is_meta or (x.is_cuda and _flash_takes_borders(x.device)))


def host_counts(counts: Tensor, total: int) -> list[int]:
    """Return counts as numbers; on a GPU the host waits for them. Without values, as in a memory plan, they are the
    equal parts of `total`.
    """
    if has_values(counts):
        numbers: list[int] = counts.tolist()
        return numbers
    share, rest = divmod(total, len(counts))
    return [share + (number < rest) for number in range(len(counts))]


class Groups(NamedTuple):
    """The sizes of groups of rows, in the form in which products of groups need them."""

    ends: Tensor | None  # INT32 (groups,): a GPU's kernel reads them, and the host none
    counts: list[int]  # numbers of rows, if there are no ends
    places: Tensor | None  # INT64 (rows,): of rows among groups padded to the largest; None: no padding


# Padding that a GPU computes in place of a loop over groups, with its launches for each. More would take more memory
# than a step of even groups has.
MAX_PADDED = 2  # times the rows


def padded_places(counts: Tensor, most: int, num_rows: int) -> Tensor:
    """Return where rows lie among groups padded to `most` rows, INT64 (rows,). Shapes: counts INT64 (groups,)."""
    ends, rows = counts.cumsum(0), torch.arange(num_rows, device=counts.device)
    group = torch.searchsorted(ends, rows, right=True)
    return rows + (group * most - (ends - counts)[group])


class Segments(NamedTuple):
    """Borders of segments of queries and of keys, INT32 (segments + 1,) each, among those of all sequences."""

    queries: Tensor
    keys: Tensor


class Segmented(NamedTuple):
    """Attention by segments, and what its backward needs."""

    out: Tensor  # as the queries
    logsumexp: Tensor  # FP32 (heads, queries)
    rng_state: Tensor


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """The rule of a layer's causal attention. `window`: the keys that a query sees, its own included (Beltagy et al.
    2020, Longformer, section 3.1); 0 for all. `softcap`: scores become softcap * tanh(score / softcap); 0 for none.
    """

    window: int = 0
    softcap: float = 0.0


SEES_ALL = AttentionRule()
Product = Callable[["Ops", Tensor, Tensor, Tensor | None], Tensor]
LookUp = Callable[["Ops", Tensor, Tensor], Tensor]
Attend = Callable[["Ops", Tensor, Tensor, Tensor, Any, AttentionRule], Tensor]
Keep = Callable[["Ops", Tensor, float], Tensor]
OverSequence = Callable[["Ops", Tensor], Tensor]


@dataclass(frozen=True)
class Ops:
    """The operations that modules call in place of torch.nn.functional.

    With `wide`, a CPU stores half tensors in half and computes every operation in FP32. In a dtype of `native` it
    computes only those in FP32 that would otherwise sum or keep statistics in half (embedding, norms). `wide=False`
    computes as torch does; FP32 tensors and tensors on a GPU are always computed so.

    The fields below replace an operation. Each is called with the Ops first, whose `whole_...` method is the operation
    of one process, and may call the function that it replaces. So several ways to divide or to round an operation
    compose, in any order, and with a subclass's own fields: `dataclasses.replace(ops, product=...)`.
    """

    wide: bool = True
    native: frozenset[torch.dtype] = field(default_factory=native_halves)
    product: Product = lambda ops, x, weight, bias: ops.whole_linear(x, weight, bias)
    look_up: LookUp = lambda ops, tokens, weight: ops.whole_embedding(tokens, weight)
    attend: Attend = lambda ops, *inputs: ops.whole_attention(*inputs)
    keep: Keep = lambda ops, x, share: ops.whole_keep(x, share)
    # Counts of whole sequences, INT64 (B, experts), from those of the positions that are here.
    over_sequence: OverSequence = lambda ops, counts: counts

    def _sums_wide(self, x: Tensor) -> bool:
        return self.wide and x.device.type == "cpu" and x.dtype in (torch.float16, torch.bfloat16)

    def _computes_wide(self, x: Tensor) -> bool:
        return self._sums_wide(x) and x.dtype not in self.native

    def compute_dtype(self, x: Tensor) -> torch.dtype:
        """Return the dtype in which operations on x compute."""
        return torch.float32 if self._computes_wide(x) else x.dtype

    def embedding(self, tokens: Tensor, weight: Tensor) -> Tensor:
        return self.look_up(self, tokens, weight)

    def whole_embedding(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """Return the rows of a whole table. On a CPU torch sums gradients in half: 2000 times 0.3 makes 128 in BF16."""
        if self._sums_wide(weight):
            return wide.embedding(tokens, weight)
        return F.embedding(tokens, weight)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.product(self, x, weight, bias)

    def whole_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self._computes_wide(weight):
            return wide.apply(wide.WideLinear, x, weight, bias)
        return F.linear(x, weight, bias)

    def scores(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the products of x (..., in) and weight (out, in) in FP32; FP64 stays. Half tensors stay half until
        then.
        """
        if x.dtype in (torch.float16, torch.bfloat16):
            return wide.apply(wide.WideScores, x, weight)
        return F.linear(x, weight)

    def groups(self, x: Tensor, counts: Tensor, *sizes: int) -> Groups:
        """Return the groups of rows x (rows, ...) for products of matrices with these sizes. Shapes: counts INT64
        (groups,).

        On a GPU torch's kernel takes BF16, with rows that begin at multiples of 16 bytes; for all else the host waits
        for the counts, once for all products of the groups. A meta tensor stands for a GPU's.
        """
        if not x.is_cpu and x.dtype == torch.bfloat16 and all(size % 8 == 0 for size in sizes):
            return Groups(counts.cumsum(0).int(), [], None)
        numbers = host_counts(counts, len(x))
        most = max(numbers)
        if x.is_cpu or sum(numbers) != len(x) or len(numbers) * most > MAX_PADDED * len(x):
            return Groups(None, numbers, None)
        return Groups(None, numbers, padded_places(counts, most, len(x)))

    def grouped_linear(self, x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
        """Return the product of each row with its group's matrix.

        Shapes: x (rows, in) sorted by group, weight (groups, out, in) -> (rows, out).
        """
        if groups.ends is not None:
            return torch._grouped_mm(x, weight.mT, offs=groups.ends)
        if groups.places is not None:
            return wide.apply(wide.PaddedLinear, x, weight, groups.places, max(groups.counts))
        return wide.apply(wide.GroupedLinear, x, weight, groups.counts, self.compute_dtype(x))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if self._sums_wide(x):
            return wide.apply(wide.WideRMSNorm, x, weight, eps)
        return F.rms_norm(x, weight.shape, weight, eps)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        if self._sums_wide(x):
            return wide.apply(wide.WideLayerNorm, x, weight, bias, eps)
        return F.layer_norm(x, weight.shape, weight, bias, eps)

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        return wide.apply(wide.SwiGLU, gate, up, self.compute_dtype(gate))

    def dropout(self, x: Tensor, share: float) -> Tensor:
        """Zero a share of the elements, drawn by torch's generator, and divide the others by 1 - share.

        torch's own dropout is not used: on a CPU it rounds 1 / (1 - share) to half first, so that every element would
        be off in the same direction.
        """
        return torch.where(self.keep(self, x, share), x * (1 / (1 - share)), 0.0)

    def whole_keep(self, x: Tensor, share: float) -> Tensor:
        """Draw which elements of x dropout keeps: BOOL, like x."""
        return torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - share)

    def gelu(self, x: Tensor, approximate: str = "none") -> Tensor:
        """Return the exact GELU; with approximate="tanh" the tanh form of Hendrycks and Gimpel (2016)."""
        if self._computes_wide(x):
            return wide.apply(wide.GELU, x, approximate)
        return F.gelu(x, approximate=approximate)

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the pairs (i, i + rotary_dim / 2) of x (B, T, heads, rotary_dim).

        cos and sin: FP32 (T, rotary_dim / 2), or (B, T, rotary_dim / 2) if positions differ between samples.
        """
        if self._computes_wide(x):
            return wide.rotary(x, cos, sin)
        first, second = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, -1)  # FP64 stays, for `verify`
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: Documents | None = None,
        rule: AttentionRule = SEES_ALL,
    ) -> Tensor:
        """Return causal attention within each document.

        Shapes: query (B, heads, T, head_dim), key and value (B, kv_heads, T, head_dim) -> like query.
        """
        return self.attend(self, query, key, value, documents, rule)

    def whole_attention(
        self, query: Tensor, key: Tensor, value: Tensor, documents: Documents | None, rule: AttentionRule
    ) -> Tensor:
        """Return attention whose keys are all here."""
        if documents is not None and documents.lengths:
            return self._attention_by_document(query, key, value, documents.lengths, rule)
        if documents is not None and documents.borders is not None:
            return self._by_borders(query, key, value, documents.borders, rule)
        mask = None if documents is None else documents.mask
        if rule.softcap or 0 < rule.window < key.shape[2]:
            mask = _within(rule.window, mask, query, key)
        if rule.softcap and mask is not None:
            return wide.apply(wide.CappedAttention, query, key, value, mask, rule.softcap)
        if self._computes_wide(query):
            return wide.attention(query, key, value, mask)
        group = query.shape[1] // key.shape[1]
        if group > 1 and (query.dtype == torch.float32 or mask is not None):
            # A GPU's only fused kernel for FP32 or masks knows no groups: with enable_gqa torch would make all scores.
            key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None, enable_gqa=grouped)

    def _attention_by_document(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], rule: AttentionRule
    ) -> Tensor:
        batch, _, num_positions, _ = query.shape
        # Each piece is (tokens of a document, heads, head_dim).
        pieces = (torch.split(x.transpose(1, 2).flatten(0, 1), [*lengths]) for x in (query, key, value))
        outs = []
        for document in zip(*pieces, strict=True):
            query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in document)
            outs.append(self.whole_attention(query, key, value, None, rule).squeeze(0).transpose(0, 1))
        return torch.cat(outs).view(batch, num_positions, *outs[0].shape[1:]).transpose(1, 2)

    def _by_borders(self, query: Tensor, key: Tensor, value: Tensor, borders: Tensor, rule: AttentionRule) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn  # imported late: it imports some of the compiler

        batch, num_heads, num_positions, _ = query.shape
        group, more = num_heads // key.shape[1], {"enable_gqa": True} if _VARLEN_KNOWS_GROUPS else {}
        if group > 1 and not more:
            key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
        flat = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        # Pass T as the longest document's length: to know the real one, the host would wait for the device.
        attend: Callable[..., Any] = varlen_attn  # for mypy: it returns one tensor, or two if asked for more
        longest = num_positions, num_positions
        out: Tensor = attend(*flat, borders, borders, *longest, window_size=(rule.window - 1, 0), **more)  # -1: all
        return out.view(batch, num_positions, *out.shape[1:]).transpose(1, 2)

    def segments(self, query: Tensor, key: Tensor, value: Tensor, borders: Segments, window: int) -> Segmented:
        """Return attention by segments: each query sees its segment's keys up to its own place, counted from the
        segment's end; with a window only the last ones. A segment may have fewer queries than keys, or none. No
        autograd: see `segments_backward`.

        Shapes: query half (queries, heads, head_dim), key and value (keys, kv_heads, head_dim).
        """
        longest = len(query), len(key)
        inputs = query, key, value, borders.queries, borders.keys, *longest
        out, logsumexp, rng_state, *_ = aten._flash_attention_forward(*inputs, 0.0, True, False, **_sides(window))
        return Segmented(out, logsumexp, rng_state)

    def segments_backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, found: Segmented, borders: Segments, window: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value; `found`: the result of `segments`. All keys must be in a
        segment, or their gradients are unset.
        """
        longest, unused = (len(query), len(key)), query.new_empty(0)
        inputs = grad, query, key, value, found.out, found.logsumexp, borders.queries, borders.keys, *longest
        grads: tuple[Tensor, Tensor, Tensor] = aten._flash_attention_backward(
            *inputs, 0.0, True, found.rng_state, unused, **_sides(window)
        )
        return grads


def change_ops(modules: Iterable[nn.Module], change: Callable[[Ops], Ops]) -> None:
    """Give the modules that have operations changed ones. Modules that share theirs share the new ones."""
    changed = dict[Ops, Ops]()
    for module in modules:
        if isinstance(ops := getattr(module, "ops", None), Ops):
            changed[ops] = changed.get(ops) or change(ops)
            module.ops = changed[ops]  # type: ignore[assignment]  # nn.Module's attributes are tensors or modules to mypy


def _sides(window: int) -> dict[str, int]:
    """Return how many keys a query sees before and behind its own, for FlashAttention; -1 for all."""
    return {"window_size_left": window - 1, "window_size_right": 0}


def _within(window: int, mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
    """Return what of a mask is within the window, if there is one. Without a mask the last query sees the last key."""
    if mask is not None and not window:
        return mask
    behind = key.shape[2] - query.shape[2]
    seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril(behind)
    seen = seen.triu(behind - window + 1) if window else seen
    return seen if mask is None else mask & seen
