"""What every family of models is made of, as a plain module: tokens in, logits or loss out."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megamix.config import DecoderConfig
from megamix.model.context import KeyValueCache, find_borders, find_documents, most_borders
from megamix.model.cross_entropy import Slopes, compiled_slopes, slopes
from megamix.model.formats import Format
from megamix.model.layers import Embedding, Head, RMSNorm, RotaryTable, param_rules
from megamix.model.ops import Ops, takes_borders

EMBEDDING_WEIGHT, HEAD_WEIGHT = "embedding.weight", "head.weight"  # one parameter, if it is tied


class Branch(nn.Module):
    """What a block adds to the residual stream: column-parallel layers first, a row-parallel one at the end.

    Its first argument is hidden states of all positions, also where ranks divide these between branches.
    """


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one part of a model, undivided."""

    params: int
    flops: int  # of a token in a full sequence, forward and backward; what recompute repeats is not counted

    @staticmethod
    def of(*parts: nn.Module) -> Cost:
        """Count parameters, and what the modules say of themselves in `flops`."""
        modules = [module for part in parts for module in part.modules()]
        params = [param for module in modules for param in module.parameters(recurse=False)]
        return Cost(sum(map(Tensor.numel, params)), sum(getattr(module, "flops", 0) for module in modules))


@dataclass(frozen=True)
class Costs:
    """Of all parts of a model; a tied table is in the first and in the last one."""

    first: Cost  # the tables that look tokens and positions up
    blocks: Sequence[Cost]
    last: Cost  # norm and head
    tied_params: int  # that first and last share

    @property
    def total(self) -> Cost:
        """Of the whole model, what is shared once."""
        parts = (self.first, *self.blocks, self.last)
        return Cost(sum(part.params for part in parts) - self.tied_params, sum(part.flops for part in parts))


