"""A decoder-only transformer as a plain module: tokens in, logits or loss out."""

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megamix.config import ModelConfig, model_problems
from megamix.model import sizes
from megamix.model.context import BlockCache, Documents, KeyValueCache, find_documents
from megamix.model.cross_entropy import linear_cross_entropy, slopes
from megamix.model.layers import Embedding, LayerNorm, Linear, RMSNorm, RotaryTable, RotaryTables
from megamix.model.ops import Ops
from megamix.model.recompute import recomputed


class Attention(nn.Module):
    """Causal self-attention, grouped-query when there are fewer key and value heads than query heads."""

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        self.head_dim, self.ops = sizes.head_dim(config), ops
        self.selective = config.recompute == "selective"
        query_size, kv_size = config.num_heads * self.head_dim, sizes.num_kv_heads(config) * self.head_dim
        bias = sizes.qkv_bias(config)
        self.query = Linear(config.hidden_size, query_size, bias, ops)
        self.key = Linear(config.hidden_size, kv_size, bias, ops)
        self.value = Linear(config.hidden_size, kv_size, bias, ops)
        self.query_norm = RMSNorm(self.head_dim, config.norm_eps, ops) if config.qk_norm else None
        self.key_norm = RMSNorm(self.head_dim, config.norm_eps, ops) if config.qk_norm else None
        self.out = Linear(query_size, config.hidden_size, config.bias, ops)

    def forward(
        self,
        x: Tensor,
        rotary: RotaryTables | None,
        documents: Documents | None = None,
        cache: BlockCache | None = None,
    ) -> Tensor:
        projected_query, projected_key, value = (  # (B, T, heads, head_dim)
            projection(x).unflatten(-1, (-1, self.head_dim)) for projection in (self.query, self.key, self.value)
        )
        again = self.selective and self.query_norm is not None  # without a norm nobody keeps what was projected
        place_query = partial(self._place, projected_query, self.query_norm, rotary)
        place_key = partial(self._place, projected_key, self.key_norm, rotary)
        with recomputed(again, place_query, place_key) as (query, key):
            if cache is not None:
                key, value = cache.extend(key, value)
            # Transposed views on both sides: the attention kernels read and write strided heads, so no copy is made.
            out = self.ops.attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), documents)
        projected: Tensor = self.out(out.transpose(1, 2).flatten(2))
        return projected

    def _place(self, heads: Tensor, norm: nn.Module | None, rotary: RotaryTables | None) -> Tensor:
        normed = heads if norm is None else norm(heads)
        return normed if rotary is None else self.ops.rotary(normed, *rotary)


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)), or down(gelu(up(x))), the exact GELU or the one with tanh."""

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        ffn_hidden_size, self.ops = sizes.ffn_hidden_size(config), ops
        self.selective = config.recompute == "selective"
        gated = config.activation == "swiglu"
        self.gate = Linear(config.hidden_size, ffn_hidden_size, config.bias, ops) if gated else None
        self.up = Linear(config.hidden_size, ffn_hidden_size, config.bias, ops)
        self.down = Linear(ffn_hidden_size, config.hidden_size, config.bias, ops)
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
    """x + attention(norm(x)), then x + feed_forward(norm(x)); the residual stream keeps the parameters' dtype."""

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        self.dropout, self.ops = config.dropout, ops
        self.selective = config.recompute == "selective"
        self.attention_norm = _norm(config, ops)
        self.attention = Attention(config, ops)
        self.feed_forward_norm = _norm(config, ops)
        self.feed_forward = FeedForward(config, ops)

    def forward(
        self,
        x: Tensor,
        rotary: RotaryTables | None,
        documents: Documents | None = None,
        cache: BlockCache | None = None,
    ) -> Tensor:
        with recomputed(self.selective, partial(self.attention_norm, x)) as (normed,):
            x = x + self._drop(self.attention(normed, rotary, documents, cache))
        with recomputed(self.selective, partial(self.feed_forward_norm, x)) as (normed,):
            return x + self._drop(self.feed_forward(normed))

    def _drop(self, branch: Tensor) -> Tensor:
        return self.ops.dropout(branch, self.dropout) if self.dropout and self.training else branch


def _norm(config: ModelConfig, ops: Ops) -> nn.Module:
    if config.norm == "rmsnorm":
        return RMSNorm(config.hidden_size, config.norm_eps, ops)
    return LayerNorm(config.hidden_size, config.norm_eps, config.bias, ops)


