"""The sizes in config.json against those of the tensors, before anything is built by them: the tensors are there."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from megamix.config import ModelConfig
from megamix.hub.families import Family
from megamix.hub.family_configs import effective, shown

Shapes = Mapping[str, tuple[int, ...]]
# Module, dim of its weight as (out, in), and the sizes whose product that is. A bias is as long as its weight.
_FACTORS = (
    ("embedding", 0, ("vocab_size",)),
    ("embedding", 1, ("hidden_size",)),
    ("position_embedding", 0, ("seq_len",)),
    ("blocks.attention.query_norm", 0, ("head_dim",)),
    ("blocks.attention.query", 0, ("num_heads", "head_dim")),
    ("blocks.attention.key", 0, ("num_kv_heads", "head_dim")),
    ("blocks.feed_forward.up", 0, ("ffn_hidden_size",)),
)
# Bytes of rotary tables that any model may have: 262,144 positions of heads of 128. No tensor says how many positions
# a model with rotary ones has, so beyond that they may take as much as its weights.
_USUAL_TABLES = 1 << 27


def contradictions(family: Family, base: str, config: ModelConfig, shapes: Shapes) -> list[str]:
    """What the tensors say otherwise. Takes as long as there are tensors, whatever the sizes in `config` are.

    `base`: what their names lack of the family's.
    """
    names = {module: place.name.removeprefix(base) for module, place in family.places.items()}
    values, keys = effective(config), family.size_keys
    problems = []
    layers = _layers(names["blocks.attention_norm"], shapes)
    if len(layers) != config.num_layers:
        problems.append(f"{keys['num_layers']} is {shown(config.num_layers)}, the tensors are of {len(layers)} layers")
    for module, dim, factors in _FACTORS:
        tensor = next(_tensors(names.get(module), layers, shapes), None)
        if tensor is None or not keys.keys() >= set(factors):
            continue
        shape = shapes[tensor][::-1] if family.places[module].transposed else shapes[tensor]
        if dim < len(shape) and shape[dim] != math.prod(values[factor] for factor in factors):
            told = " times ".join(f"{keys[factor]} {shown(values[factor])}" for factor in factors)
            problems.append(f"{told} does not fit {tensor} {list(shapes[tensor])}, which has {shape[dim]}")
    return problems or tables_problem(config, keys["seq_len"], shapes)


def _layers(name: str, shapes: Shapes) -> list[str]:
    """The numbers of the layers that have the norm every family begins a layer with, as text, the lowest first."""
    start, end = name.split("{}")
    end += ".weight"
    middles = [tensor[len(start) : -len(end)] for tensor in shapes if tensor.startswith(start) and tensor.endswith(end)]
    return sorted((middle for middle in middles if middle.isdecimal()), key=lambda middle: (len(middle), middle))


def _tensors(name: str | None, layers: list[str], shapes: Shapes) -> Iterator[str]:
    """The weight of a module, of each layer where layers have one."""
    if name is not None:
        for tensor in (f"{name}.weight".replace("{}", layer) for layer in (layers if "{}" in name else [""])):
            if tensor in shapes:
                yield tensor


def tables_problem(config: ModelConfig, key: str, shapes: Shapes, usual: int = _USUAL_TABLES) -> list[str]:
    """The tables of rotary positions, if they take more than the weights and `usual` bytes."""
    if config.position != "rotary":
        return []
    tables = 4 * config.seq_len * effective(config)["head_dim"]
    weights = 4 * sum(map(math.prod, shapes.values()))
    if tables <= max(usual, weights):
        return []
    return [
        f"{key} is {shown(config.seq_len)}: tables of rotary positions of {shown(tables)} bytes, the weights take "
        f"{weights}; write as many as the model reads"
    ]
