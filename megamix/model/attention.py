"""The attention of a transformer's block: of several heads, or of latents."""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megamix.config import LatentSizes, ModelConfig
from megamix.model import sizes
from megamix.model.context import BlockCache, Documents
from megamix.model.decoder import Branch
from megamix.model.layers import Linear, RMSNorm, RotaryTables
from megamix.model.ops import AttentionRule, Ops
from megamix.model.recompute import normed, recomputed


class CausalAttention(Branch):
    """Causal self-attention from the heads on. Heads are (B, T, heads, elements). `query_dim`, `value_dim`: the
    elements of a head's query and value, which attention's kernels may get filled up to `head_dim`.
    """

    def __init__(self, config: ModelConfig, ops: Ops, layer: int, query_dim: int, value_dim: int) -> None:
        super().__init__()
        self.ops, self.head_dim = ops, sizes.head_dim(config)
        self.selective = config.recompute == "selective"
        self.rotates = sizes.rotates(config, layer)
        self.rule = AttentionRule(sizes.window(config, layer), config.attention_softcap or 0.0)
        self.flops = sizes.attention_flops(config, layer, config.num_heads * (query_dim + value_dim))
        # Attention's kernels divide by sqrt(head_dim).
        scale = config.attention_scale
        self.query_factor = math.sqrt(self.head_dim / query_dim) if scale is None else scale * math.sqrt(self.head_dim)

    def rotated(self, heads: Tensor, rotary: RotaryTables | None) -> Tensor:
        """Return heads whose first elements, as many as the tables have, are turned by the tokens' positions."""
        if rotary is None or not self.rotates:
            return heads
        tables = rotary.windowed if self.rule.window and rotary.windowed is not None else rotary
        rotated, rest = heads.tensor_split([2 * tables.cos.shape[-1]], -1)
        rotated = self.ops.rotary(rotated, tables.cos, tables.sin)
        return torch.cat((rotated, rest), -1) if rest.shape[-1] else rotated

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, documents: Documents | None, cache: BlockCache | None
    ) -> Tensor:
        """Return the heads' outputs, like query."""
        if cache is not None:
            key, value = cache.extend(key, value)
        # Attention gets and returns transposed views. Its kernels read and write strided heads, so there are no copies.
        query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))
        return self.ops.attention(query, key, value, documents, self.rule).transpose(1, 2)


class Attention(CausalAttention):
    """Attention with a query of each head; grouped-query attention if there are fewer heads of keys and values."""

    def __init__(self, config: ModelConfig, ops: Ops, layer: int) -> None:
        head_dim = sizes.head_dim(config)
        super().__init__(config, ops, layer, head_dim, head_dim)
        query_size, kv_size = config.num_heads * head_dim, sizes.num_kv_heads(config) * head_dim
        project = partial(Linear, config.hidden_size, bias=sizes.qkv_bias(config), ops=ops, divides="columns")
        std, end_std = config.init_std, sizes.branch_end_std(config)
        self.query, self.key, self.value = (project(size, std=std) for size in (query_size, kv_size, kv_size))
        self.norm_over_all = config.qk_norm == "all"
        norm = partial(_norm, config, ops, within_heads=not self.norm_over_all)
        spans = (query_size, kv_size) if self.norm_over_all else (head_dim, head_dim)
        self.query_norm, self.key_norm = (norm(span) if config.qk_norm != "none" else None for span in spans)
        self.gate = project(query_size, bias=False, std=std) if config.attention_gate else None
        self.out = Linear(query_size, config.hidden_size, config.bias, ops, std=end_std, divides="rows")

    def forward(
        self, x: Tensor, rotary: RotaryTables | None, documents: Documents | None, cache: BlockCache | None
    ) -> Tensor:
        projected_query, projected_key, value = (
            projection(x).unflatten(-1, (-1, self.head_dim)) for projection in (self.query, self.key, self.value)
        )
        again = self.selective and self.query_norm is not None  # without norms autograd does not keep the projections
        place_query = partial(self._place, projected_query, self.query_norm, rotary, self.query_factor)
        place_key = partial(self._place, projected_key, self.key_norm, rotary)
        with recomputed(again, place_query, place_key) as (query, key):
            out = self.attend(query, key, value, documents, cache).flatten(2)
        out = out if self.gate is None else out * self.gate(x).sigmoid()
        projected: Tensor = self.out(out)
        return projected

    def _place(self, heads: Tensor, norm: nn.Module | None, rotary: RotaryTables | None, factor: float = 1.0) -> Tensor:
        if norm is not None:
            heads = norm(heads.flatten(-2)).unflatten(-1, heads.shape[-2:]) if self.norm_over_all else norm(heads)
        return self.rotated(heads if factor == 1 else heads * factor, rotary)