class Decoder(nn.Module):
    """Token embedding, `blocks`, final norm and head. A family is a subclass: it says how its blocks are built, and
    their layers say how they are drawn and divided over ranks and what they compute (megamix/model/layers.py).

    Parameters may be cast or pointed at other storage after construction: nothing of them is cached.
    """

    name: ClassVar[str]  # `family` in the section [model]
    section: ClassVar[type[DecoderConfig]]  # the other keys there
    formats: ClassVar[Sequence[Format]] = ()  # of Hugging Face
    # Parameters of two dims that are no maps from hidden states to hidden states, by pattern.
    tables: ClassVar[Sequence[str]] = (EMBEDDING_WEIGHT, "position_embedding.weight", HEAD_WEIGHT)
    config: Any  # its own section, as in all that a family overrides

    def __init__(self, config: DecoderConfig, ops: Ops | None = None, like: Sequence[int] | None = None) -> None:
        """`like`: for a model of other length, the layers whose blocks it has, in their order; None: of all layers."""
        super().__init__()
        like = range(config.num_layers) if like is None else like
        self.config, self.ops = config.model_copy(update={"num_layers": len(like)}), ops or Ops()
        std = config.init_std
        self.embedding = Embedding(config.vocab_size, config.hidden_size, self.ops, std=std, divided=True)
        self.position_embedding, self.rotary = self.positions()
        self.blocks = nn.ModuleList(self.block(config, layer) for layer in like)
        self.norm = self.last_norm()
        self.head = Head(config.hidden_size, config.vocab_size, False, self.ops, std=std, divides="columns")
        self.slopes: Slopes = compiled_slopes() if config.compile else slopes
        self.is_compiled = config.compile
        self.rules = param_rules(self)
        self.reset_parameters()
        if config.compile:
            # Never the whole model: its gradients would all become ready at the very end of backward.
            for block in self.blocks:  # one graph serves all that are alike
                block.compile(dynamic=False)

    @property
    def units(self) -> list[nn.Module]:
        """The parts that run one after the other, each with parameters that the others do not read, unless tied."""
        tables = (self.embedding, self.position_embedding)
        return [*(table for table in tables if table is not None), *self.blocks, self.head]

    def block(self, config: Any, layer: int) -> nn.Module:
        """Build one. It is called with hidden states half (B, T, hidden_size), the rotary tables' rows, documents and
        cache (megamix/model/context.py), each of these None where there is none, and gives hidden states. Dropout and
        whatever else of its own sees single positions computes with its attribute `ops`.
        """
        raise NotImplementedError

    @classmethod
    def kind(cls, config: Any, layer: int) -> Hashable:
        """Return the same for blocks that are alike: of each kind one is built to know what all of them cost."""
        return 0

    def positions(self) -> tuple[Embedding | None, RotaryTable | None]:
        """Build what tells a token its place: a table that is added, or one that blocks are called with."""
        return None, None

    def head_dim(self) -> int:
        """Return the size of a head, if all attention is that of `ops`: it may know documents by their borders then.
        0: blocks may look at the other forms themselves.
        """
        return 0

    def last_norm(self) -> nn.Module:
        """Build the norm in front of the head."""
        return RMSNorm(self.config.hidden_size, 1e-5, self.ops)

    @classmethod
    def fused(cls, config: Any) -> dict[str, Sequence[int]]:
        """Return the parameters that hold several matrices one below the other, by pattern: the rows of each."""
        return {}

    @classmethod
    def effective(cls, config: Any) -> dict[str, Any]:
        """Return the section's values, those that are not set replaced by what they come to."""
        return dict(config)

    @classmethod
    def table_bytes(cls, config: Any) -> int:
        """Return those of tables for seq_len positions that are no parameters: nothing on the disk confirms them."""
        return 0

    @classmethod
    def alike(cls, config: DecoderConfig) -> list[int]:
        """Return for each layer the first one that has a block of its kind."""
        first: dict[Hashable, int] = {}
        return [first.setdefault(cls.kind(config, layer), layer) for layer in range(config.num_layers)]

    @classmethod
    def on_meta(cls, config: DecoderConfig, like: Sequence[int] | None = None) -> Self:
        """Return the modules without memory, not compiled, in the dtype that is torch's default. `like`: as above."""
        with torch.device("meta"):
            return cls(config.model_copy(update={"compile": False}), like=like)

    @classmethod
    def sketch(cls, config: DecoderConfig) -> Self:
        """Return the modules without memory, one block in the place of all of its kind: to build a thousand takes 20 s.

        Raises: ValueError if a parameter is larger than any memory.
        """
        alike = cls.alike(config)
        kinds = [*dict.fromkeys(alike)]
        try:
            model = cls.on_meta(config, kinds)
        except (RuntimeError, OverflowError, TypeError) as error:
            raise ValueError(f"no memory holds a model of these sizes: {str(error).splitlines()[0]}") from None
        model.blocks = nn.ModuleList(model.blocks[kinds.index(layer)] for layer in alike)
        return model

    @classmethod
    def part(cls, config: DecoderConfig, layers: Sequence[int]) -> Self:
        """Return the whole model with these layers' blocks alone, ascending: a rank's few are not built with all."""
        model = cls(config, like=layers)
        blocks = dict(zip(layers, model.blocks, strict=True))
        model.blocks = nn.ModuleList(blocks.get(layer, nn.Module()) for layer in range(config.num_layers))
        model.config, model.rules = config, param_rules(model)
        return model

    @classmethod
    def costs(cls, config: DecoderConfig) -> Costs:
        """Count what each part of such a model costs."""
        model = cls.sketch(config)
        tables = (model.embedding, model.position_embedding)
        return Costs(
            first=Cost.of(*(table for table in tables if table is not None)),
            blocks=[Cost.of(block) for block in model.blocks],
            last=Cost.of(model.norm, model.head),
            tied_params=model.head.weight.numel() if config.tie_embeddings else 0,
        )

    @classmethod
    def shapes(cls, config: DecoderConfig) -> dict[str, tuple[int, ...]]:
        """Return those of all parameters of such a model, a shared one under its first name.

        Raises: as `sketch`.
        """
        params = cls.sketch(config).named_parameters(remove_duplicate=False)
        shapes = {name: tuple(param.shape) for name, param in params}
        return {name: shape for name, shape in shapes.items() if name != HEAD_WEIGHT or not config.tie_embeddings}

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all weights anew by their rules. The seed that torch.manual_seed has set alone decides them."""
        self.tie()
        seed = torch.initial_seed()
        for name, parameter in self.named_parameters():
            if not parameter.is_meta:  # nothing to draw
                shape = tuple(parameter.shape)
                block = [slice(0, size) for size in shape]
                self.rules[name].fill(parameter.view(-1), seed=seed, name=name, full_shape=shape, block=block)

    def tie(self) -> None:
        """Let the head read the embedding table, if it shall: to_empty() unties what was made on the meta device."""
        if self.config.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        positions: Tensor | None = None,
        num_documents: int = 0,
        *,
        cache: KeyValueCache | None = None,
        layers: range | None = None,
    ) -> Tensor:
        """Logits in the parameters' dtype or, with targets, their loss in FP32: the sum of the cross entropies of all
        targets but IGNORE, divided by B * T.

        positions: of each token in its document, None for 0 to T - 1. Where they restart at 0 a packed sequence's next
        document begins; attention never crosses from one into another.
        num_documents: how many there are at most, 0 if that is not known. If few, a GPU in half needs no mask.
        cache: tokens follow those that it has seen, as one document; logits of the last one alone.
        layers: the blocks to pass, None for all. Without the first one `tokens` are what the block before them has
        given, without the last one the result is what these give, both (B, T, hidden_size) in the parameters' dtype;
        targets are to be given then, which tell T where ranks divide the positions of these.
        Shapes: tokens, targets and positions INT64 (B, T) -> (B, T, vocab_size), with cache (B, 1, vocab_size), or ().
        Positions of (1, T) or (T,) are those of every sequence.
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
            positions = positions.expand((tokens if targets is None else targets).shape)
        x = tokens if layers.start else self._embed(tokens, positions)
        if cache is None and positions is not None:
            if 0 < num_documents <= most_borders(positions) and takes_borders(x, self.head_dim()):
                documents = find_borders(positions)
            else:
                documents = find_documents(positions, as_mask=self.is_compiled or x.device.type != "cpu")
        rotary = None if self.rotary is None else self.rotary(num_positions, positions)
        for layer in layers:
            x = self._run(self.blocks[layer], x, rotary, documents, None if cache is None else cache.blocks[layer])
        if layers.stop < self.config.num_layers:
            return x
        x = self.norm(x if cache is None else x[:, -1:])
        out: Tensor = self.head(x, targets, self.slopes)
        return out

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
