"""The base class of the families that are built of our own layers, a plain module: tokens in, logits or loss out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from megamix.base.tally import Tally
from megamix.base.values import has_values
from megamix.config import DecoderConfig
from megamix.model.context import Documents, KeyValueCache, find_borders, find_documents, most_borders
from megamix.model.cross_entropy import Slopes, compiled_slopes, slopes
from megamix.model.language_model import Cost, Costs, Draw, LanguageModel, compile_blocks
from megamix.model.layers import Embedding, Head, RMSNorm, RotaryTable, TwoRotaryTables, param_rules
from megamix.model.ops import Ops, takes_borders
from megamix.model.sizes import is_repeated
from megamix.model.span import Chunks, Span

EMBEDDING_WEIGHT, HEAD_WEIGHT = "embedding.weight", "head.weight"  # one parameter if they are tied


class Branch(nn.Module):
    """A part of a block whose result is added to the residual stream: column-parallel layers first, a row-parallel
    layer at the end.

    Its first argument is hidden states of all positions, even if ranks divide the positions between branches.
    """


class Decoder(LanguageModel):
    """Token embedding, `blocks`, final norm and head. A family is a subclass, which builds its blocks. The blocks'
    layers say how they are drawn, how ranks divide them and what they cost (megamix/model/layers.py).

    Parameters may be cast, or pointed at other storage, after construction: the model caches nothing of them.
    """

    tables: ClassVar[Sequence[str]] = (EMBEDDING_WEIGHT, "position_embedding.weight", HEAD_WEIGHT)
    windowed = False  # whether attention of some layer has a window
    # Contexts of a block's forward and of its repetition in backward, which may reuse what the forward has kept.
    around_recompute: Callable[[], tuple[AbstractContextManager[None], AbstractContextManager[None]]] = staticmethod(
        noop_context_fn
    )
    span: Span | None = None  # divides the positions of sequences with targets among ranks; None: all are here

    def __init__(self, config: DecoderConfig, ops: Ops | None = None, like: Sequence[int] | None = None) -> None:
        """Build the modules and draw their weights. `like`: the layers whose blocks the model gets, in this order, for
        a model of another length; None: all layers.
        """
        super().__init__()
        like = range(config.num_layers) if like is None else like
        self.config, self.ops = config.model_copy(update={"num_layers": len(like)}), ops or Ops()
        std = config.init_std
        self.embedding = self.token_embedding()
        self.position_embedding, self.rotary = self.positions()
        self.blocks = nn.ModuleList(self.block(config, layer) for layer in like)
        for block, layer in zip(self.blocks, like, strict=True):
            block.is_repeated = is_repeated(config, layer)  # type: ignore[assignment]  # nn.Module takes any
        self.norm = self.last_norm()
        self.head = Head(config.hidden_size, config.vocab_size, False, self.ops, std=std, divides="columns")
        self.head.z_loss = config.z_loss
        self.slopes: Slopes = compiled_slopes() if config.compile else slopes
        self.is_compiled = config.compile
        self.rules = param_rules(self)
        self.reset_parameters()
        if config.compile:
            compile_blocks(self.blocks)
            # Dynamo has one limit for the graphs of all blocks, and runs those beyond it uncompiled.
            kinds, dynamo = len({self.kind(config, layer) for layer in like}), torch._dynamo.config
            dynamo.recompile_limit = max(dynamo.recompile_limit, 8 * kinds)

    @property
    def units(self) -> list[nn.Module]:
        """Return the parts that run one after the other. None reads another's parameters, unless they are tied."""
        return [*self.inputs, *self.blocks, self.head]

    @property
    def inputs(self) -> list[nn.Module]:
        """Return the tables that make hidden states of tokens."""
        return [table for table in (self.embedding, self.position_embedding) if table is not None]

    def block(self, config: Any, layer: int) -> nn.Module:
        """Build the block of a layer. The block is called with hidden states, half (B, T, hidden_size), the rotary
        tables' rows, documents and cache (megamix/model/context.py), each of these three None if there is none. With
        context parallelism `Chunks` (megamix/model/span.py) stand in the documents' place. It returns hidden states.
        Its own operations on single positions, such as dropout, must go through its attribute `ops`.
        """
        raise NotImplementedError

    def token_embedding(self) -> Embedding:
        return Embedding(
            self.config.vocab_size, self.config.hidden_size, self.ops, std=self.config.init_std, divided=True
        )

    def positions(self) -> tuple[Embedding | None, RotaryTable | TwoRotaryTables | None]:
        """Build the tables of positions: an embedding that is added to the tokens', or rotary tables for the blocks."""
        return None, None

    def head_dim(self) -> int:
        """Return the size of an attention head if all attention goes through `ops.attention`, which may then get the
        documents' borders instead of a mask. Return 0 if blocks read `Documents` themselves.
        """
        return 0

    def takes_borders(self, x: Tensor) -> bool:
        """Return whether attention on hidden states like x takes documents as borders, and windows."""
        return takes_borders(x, self.head_dim())

    def last_norm(self) -> nn.Module:
        return RMSNorm(self.config.hidden_size, 1e-5, self.ops)

    @classmethod
    def sketch(cls, config: DecoderConfig) -> Self:
        """Return the modules on the meta device, with one block in place of all of its kind: building a thousand blocks
        takes 20 s.

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
        """Return the model with the blocks of `layers` only, ascending: a rank does not build the others. The other
        blocks are empty modules.
        """
        model = cls(config, like=layers)
        blocks = dict(zip(layers, model.blocks, strict=True))
        model.blocks = nn.ModuleList(blocks.get(layer, nn.Module()) for layer in range(config.num_layers))
        model.config, model.rules = config, param_rules(model)
        return model

    @classmethod
    def costs(cls, config: DecoderConfig) -> Costs:
        """Return the cost of each part of a model of this configuration."""
        model = cls.sketch(config)
        return Costs(
            first=Cost.of(*model.inputs),
            blocks=[Cost.of(block) for block in model.blocks],
            last=Cost.of(model.norm, model.head),
            tied_params=model.head.weight.numel() if config.tie_embeddings else 0,
        )

    @classmethod
    def aliases(cls, config: DecoderConfig) -> dict[str, set[str]]:
        return {EMBEDDING_WEIGHT: {HEAD_WEIGHT}} if config.tie_embeddings else {}

    def new_cache(self, room: int) -> KeyValueCache:
        return KeyValueCache(self.config.num_layers, room)

    def place_buffers(self, device: torch.device) -> None:
        for name, module in self.named_modules():
            if module._buffers:
                if type(module)._apply is nn.Module._apply:
                    raise ValueError(
                        f"module {name} has buffers, and nothing says how they are filled: give it an `_apply` that "
                        "fills them, as megamix.model.layers.RotaryTable does"
                    )
                kept = module._buffers.keys() - module._non_persistent_buffers_set
                if kept and not isinstance(module, Tally):
                    raise ValueError(
                        f"module {name} has persistent buffers {', '.join(sorted(kept))}, which no weights of a family "
                        "hold: register them with persistent=False, and let its `_apply` fill them"
                    )
                # not to_empty(): for a tensor on meta it would import the compiler, which takes 0.6 s
                module._apply(lambda table: torch.empty(table.shape, dtype=table.dtype, device=device), recurse=False)

    def draws(self, seed: int, *, packed: bool) -> Draw:
        def draw(values: Tensor, *, name: str, **place: Any) -> None:
            self.rules[name].fill(values, seed=seed, name=name, **place)

        return draw

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all weights by their rules. They depend only on the seed that torch.manual_seed has set."""
        self.tie()
        seed = torch.initial_seed()
        for name, parameter in self.named_parameters():
            if has_values(parameter):
                shape = tuple(parameter.shape)
                block = [slice(0, size) for size in shape]
                self.rules[name].fill(parameter.view(-1), seed=seed, name=name, full_shape=shape, block=block)

    def tie(self) -> None:
        """Tie the head to the embedding table, if the section says so. to_empty() unties what was made on meta."""
        if self.config.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        positions: Tensor | None = None,
        num_documents: int = 0,
        deal: Tensor | None = None,
        *,
        cache: KeyValueCache | None = None,
        layers: range | None = None,
    ) -> Tensor:
        """Return logits in the parameters' dtype or, with targets, the loss in FP32: the sum of the cross entropies of
        all targets but IGNORE, divided by B * T.

        positions: each token's position in its document; None for 0 to T - 1. The next document of a packed sequence
        begins at each 0. Attention never crosses from one document into another.
        num_documents: upper bound of the number of documents, 0 if it is not known. If they are few, a GPU in half
        needs no mask.
        deal: the chunks of each context-parallel rank, INT64 (B, ranks, chunks), for packed sequences; None for those
        of a sequence that is one document.
        cache: the tokens follow those that the cache has seen, as one document. Only the last token's logits are
        returned.
        layers: the blocks to run; None for all. Without the first block `tokens` are the hidden states of the block
        before; without the last one the result is hidden states. Both are (B, T, hidden_size) in the parameters' dtype.
        Targets must be given then: they tell T if ranks divide the positions of the hidden states.
        Shapes: tokens, targets and positions INT64 (B, T) -> (B, T, vocab_size), with cache (B, 1, vocab_size), or ().
        Positions (1, T) or (T,) hold for every sequence.
        Raises: ValueError if T exceeds seq_len.
        """
        layers = range(self.config.num_layers) if layers is None else layers
        whole = tokens if targets is None else targets
        num_positions = whole.shape[1] + (0 if cache is None else cache.length)
        self.check_length(num_positions)
        positions = None if positions is None else positions.expand(whole.shape)
        part = None if self.span is None else self.span.begin(targets, None if positions is None else deal)
        own_positions = positions if cache is None else cache.places(tokens)
        if part is not None and targets is not None:
            targets, tokens = part.own(targets), tokens if layers.start else part.own(tokens)
            own_positions = part.places[0] if positions is None else part.own(positions)
        x = tokens if layers.start else self._embed(tokens, own_positions)
        seen = cache.seen(tokens) if cache is not None else self._seen(x, num_positions, positions, num_documents, part)
        rotary = None if self.rotary is None else self.rotary(num_positions, own_positions)
        for layer in layers:
            x = self._run(self.blocks[layer], x, rotary, seen, None if cache is None else cache.blocks[layer])
        if layers.stop < self.config.num_layers:
            return x
        x = self.norm(x if cache is None else x[:, -1:])
        out: Tensor = self.head(x, targets, self.slopes)
        return out

    def _seen(
        self, x: Tensor, num_positions: int, positions: Tensor | None, num_documents: int, part: Chunks | None
    ) -> Documents | Chunks | None:
        """Return what attention has to know of documents and of the rank's part. `positions`: those of all tokens."""
        takes_borders = self.takes_borders(x)
        if part is not None and not part.by_heads:
            part.see(positions, num_documents, x, by_borders=takes_borders)
            return part
        if positions is None and self.windowed and takes_borders:
            # A GPU's kernel for windows takes borders, also those of whole sequences.
            positions, num_documents = torch.arange(num_positions, device=x.device).expand(len(x), -1), len(x)
        documents: Documents | None = None
        if positions is not None and takes_borders and 0 < num_documents <= most_borders(positions):
            documents = find_borders(positions)
        elif positions is not None:
            documents = find_documents(positions, as_mask=self.is_compiled or x.device.type != "cpu")
        if part is None:
            return documents
        part.documents = documents
        return part

    def _embed(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        x: Tensor = self.embedding(tokens)
        if self.position_embedding is not None:
            places = torch.arange(tokens.shape[1], device=tokens.device) if positions is None else positions
            x = x + self.position_embedding(places)
        return self.ops.dropout(x, self.config.dropout) if self.config.dropout and self.training else x

    def _run(self, block: nn.Module, x: Tensor, *context: object) -> Tensor:
        if not block.is_repeated:
            out: Tensor = block(x, *context)
            return out
        # With dropout the generator's state is kept, a few KB per block: backward must drop the same elements again.
        replays = self.training and self.config.dropout > 0
        again: Tensor = checkpoint(
            block, x, *context, use_reentrant=False, preserve_rng_state=replays, context_fn=self.around_recompute
        )
        return again
