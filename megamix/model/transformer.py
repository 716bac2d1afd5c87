"""The family of GPT-2, Llama, Gemma and their relatives: blocks by the settings of one section."""

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from megamix.config import ModelConfig, model_problems
from megamix.model import sizes
from megamix.model.attention import Attention, LatentAttention
from megamix.model.config_json import FORMATS
from megamix.model.context import BlockCache, Documents
from megamix.model.decoder import Branch, Decoder
from megamix.model.layers import Embedding, LayerNorm, Linear, RMSNorm, RotaryTable, RotaryTables, TwoRotaryTables
from megamix.model.ops import Ops
from megamix.model.recompute import normed, recomputed


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
        self.attention = LatentAttention(config, latent, ops, layer) if latent else Attention(config, ops, layer)
        self.attention_end_norm = _stream_norm(config, ops) if after else None
        self.feed_forward_norm = _stream_norm(config, ops) if before else None
        self.feed_forward = FeedForward(config, ops)
        self.feed_forward_end_norm = _stream_norm(config, ops) if after else None

    def forward(
        self, x: Tensor, rotary: RotaryTables | None, documents: Documents | None, cache: BlockCache | None
    ) -> Tensor:
        with normed(self.selective, self.attention_norm, x) as hidden:
            x = x + self._end(self.attention(hidden, rotary, documents, cache), self.attention_end_norm)
        with normed(self.selective, self.feed_forward_norm, x) as hidden:
            return x + self._end(self.feed_forward(hidden), self.feed_forward_end_norm)

    def _end(self, branch: Tensor, norm: nn.Module | None) -> Tensor:
        """Return what is added to the residual stream."""
        branch = branch if norm is None else norm(branch)
        branch = branch if self.scale == 1 else branch * self.scale
        return self.ops.dropout(branch, self.dropout) if self.dropout and self.training else branch


def _stream_norm(config: ModelConfig, ops: Ops) -> nn.Module:
    if config.norm == "layernorm":
        return LayerNorm(config.hidden_size, config.norm_eps, config.bias, ops)
    return RMSNorm(config.hidden_size, config.norm_eps, ops, plus_one=config.norm == "rmsnorm_1p")


class Transformer(Decoder):
    """The family of GPT-2, Llama, Gemma and their relatives, which are settings of one section."""

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
            return None, TwoRotaryTables([table, RotaryTable(*size, config.window_rope_theta)])
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
