"""The family of GPT-2, Llama, Mistral and Qwen: attention and feed-forward part, by the settings of one section."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from megamix.config import ModelConfig, model_problems
from megamix.model import sizes
from megamix.model.config_json import FORMATS
from megamix.model.context import BlockCache, Documents
from megamix.model.decoder import Branch, Decoder
from megamix.model.layers import Embedding, LayerNorm, Linear, RMSNorm, RotaryTable, RotaryTables
from megamix.model.ops import Ops
from megamix.model.recompute import recomputed


class Attention(Branch):
    """Causal self-attention; grouped-query attention if there are fewer key and value heads than query heads."""

    def __init__(self, config: ModelConfig, ops: Ops, *, rotates: bool) -> None:
        """`rotates`: whether the layer has rotary positions, if the model has."""
        super().__init__()
        self.head_dim, self.ops, self.rotates = sizes.head_dim(config), ops, rotates
        self.selective = config.recompute == "selective"
        query_size, kv_size = config.num_heads * self.head_dim, sizes.num_kv_heads(config) * self.head_dim
        self.flops = 12 * query_size * config.seq_len  # for all positions: the causal half is not subtracted
        project = partial(Linear, config.hidden_size, bias=sizes.qkv_bias(config), ops=ops, divides="columns")
        std, end_std = config.init_std, sizes.branch_end_std(config)
        self.query, self.key, self.value = (project(size, std=std) for size in (query_size, kv_size, kv_size))
        self.norm_over_all = config.qk_norm_over == "all"
        spans = (query_size, kv_size) if self.norm_over_all else (self.head_dim, self.head_dim)
        self.query_norm, self.key_norm = (
            RMSNorm(span, config.norm_eps, ops, within_heads=not self.norm_over_all) if config.qk_norm else None
            for span in spans
        )
        # Attention's kernels divide by sqrt(head_dim).
        self.query_factor = 1.0 if config.attention_scale is None else config.attention_scale * math.sqrt(self.head_dim)
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
            out = self.ops.attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), documents)
        projected: Tensor = self.out(out.transpose(1, 2).flatten(2))
        return projected

    def _place(self, heads: Tensor, norm: nn.Module | None, rotary: RotaryTables | None, factor: float = 1.0) -> Tensor:
        if norm is not None:
            heads = norm(heads.flatten(-2)).unflatten(-1, heads.shape[-2:]) if self.norm_over_all else norm(heads)
        heads = heads if factor == 1 else heads * factor
        return heads if rotary is None or not self.rotates else self.ops.rotary(heads, *rotary)


class FeedForward(Branch):
    """The feed-forward part: down(silu(gate(x)) * up(x)), or down(gelu(up(x))) with the exact GELU or its tanh form."""

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        ffn_hidden_size, self.ops = sizes.ffn_hidden_size(config), ops
        self.selective = config.recompute == "selective"
        size, bias, end_std = config.hidden_size, sizes.mlp_bias(config), sizes.branch_end_std(config)
        widen = partial(Linear, size, ffn_hidden_size, bias, ops, std=config.init_std, divides="columns")
        self.gate = widen() if config.activation == "swiglu" else None
        self.up = widen()
        self.down = Linear(ffn_hidden_size, size, bias, ops, std=end_std, divides="rows")
        self.approximate = "tanh" if config.activation == "gelu_tanh" else "none"

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            activate = partial(self.ops.gelu, self.up(x), self.approximate)
        else:
            activate = partial(self.ops.swiglu, self.gate(x), self.up(x))
        with recomputed(self.selective, activate) as (inner,):
            down: Tensor = self.down(inner)
        return down


class Block(nn.Module):
    """A block: x + attention(norm(x)), then x + feed_forward(norm(x)); or with norms of the parts' outputs. The
    residual stream has the parameters' dtype.
    """

    def __init__(self, config: ModelConfig, ops: Ops, *, rotates: bool = True) -> None:
        super().__init__()
        self.dropout, self.ops, self.scale = config.dropout, ops, config.residual_scale
        self.selective = config.recompute == "selective"
        before, after = config.norm_place != "after", config.norm_place != "before"
        self.attention_norm = _norm(config, ops) if before else None
        self.attention = Attention(config, ops, rotates=rotates)
        self.attention_end_norm = _norm(config, ops) if after else None
        self.feed_forward_norm = _norm(config, ops) if before else None
        self.feed_forward = FeedForward(config, ops)
        self.feed_forward_end_norm = _norm(config, ops) if after else None

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


def _norm(config: ModelConfig, ops: Ops) -> nn.Module:
    if config.norm == "rmsnorm":
        return RMSNorm(config.hidden_size, config.norm_eps, ops)
    return LayerNorm(config.hidden_size, config.norm_eps, config.bias, ops)


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
        self.head.scale = 1 / config.logit_divisor

    def block(self, config: ModelConfig, layer: int) -> Block:
        return Block(config, self.ops, rotates=layer not in config.unrotated_layers)

    @classmethod
    def kind(cls, config: ModelConfig, layer: int) -> bool:
        return layer in config.unrotated_layers

    def token_embedding(self) -> Embedding:
        table = super().token_embedding()
        table.scale = self.config.embedding_scale
        return table

    def positions(self) -> tuple[Embedding | None, RotaryTable | None]:
        config = self.config
        if config.position == "learned":
            return Embedding(config.seq_len, config.hidden_size, self.ops, std=config.init_std), None
        return None, RotaryTable(config.seq_len, sizes.head_dim(config), config.rope_theta, config.rope_scaling)

    def head_dim(self) -> int:
        return sizes.head_dim(self.config)

    def last_norm(self) -> nn.Module:
        return _norm(self.config, self.ops)

    @classmethod
    def effective(cls, config: ModelConfig) -> dict[str, Any]:
        return sizes.effective(config)

    @classmethod
    def table_bytes(cls, config: ModelConfig) -> int:
        return 4 * config.seq_len * sizes.head_dim(config) if config.position == "rotary" else 0
