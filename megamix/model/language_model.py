"""The base class of every family of models: what a job asks of one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from megamix.config import DecoderConfig
from megamix.model.formats import Format
from megamix.model.layers import ParamRule
from megamix.model.sizes import is_repeated
from megamix.model.wide import COMPILE_OPTIONS


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one undivided part of a model."""

    params: int
    flops: int  # operations of a token in a full sequence, forward and backward; recompute's repeats do not count

    @staticmethod
    def of(*parts: nn.Module) -> Cost:
        """Count parameters, and add up the operations that the modules give in `flops`."""
        modules = [module for part in parts for module in part.modules()]
        params = [param for module in modules for param in module.parameters(recurse=False)]
        return Cost(sum(map(Tensor.numel, params)), sum(getattr(module, "flops", 0) for module in modules))


@dataclass(frozen=True)
class Costs:
    """The costs of all parts of a model. A tied table counts in the first and in the last part."""

    first: Cost  # embeddings of tokens and positions
    blocks: Sequence[Cost]
    last: Cost  # norm and head
    tied_params: int  # parameters that first and last share

    @property
    def total(self) -> Cost:
        """Return the cost of the whole model; shared parameters count once."""
        parts = (self.first, *self.blocks, self.last)
        return Cost(sum(part.params for part in parts) - self.tied_params, sum(part.flops for part in parts))


# Writes first values into FP32 (n,): those of a parameter from element `first` of its flattened block on. Keys: `name`,
# `full_shape`, `block` (a slice of each dim), `first`.
Draw = Callable[..., None]


class Cache(Protocol):
    """Holds what a model keeps of a text, so that a new token costs one position."""

    @property
    def length(self) -> int:
        """Return the number of positions that need not be given again."""


def compile_blocks(blocks: Iterable[nn.Module]) -> None:
    """Compile blocks one by one: a whole compiled model's gradients all become ready at backward's end. Blocks that are
    alike share one graph.
    """
    for block in blocks:
        block.compile(dynamic=False, options=COMPILE_OPTIONS)


class LanguageModel(nn.Module):
    """Tokens in, logits or loss out. A family is a subclass."""

    name: ClassVar[str]  # `family` in the section [model]
    section: ClassVar[type[DecoderConfig]]  # form of the other keys in [model]
    formats: ClassVar[Sequence[Format]] = ()  # Hugging Face formats of the family
    # Patterns of parameters of two dims that do not map hidden states to hidden states.
    tables: ClassVar[Sequence[str]] = ()
    config: Any  # a `section`; typed Any wherever a family overrides
    rules: Mapping[str, ParamRule]  # by parameter: how it is drawn, and divided over ranks
    blocks: nn.ModuleList  # one a layer
    is_compiled = False
    runs_on_meta: ClassVar[bool] = True  # False: its operations ask for values, and fake tensors stand in for a GPU's

    @property
    def units(self) -> list[nn.Module]:
        """Return the parts that run one after the other. None reads another's parameters, unless they are tied."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def check_length(self, num_positions: int) -> None:
        """Refuse sequences that are longer than seq_len. Raises: ValueError."""
        if num_positions > (most := self.config.seq_len):
            raise ValueError(
                f"tokens has {num_positions} positions, but model.seq_len is {most}: "
                f"pass at most tokens[:, -{most}:] or build the model with a larger seq_len"
            )

    def new_cache(self, room: int) -> Cache:
        """Return an empty cache, for texts of up to `room` tokens each."""
        raise NotImplementedError

    def place_buffers(self, device: torch.device) -> None:
        """Move the buffers of a model on meta to a device, with their values. Raises: ValueError if one has none."""
        raise NotImplementedError

    def draws(self, seed: int, *, packed: bool) -> Draw:
        """Return the function that writes a parameter's first values, the same on any mesh. `packed`: whether sequences
        hold several documents.

        Raises: ValueError for a model that would not keep them apart.
        """
        raise NotImplementedError

    def tie(self) -> None:
        """Tie what to_empty() has untied."""

    @classmethod
    def kind(cls, config: Any, layer: int) -> Hashable:
        """Return a layer's kind, the same for blocks that are alike. One block of each kind is built to know the cost
        of all.
        """
        return 0

    @classmethod
    def fused(cls, config: Any) -> dict[str, Sequence[int]]:
        """Return the parameters that hold several matrices one below the other: by pattern, the rows of each matrix."""
        return {}

    @classmethod
    def effective(cls, config: Any) -> dict[str, Any]:
        """Return the section's values, with unset ones replaced by the values in effect."""
        return dict(config)

    @classmethod
    def alike(cls, config: Any) -> list[int]:
        """Return for each layer the first layer with a block of the same kind."""
        first: dict[Hashable, int] = {}
        kinds = ((cls.kind(config, layer), is_repeated(config, layer)) for layer in range(config.num_layers))
        return [first.setdefault(kind, layer) for layer, kind in enumerate(kinds)]

    @classmethod
    def on_meta(cls, config: Any, like: Sequence[int] | None = None) -> Self:
        """Return the modules on the meta device, not compiled, in torch's default dtype. `like`: see `__init__`."""
        with torch.device("meta"):
            return cls(config.model_copy(update={"compile": False}), like=like)

    @classmethod
    def part(cls, config: Any, layers: Sequence[int]) -> Self:
        """Return the model with the blocks of `layers` only, ascending: a rank does not build the others. The other
        blocks are empty modules.
        """
        raise NotImplementedError

    @classmethod
    def sketch(cls, config: Any) -> Self:
        """Return the modules on the meta device, as fast as they can be had.

        Raises: ValueError if a parameter is larger than any memory.
        """
        raise NotImplementedError

    @classmethod
    def costs(cls, config: Any) -> Costs:
        """Return the cost of each part of a model of this configuration."""
        raise NotImplementedError

    @classmethod
    def shapes(cls, config: Any) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter of the model that `config` describes, by its first name.

        Raises: as `sketch`.
        """
        others = {name for tied in cls.aliases(config).values() for name in tied}
        params = cls.sketch(config).named_parameters(remove_duplicate=False)  # blocks that are alike are one module
        return {name: tuple(param.shape) for name, param in params if name not in others}

    @classmethod
    def aliases(cls, config: Any) -> dict[str, set[str]]:
        """Return the other names of each parameter that is tied, by its first name."""
        raise NotImplementedError
