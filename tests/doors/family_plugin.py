"""A family of two kinds of blocks: every other one mixes positions, the others work on each alone and cost less."""

from functools import partial
from typing import Literal

import torch
from pydantic import PositiveInt
from torch import nn

from megamix.config import DecoderConfig
from megamix.model.decoder import Branch, Decoder
from megamix.model.formats import Format, Location
from megamix.model.layers import Linear, ParamRule, RMSNorm
from megamix.plugins import register_family


class ToyConfig(DecoderConfig):
    """A toy of two kinds of blocks."""

    family: Literal["toy"] = "toy"
    """Name of the family."""
    mixing_heads: PositiveInt = 2
    """Heads of a block that mixes positions."""
    gate_size: PositiveInt = 24
    """Inner width of a block that does not."""


class Mixing(Branch):
    """Attention without positions."""

    def __init__(self, config, ops):
        super().__init__()
        size = config.hidden_size
        self.ops, self.head_dim = ops, size // config.mixing_heads
        self.flops = 12 * size * config.seq_len
        columns = partial(Linear, size, size, False, ops, std=config.init_std, divides="columns")
        self.query, self.key, self.value = columns(), columns(), columns()
        self.out = Linear(size, size, False, ops, std=config.init_std / 2, divides="rows")

    def forward(self, x, documents, cache):
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.head_dim)) for layer in (self.query, self.key, self.value)
        )
        if cache is not None:
            key, value = cache.extend(key, value)
        mixed = self.ops.attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), documents)
        out = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Gated(Branch):
    """Each position alone; `gain` is a parameter of its own, divided as the columns are."""

    def __init__(self, config, ops):
        super().__init__()
        size, inner = config.hidden_size, config.gate_size
        self.ops = ops
        self.gate, self.up = (Linear(size, inner, True, ops, std=config.init_std, divides="columns") for _ in range(2))
        self.gain = nn.Parameter(torch.empty(inner))
        self.rules = {"gain": ParamRule("ones", divided=0)}
        self.down = Linear(inner, size, True, ops, std=config.init_std / 2, divides="rows")

    def forward(self, x, *context):
        out = self.down(self.ops.swiglu(self.gate(x), self.up(x)) * self.gain)
        return out


class ToyBlock(nn.Module):
    def __init__(self, name, branch, norm):
        super().__init__()
        self.name, self.norm = name, norm
        self.add_module(name, branch)

    def forward(self, x, rotary, documents, cache):
        added = self.get_submodule(self.name)(self.norm(x), documents, cache)
        return x + added


TOY = Format(
    model_type="toy",
    architecture="ToyForCausalLM",
    base="model.",
    places={
        "embedding": Location("model.embed"),
        "blocks.norm": Location("model.layers.{}.norm"),
        **{f"blocks.mixing.{name}": Location(f"model.layers.{{}}.mix.{name}") for name in ("query", "key", "value")},
        "blocks.mixing.out": Location("model.layers.{}.mix.o_proj", transposed=True),
        "blocks.gated": Location("model.layers.{}.mlp"),
        **{f"blocks.gated.{name}": Location(f"model.layers.{{}}.mlp.{name}") for name in ("gate", "up", "down")},
        "norm": Location("model.norm"),
        "head": Location("lm_head"),
    },
    size_keys={name: name for name in ("vocab_size", "seq_len", "hidden_size", "num_layers", "mixing_heads")}
    | {"gate_size": "intermediate_size"},
    section=ToyConfig,
)


class Toy(Decoder):
    name, section, formats = "toy", ToyConfig, (TOY,)

    def block(self, config, layer):
        norm = RMSNorm(config.hidden_size, 1e-5, self.ops)
        if self.kind(config, layer) == "mixing":
            return ToyBlock("mixing", Mixing(config, self.ops), norm)
        return ToyBlock("gated", Gated(config, self.ops), norm)

    @classmethod
    def kind(cls, config, layer):
        return "mixing" if layer % 2 else "gated"


register_family(Toy)
