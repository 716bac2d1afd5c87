"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

A token's keys and values are products of one narrow latent, and its queries may be, too. Rotary positions turn a part
of each head; all heads share that part of the key.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
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
from megamix.model.recompute import recomputed


class LatentAttention(Branch):
    """Causal self-attention by latents. Biases, if there are any, are those of the latents and of the output."""

    def __init__(self, config: ModelConfig, latent: LatentSizes, ops: Ops, layer: int) -> None:
        super().__init__()
        self.ops, self.selective = ops, config.recompute == "selective"
        self.rotates = layer not in config.unrotated_layers  # if the model has rotary positions
        self.rule = AttentionRule(sizes.window(config, layer), config.attention_softcap or 0.0)
        self.unrotated_dim, self.value_dim = latent.unrotated_dim, latent.value_dim
        self.query_dim, self.head_dim = latent.unrotated_dim + latent.rotary_dim, sizes.head_dim(config)
        heads, query_rank, kv_rank = config.num_heads, latent.query_rank, latent.kv_rank
        self.flops = sizes.attention_flops(config, layer, heads * (self.query_dim + self.value_dim))
        # Ranks that divide the heads have the latents whole, and each has a part of their gradients.
        down = partial(Linear, config.hidden_size, bias=config.bias, ops=ops, std=config.init_std, within_heads=True)
        plus_one = config.norm == "rmsnorm_1p"
        norm = partial(RMSNorm, eps=config.norm_eps, ops=ops, within_heads=True, plus_one=plus_one)
        up = partial(Linear, bias=False, ops=ops, std=config.init_std, divides="columns")
        self.query_down = down(query_rank) if query_rank else None
        self.query_norm = norm(query_rank) if query_rank else None
        self.query = up(query_rank or config.hidden_size, heads * self.query_dim)
        self.kv_down, self.kv_norm = down(kv_rank), norm(kv_rank)
        self.key, self.value = up(kv_rank, heads * self.unrotated_dim), up(kv_rank, heads * self.value_dim)
        self.rotated_key = down(latent.rotary_dim)
        # Attention's kernels divide by sqrt(head_dim).
        self.query_factor = math.sqrt(self.head_dim / self.query_dim)
        if config.attention_scale is not None:
            self.query_factor = config.attention_scale * math.sqrt(self.head_dim)
        end_std = sizes.branch_end_std(config)
        self.out = Linear(heads * self.value_dim, config.hidden_size, config.bias, ops, std=end_std, divides="rows")

    def forward(
        self, x: Tensor, rotary: RotaryTables | None, documents: Documents | None, cache: BlockCache | None
    ) -> Tensor:
        with self._latent(x, self.query_down, self.query_norm) as latent:
            query = self.query(latent).unflatten(-1, (-1, self.query_dim))  # (B, T, heads, query_dim)
        with self._latent(x, self.kv_down, self.kv_norm) as latent:
            key = self.key(latent).unflatten(-1, (-1, self.unrotated_dim))
            value = self.value(latent).unflatten(-1, (-1, self.value_dim))
        unrotated, rotated = query[..., : self.unrotated_dim], query[..., self.unrotated_dim :]
        shared = self._rotated(self.rotated_key(x).unsqueeze(2), rotary).expand(-1, -1, key.shape[2], -1)
        query, key = torch.cat((unrotated, self._rotated(rotated, rotary)), -1), torch.cat((key, shared), -1)
        query = query if self.query_factor == 1 else query * self.query_factor
        query, key, value = (self._padded(heads) for heads in (query, key, value))
        if cache is not None:
            key, value = cache.extend(key, value)
        query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))
        out = self.ops.attention(query, key, value, documents, self.rule).transpose(1, 2)
        projected: Tensor = self.out(out[..., : self.value_dim].flatten(2))
        return projected

    @contextmanager
    def _latent(self, x: Tensor, down: nn.Module | None, norm: nn.Module | None) -> Iterator[Tensor]:
        """Yield the normed latent of x, which backward computes again if the block is recomputed selectively; without a
        latent, yield x.
        """
        if down is None or norm is None:
            yield x
            return
        with recomputed(self.selective, partial(norm, down(x))) as (latent,):
            yield latent

    def _rotated(self, heads: Tensor, rotary: RotaryTables | None) -> Tensor:
        if rotary is None or not self.rotates:
            return heads
        return self.ops.rotary(heads, *(rotary[-2:] if self.rule.window else rotary[:2]))

    def _padded(self, heads: Tensor) -> Tensor:
        """Return heads of the one size that the kernels take for queries, keys and values, filled up with zeros."""
        rest = self.head_dim - heads.shape[-1]
        return F.pad(heads, (0, rest)) if rest else heads
