"""The family of GPT-2, Llama, Gemma and their relatives: blocks by the settings of one section."""

from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor, nn

from megamix.config import ModelConfig, model_problems
from megamix.model import sizes
from megamix.model.attention import Attention, LatentAttention
from megamix.model.config_json import FORMATS
from megamix.model.context import BlockCache, Documents
from megamix.model.decoder import Decoder
from megamix.model.experts import Experts
from megamix.model.feed_forward import FeedForward
from megamix.model.layers import NORMS, Embedding, RotaryTable, RotaryTables, TwoRotaryTables
from megamix.model.ops import Ops
from megamix.model.recompute import normed


class Block(nn.Module):
    """A block: x + attention(norm(x)), then x + feed_forward(norm(x)); or with norms of the parts' outputs. The
    residual stream has the parameters' dtype.
    """

    def __init__(self, config: ModelConfig, ops: Ops, layer: int) -> None:
        super().__init__()
        self.dropout, self.ops, self.scale = config.dropout, ops, config.residual_scale
        self.selective = config.recompute == "selective"
        before, after = config.norm_place != "after", config.norm_place != "before"
        norm = NORMS[config.norm]
        self.attention_norm = norm(config, ops) if before else None
        latent = config.latent_attention
        self.attention = LatentAttention(config, latent, ops, layer) if latent else Attention(config, ops, layer)
        self.attention_end_norm = norm(config, ops) if after else None
        self.feed_forward_norm = norm(config, ops) if before else None
        experts = sizes.experts(config, layer)
        inner = sizes.ffn_hidden_size(config)
        self.feed_forward = Experts(config, experts, ops) if experts else FeedForward(config, ops, inner)
        self.feed_forward_end_norm = norm(config, ops) if after else None

    def forward(
        self, x: Tensor, rotary: RotaryTables | None, documents: Documents | None, cache: BlockCache | None
    ) -> Tensor:
        # The compiler ends a graph before experts. Without this look at their class it would also take that graph for a
        # block without experts, when backward repeats one: other tensors would be kept.
        assert isinstance(self.feed_forward, nn.Module)
        with normed(self.selective, self.attention_norm, x) as hidden:
            x = x + self._end(self.attention(hidden, rotary, documents, cache), self.attention_end_norm)
        with normed(self.selective, self.feed_forward_norm, x) as hidden:
            return x + self._end(self.feed_forward(hidden), self.feed_forward_end_norm)

    def _end(self, branch: Tensor, norm: nn.Module | None) -> Tensor:
        """Return what is added to the residual stream."""
        branch = branch if norm is None else norm(branch)
        branch = branch if self.scale == 1 else branch * self.scale
        return self.ops.dropout(branch, self.dropout) if self.dropout and self.training else branch


class Transformer(Decoder):
    """The family of GPT-2, Llama, Gemma and their relatives, which are settings of one section."""

    name, section, formats = "transformer", ModelConfig, FORMATS
    tables = (*Decoder.tables, "*.router.weight")

    def __init__(self, config: ModelConfig, ops: Ops | None = None, like: Sequence[int] | None = None) -> None:
        """Build the model. Raises: ValueError if the sizes do not go together. This is for a section that a program has
        made; a configuration file has been checked before.
        """
        for problem in model_problems(config):
            raise ValueError(problem)
        super().__init__(config, ops, like)
        self.windowed = sizes.has_windows(config)
        self.head.scale, self.head.softcap = 1 / config.logit_divisor, config.logit_softcap

    def block(self, config: ModelConfig, layer: int) -> Block:
        return Block(config, self.ops, layer)

    @classmethod
    def kind(cls, config: ModelConfig, layer: int) -> Hashable:
        return sizes.rotates(config, layer), sizes.window(config, layer), sizes.experts(config, layer) is None

    def token_embedding(self) -> Embedding:
        table = super().token_embedding()
        table.scale = self.config.embedding_scale
        return table

    def positions(self) -> tuple[Embedding | None, RotaryTable | TwoRotaryTables | None]:
        config, rope, window = self.config, self.config.rope, self.config.window
        if rope is None:
            return Embedding(config.seq_len, config.hidden_size, self.ops, std=config.init_std), None
        size = config.seq_len, sizes.rotary_dim(config)
        table = RotaryTable(*size, rope.theta, rope.scaling)
        if window is not None and window.rope_theta is not None:
            return None, TwoRotaryTables([table, RotaryTable(*size, window.rope_theta)])
        return None, table

    def head_dim(self) -> int:
        return sizes.head_dim(self.config)

    def takes_borders(self, x: Tensor) -> bool:
        return self.config.attention_softcap is None and super().takes_borders(x)

    def last_norm(self) -> nn.Module:
        return NORMS[self.config.norm](self.config, self.ops)

    @classmethod
    def effective(cls, config: ModelConfig) -> dict[str, Any]:
        return sizes.effective(config)