class Transformer(nn.Module):
    """Token embedding, `blocks`, final norm and head.

    Parameters may be cast or pointed at other storage after construction: nothing of them is cached.
    """

    def __init__(self, config: ModelConfig, ops: Ops | None = None) -> None:
        """Raises: ValueError if the sizes do not divide: a config file is checked before, one made by hand is not."""
        for problem in model_problems(config):
            raise ValueError(problem)
        super().__init__()
        self.config, self.ops = config, ops or Ops()
        ops = self.ops
        self.embedding = Embedding(config.vocab_size, config.hidden_size, ops)
        learned = config.position == "learned"
        self.position_embedding = Embedding(config.seq_len, config.hidden_size, ops) if learned else None
        table = partial(RotaryTable, config.seq_len, sizes.head_dim(config), config.rope_theta, config.rope_scaling)
        self.rotary = None if learned else table()
        self.blocks = nn.ModuleList(Block(config, ops) for _ in range(config.num_layers))
        self.norm = _norm(config, ops)
        self.head = Linear(config.hidden_size, config.vocab_size, False, ops)
        self.slopes, self.is_compiled = slopes, config.compile
        self.reset_parameters()
        if config.compile:
            # Never the whole model: its gradients would all become ready at the very end of backward.
            for block in self.blocks:  # one graph serves all of them
                block.compile(dynamic=False)
            self.slopes = torch.compile(slopes, dynamic=False)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all weights anew: normal(0, init_std), norms one, biases zero; torch.manual_seed decides them.

        With scaled_init the weights that end a branch get init_std / sqrt(2 * num_layers) (GPT-2, Radford et al. 2019,
        section 2.3); Llama and Qwen, as transformers initialises them, draw all weights alike.
        """
        self.tie()
        for name, parameter in self.named_parameters():
            if not parameter.is_meta:  # nothing to draw, and torch would import the compiler for it
                self.draw(name, parameter)

    def tie(self) -> None:
        """Let the head read the embedding table, if it shall: to_empty() unties what was made on the meta device."""
        if self.config.tie_embeddings:
            self.head.weight = self.embedding.weight

    def draw(self, name: str, parameter: Tensor) -> None:
        """Draw the initial values of one full parameter."""
        # 2 * num_layers branches add up in the residual stream: without the factor its variance would grow with depth.
        branches = 2 * self.config.num_layers if self.config.scaled_init else 1
        if name.endswith("bias"):
            parameter.zero_()
        elif name.endswith("norm.weight"):
            parameter.fill_(1)
        elif name.endswith(("attention.out.weight", "feed_forward.down.weight")):
            parameter.normal_(0, self.config.init_std / math.sqrt(branches))
        else:
            parameter.normal_(0, self.config.init_std)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        positions: Tensor | None = None,
        cache: KeyValueCache | None = None,
        layers: range | None = None,
    ) -> Tensor:
        """Logits in the parameters' dtype or, with targets, their loss in FP32: the sum of the cross entropies of all
        targets but IGNORE, divided by B * T.

        positions: of each token in its document, None for 0 to T - 1. Where they restart at 0 a packed sequence's next
        document begins; attention never crosses from one into another.
        cache: tokens follow those that it has seen, as one document; logits of the last one alone.
        layers: the blocks to pass, None for all. Without the first one `tokens` are what the block before them has
        given, without the last one the result is what these give, both (B, T, hidden_size) in the parameters' dtype;
        targets are to be given then, which tell T where ranks divide the positions of these.
        Shapes: tokens, targets and positions INT64 (B, T) -> (B, T, vocab_size), with cache (B, 1, vocab_size), or ().
        Raises: ValueError if T exceeds seq_len.
        """
        layers = range(self.config.num_layers) if layers is None else layers
        num_positions = (tokens if targets is None else targets).shape[1] + (0 if cache is None else cache.length)
        if num_positions > self.config.seq_len:
            raise ValueError(
                f"tokens has {num_positions} positions, but model.seq_len is {self.config.seq_len}: "
                f"pass at most tokens[:, -{self.config.seq_len}:] or build the model with a larger seq_len"
            )
        documents = None
        if cache is not None:
            positions, documents = cache.places(tokens), cache.seen(tokens)
        elif positions is not None:
            documents = find_documents(positions, as_mask=self.is_compiled or tokens.device.type != "cpu")
        x = tokens if layers.start else self._embed(tokens, positions)
        rotary = None if self.rotary is None else self.rotary(num_positions, positions)
        for layer in layers:
            x = self._run(self.blocks[layer], x, rotary, documents, None if cache is None else cache.blocks[layer])
        if layers.stop < self.config.num_layers:
            return x
        x = self.norm(x if cache is None else x[:, -1:])
        if targets is not None:
            return linear_cross_entropy(x, self.head.weight, targets, self.slopes)
        logits: Tensor = self.head(x)
        return logits

    def _embed(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        x: Tensor = self.embedding(tokens)
        if self.position_embedding is not None:
            places = torch.arange(tokens.shape[1], device=tokens.device) if positions is None else positions
            x = x + self.position_embedding(places)
        return self.ops.dropout(x, self.config.dropout) if self.config.dropout and self.training else x

    def _run(self, block: nn.Module, x: Tensor, *context: object) -> Tensor:
        if self.config.recompute != "full":
            out: Tensor = block(x, *context)
            return out
        # With dropout the generator's state is kept, a few KB a block, so that the same elements are dropped again.
        replays = self.training and self.config.dropout > 0
        again: Tensor = checkpoint(block, x, *context, use_reentrant=False, preserve_rng_state=replays)
        return again


def meta_model(config: ModelConfig) -> Transformer:
    """Return the modules without memory, in the dtype that is torch's default."""
    with torch.device("meta"):
        return Transformer(config.model_copy(update={"compile": False}))
