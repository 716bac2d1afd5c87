"""The family of GPT-2, Llama, Mistral and Qwen: attention and feed-forward part, by the settings of one section."""

import math
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megamix.config import ModelConfig, model_problems
from megamix.model import sizes
from megamix.model.config_json import FORMATS
from megamix.model.context import BlockCache, Documents
from megamix.model.decoder import Branch, Decoder
from megamix.model.latent_attention import LatentAttention
from megamix.model.layers import Embedding, LayerNorm, Linear, RMSNorm, RotaryTable, RotaryTables, TwoRotaryTables
from megamix.model.ops import AttentionRule, Ops
from megamix.model.recompute import recomputed


class Attention(Branch):
    """Causal self-attention; grouped-query attention if there are fewer key and value heads than query heads."""

    def __init__(self, config: ModelConfig, ops: Ops, layer: int) -> None:
        super().__init__()
        self.head_dim, self.ops = sizes.head_dim(config), ops
        self.rotates = layer not in config.unrotated_layers  # if the model has rotary positions
        self.rule = AttentionRule(sizes.window(config, layer), config.attention_softcap or 0.0)
        self.selective = config.recompute == "selective"
        query_size, kv_size = config.num_heads * self.head_dim, sizes.num_kv_heads(config) * self.head_dim
        self.flops = sizes.attention_flops(config, layer, 2 * query_size)
        project = partial(Linear, config.hidden_size, bias=sizes.qkv_bias(config), ops=ops, divides="columns")
        std, end_std = config.init_std, sizes.branch_end_std(config)
        self.query, self.key, self.value = (project(size, std=std) for size in (query_size, kv_size, kv_size))
        self.norm_over_all = config.qk_norm_over == "all"
        spans = (query_size, kv_size) if self.norm_over_all else (self.head_dim, self.head_dim)
        self.query_norm, self.key_norm = (
            _norm(config, ops, span, within_heads=not self.norm_over_all) if config.qk_norm else None for span in spans
        )
        # Attention's kernels divide by sqrt(head_dim).
        self.query_factor = 1.0 if config.attention_scale is None else config.attention_scale * math.sqrt(self.head_dim)
        self.gate = project(query_size, bias=False, std=std) if config.attention_gate else None
        self.out = Linear(query_size, config.hidden_size, config.bias, ops, std=end_std, divides="rows")

    def forward(
        self, x: Tensor, rotary: RotaryTables | None, documents: Documents | None, cache: BlockCache | None
    ) -> Tensor:
        projected_query, projected_key, value = (  # (B, T, heads, head_dim)
            projection(x).unflatten(-1, (-1, self.head_dim)) for projection in (self.query, self.key, self.value)
        )
        again = self.selective and self.query_norm is not None  # without norms autograd does not keep the projections
        place_query = partial(self._place, projected_query, self.query_norm, rotary, self.query_factor)
        place_key = partial(self._place, projected_key, self.key_norm, rotary)
        with recomputed(again, place_query, place_key) as (query, key):
            if cache is not None:
                key, value = cache.extend(key, value)
            # Attention gets and returns transposed views. Its kernels read and write strided heads, so there are no
            # copies.
            query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))
            out = self.ops.attention(query, key, value, documents, self.rule).transpose(1, 2).flatten(2)
        out = out if self.gate is None else out * self.gate(x).sigmoid()
        projected: Tensor = self.out(out)
        return projected

    def _place(self, heads: Tensor, norm: nn.Module | None, rotary: RotaryTables | None, factor: float = 1.0) -> Tensor:
        if norm is not None:
            heads = norm(heads.flatten(-2)).unflatten(-1, heads.shape[-2:]) if self.norm_over_all else norm(heads)
        heads = heads if factor == 1 else heads * factor
        if rotary is None or not self.rotates:
            return heads
        cos, sin = rotary[-2:] if self.rule.window else rotary[:2]
        rotated, rest = heads.tensor_split([2 * cos.shape[-1]], -1)
        rotated = self.ops.rotary(rotated, cos, sin)
        return torch.cat((rotated, rest), -1) if rest.shape[-1] else rotated


class FeedForward(Branch):
    """The feed-forward part: down(f(gate(x)) * up(x)) with SiLU or GELU, or down(f(up(x))) with the exact GELU, its
    tanh form, or relu(x)^2 (So et al. 2021, Primer).
    """

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        ffn_hidden_size, self.ops = sizes.ffn_hidden_size(config), ops
        self.selective = config.recompute == "selective"
        size, bias, end_std = config.hidden_size, sizes.mlp_bias(config), sizes.branch_end_std(config)
        widen = partial(Linear, size, ffn_hidden_size, bias, ops, std=config.init_std, divides="columns")
        self.gate = widen() if sizes.is_gated(config.activation) else None
        self.up = widen()
        self.down = Linear(ffn_hidden_size, size, bias, ops, std=end_std, divides="rows")
        self.activation = config.activation

    def forward(self, x: Tensor) -> Tensor:
        widened = [self.up(x)] if self.gate is None else [self.gate(x), self.up(x)]
        activate = partial(self._activate, *widened)
        with recomputed(self.selective, activate) as (inner,):
            down: Tensor = self.down(inner)
        return down

    def _activate(self, x: Tensor, *up: Tensor) -> Tensor:
        match self.activation:
            case "swiglu":
                return self.ops.swiglu(x, *up)
            case "geglu":
                return self.ops.gelu(x, "tanh") * up[0]
            case "relu2":
                return x.relu().square()
            case "gelu_tanh":
                return self.ops.gelu(x, "tanh")
        return self.ops.gelu(x)