class LatentAttention(CausalAttention):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    A token's keys and values are products of one narrow latent, and its queries may be, too. Rotary positions turn a
    part of each head; all heads share that part of the key. Biases, if there are any, are those of the latents and of
    the output.
    """

    def __init__(self, config: ModelConfig, latent: LatentSizes, ops: Ops, layer: int) -> None:
        super().__init__(config, ops, layer, latent.unrotated_dim + latent.rotary_dim, latent.value_dim)
        self.unrotated_dim, self.value_dim = latent.unrotated_dim, latent.value_dim
        self.query_dim = latent.unrotated_dim + latent.rotary_dim
        heads, query_rank, kv_rank = config.num_heads, latent.query_rank, latent.kv_rank
        # Ranks that divide the heads have the latents whole, and each has a part of their gradients.
        down = partial(Linear, config.hidden_size, bias=config.bias, ops=ops, std=config.init_std, within_heads=True)
        norm = partial(_norm, config, ops, within_heads=True)
        up = partial(Linear, bias=False, ops=ops, std=config.init_std, divides="columns")
        self.query_down = down(query_rank) if query_rank else None
        self.query_norm = norm(query_rank) if query_rank else None
        self.query = up(query_rank or config.hidden_size, heads * self.query_dim)
        self.kv_down, self.kv_norm = down(kv_rank), norm(kv_rank)
        self.key, self.value = up(kv_rank, heads * self.unrotated_dim), up(kv_rank, heads * self.value_dim)
        self.rotated_key = down(latent.rotary_dim)
        end_std = sizes.branch_end_std(config)
        self.out = Linear(heads * self.value_dim, config.hidden_size, config.bias, ops, std=end_std, divides="rows")

    def forward(
        self, x: Tensor, rotary: RotaryTables | None, documents: Documents | None, cache: BlockCache | None
    ) -> Tensor:
        narrow = x if self.query_down is None else self.query_down(x)
        with normed(self.selective, self.query_norm, narrow) as latent:
            query = self.query(latent).unflatten(-1, (-1, self.query_dim))
        with normed(self.selective, self.kv_norm, self.kv_down(x)) as latent:
            key = self.key(latent).unflatten(-1, (-1, self.unrotated_dim))
            value = self.value(latent).unflatten(-1, (-1, self.value_dim))
        unrotated, rotated = query[..., : self.unrotated_dim], query[..., self.unrotated_dim :]
        shared = self.rotated(self.rotated_key(x).unsqueeze(2), rotary).expand(-1, -1, key.shape[2], -1)
        query, key = torch.cat((unrotated, self.rotated(rotated, rotary)), -1), torch.cat((key, shared), -1)
        query = query if self.query_factor == 1 else query * self.query_factor
        query, key, value = (self._padded(heads) for heads in (query, key, value))
        out = self.attend(query, key, value, documents, cache)
        projected: Tensor = self.out(out[..., : self.value_dim].flatten(2))
        return projected

    def _padded(self, heads: Tensor) -> Tensor:
        """Return heads of the one size that the kernels take for queries, keys and values, filled up with zeros."""
        rest = self.head_dim - heads.shape[-1]
        return F.pad(heads, (0, rest)) if rest else heads


def _norm(config: ModelConfig, ops: Ops, size: int, *, within_heads: bool) -> RMSNorm:
    return RMSNorm(size, config.norm_eps, ops, within_heads=within_heads, plus_one=config.norm == "rmsnorm_1p")