class Block(nn.Module):
    """A block: x + attention(norm(x)), then x + feed_forward(norm(x)); or with norms of the parts' outputs. The
    residual stream has the parameters' dtype.
    """

    def __init__(self, config: ModelConfig, ops: Ops, layer: int) -> None:
        super().__init__()
        self.dropout, self.ops, self.scale = config.dropout, ops, config.residual_scale
        self.selective = config.recompute == "selective"
        before, after = config.norm_place != "after", config.norm_place != "before"
        self.attention_norm = _stream_norm(config, ops) if before else None
        latent = config.latent_attention
        self.attention: Branch = (
            LatentAttention(config, latent, ops, layer) if latent else Attention(config, ops, layer)
        )
        self.attention_end_norm = _stream_norm(config, ops) if after else None
        self.feed_forward_norm = _stream_norm(config, ops) if before else None
        self.feed_forward = FeedForward(config, ops)
        self.feed_forward_end_norm = _stream_norm(config, ops) if after else None

    def forward(
        self, x: Tensor, rotary: RotaryTables | None, documents: Documents | None, cache: BlockCache | None
    ) -> Tensor:
        with self._normed(self.attention_norm, x) as normed:
            x = x + self._end(self.attention(normed, rotary, documents, cache), self.attention_end_norm)
        with self._normed(self.feed_forward_norm, x) as normed:
            return x + self._end(self.feed_forward(normed), self.feed_forward_end_norm)

    @contextmanager
    def _normed(self, norm: nn.Module | None, x: Tensor) -> Iterator[Tensor]:
        """Yield x behind a norm, which backward computes again if the block is recomputed selectively."""
        if norm is None:
            yield x
            return
        with recomputed(self.selective, partial(norm, x)) as (normed,):
            yield normed

    def _end(self, branch: Tensor, norm: nn.Module | None) -> Tensor:
        """Return what is added to the residual stream."""
        branch = branch if norm is None else norm(branch)
        branch = branch if self.scale == 1 else branch * self.scale
        return self.ops.dropout(branch, self.dropout) if self.dropout and self.training else branch


def _norm(config: ModelConfig, ops: Ops, size: int, *, within_heads: bool = False) -> RMSNorm:
    return RMSNorm(size, config.norm_eps, ops, plus_one=config.norm == "rmsnorm_1p", within_heads=within_heads)


def _stream_norm(config: ModelConfig, ops: Ops) -> nn.Module:
    if config.norm == "layernorm":
        return LayerNorm(config.hidden_size, config.norm_eps, config.bias, ops)
    return _norm(config, ops, config.hidden_size)


class Transformer(Decoder):
    """The family of GPT-2, Llama, Mistral and Qwen, which are settings of one section."""

    name, section, formats = "transformer", ModelConfig, FORMATS

    def __init__(self, config: ModelConfig, ops: Ops | None = None, like: Sequence[int] | None = None) -> None:
        """Build the model. Raises: ValueError if the sizes do not go together. This is for a section that a program has
        made; a configuration file has been checked before.
        """
        for problem in model_problems(config):
            raise ValueError(problem)
        super().__init__(config, ops, like)
        self.windowed = any(config.windows)
        self.head.scale, self.head.softcap = 1 / config.logit_divisor, config.logit_softcap

    def block(self, config: ModelConfig, layer: int) -> Block:
        return Block(config, self.ops, layer)

    @classmethod
    def kind(cls, config: ModelConfig, layer: int) -> Hashable:
        return layer in config.unrotated_layers, sizes.window(config, layer)

    def token_embedding(self) -> Embedding:
        table = super().token_embedding()
        table.scale = self.config.embedding_scale
        return table

    def positions(self) -> tuple[Embedding | None, RotaryTable | TwoRotaryTables | None]:
        config = self.config
        if config.position == "learned":
            return Embedding(config.seq_len, config.hidden_size, self.ops, std=config.init_std), None
        size = config.seq_len, sizes.rotary_dim(config)
        table = RotaryTable(*size, config.rope_theta, config.rope_scaling)
        if config.window_rope_theta is not None:
            return None, TwoRotaryTables(table, RotaryTable(*size, config.window_rope_theta))
        return None, table

    def head_dim(self) -> int:
        return sizes.head_dim(self.config)

    def takes_borders(self, x: Tensor) -> bool:
        return self.config.attention_softcap is None and super().takes_borders(x)

    def last_norm(self) -> nn.Module:
        return _stream_norm(self.config, self.ops)

    @classmethod
    def effective(cls, config: ModelConfig) -> dict[str, Any]:
        return sizes.effective(config)

    @classmethod
    def table_bytes(cls, config: ModelConfig) -> int:
        tables = (config.position == "rotary") * (1 if config.window_rope_theta is None else 2)
        return 4 * config.seq_len * sizes.rotary_dim(config) * tables
