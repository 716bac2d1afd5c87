"""GPT-2, Llama, Qwen 2 and Qwen 3 as Hugging Face has them: which part of which of their tensors a parameter is.

The names are those of transformers' modeling_*.py of the same families, `family_configs` has their config.json.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from megamix.checkpoint.boxes import Box
from megamix.config import ModelConfig
from megamix.hub import family_configs as configs
from megamix.model.family import family_of
from megamix.model.sizes import effective


@dataclass(frozen=True, slots=True)
class Link:
    """One of our parameters lies in one of their tensors, from `offset` on, turned around where theirs is (in, out)."""

    ours: str
    theirs: str
    shape: tuple[int, ...]  # of ours
    offset: tuple[int, ...]  # in theirs
    transposed: bool = False

    @property
    def region(self) -> Box:
        """What of their tensor is ours."""
        return self.to_theirs(Box.whole(self.shape))

    def to_theirs(self, box: Box) -> Box:
        """Return where a box of our parameter lies in their tensor."""
        return self._turned(box).moved(self.offset)

    def to_ours(self, box: Box) -> Box:
        """Return the reverse, for a box within `region`."""
        return self._turned(box.moved(tuple(-start for start in self.offset)))

    def _turned(self, box: Box) -> Box:
        return Box(box.offset[::-1], box.size[::-1]) if self.transposed else box


def their_shapes(links: Iterable[Link]) -> dict[str, tuple[int, ...]]:
    """Return the whole of each of their tensors, in the links' order."""
    shapes: dict[str, tuple[int, ...]] = {}
    for link in links:
        end = link.region.end
        shapes[link.theirs] = tuple(map(max, end, shapes.get(link.theirs, end)))
    return shapes


class Location(NamedTuple):
    """Where a module's weight and bias lie: a name, `{}` for the block's number."""

    name: str
    part: int = 0  # of a tensor that holds several of our modules behind each other
    transposed: bool = False  # whether a matrix is stored (in, out)


@dataclass(frozen=True, slots=True)
class Family:
    """One `model_type`."""

    model_type: str
    architecture: str
    base: str  # what all names but the head's begin with; a folder saved without the head leaves it out
    places: Mapping[str, Location]  # by our module's name, `blocks` without its number
    size_keys: Mapping[str, str]  # config.json's name of the sizes in the section [model]

    def misfits(self, config: ModelConfig) -> list[str]:
        """Return why this family has no such model; empty if it has."""
        given = effective(config)
        return [
            f"model.{key} is {given[key]}, {self.model_type} has {' or '.join(map(str, values))}"
            for key, values in configs.allowed(self.model_type, config).items()
            if given[key] not in values
        ]

    def links(self, config: ModelConfig) -> list[Link]:
        """Return every parameter of such a model, once, in the order of its modules."""
        return [self._link(name, shape) for name, shape in family_of(config).shapes(config).items()]

    def _link(self, ours: str, shape: tuple[int, ...]) -> Link:
        module, _, leaf = ours.rpartition(".")
        number = re.match(r"blocks\.(\d+)\.", module)
        place = self.places[re.sub(r"^blocks\.\d+\.", "blocks.", module)]
        theirs = f"{place.name.format(number[1] if number else '')}.{leaf}"
        start = place.part * shape[0]
        if place.transposed and len(shape) == 2:
            return Link(ours, theirs, shape, (0, start), transposed=True)
        return Link(ours, theirs, shape, (start, *(0,) * (len(shape) - 1)))


_GPT2 = {
    "embedding": Location("transformer.wte"),
    "position_embedding": Location("transformer.wpe"),
    "blocks.attention_norm": Location("transformer.h.{}.ln_1"),
    "blocks.attention.query": Location("transformer.h.{}.attn.c_attn", 0, True),
    "blocks.attention.key": Location("transformer.h.{}.attn.c_attn", 1, True),
    "blocks.attention.value": Location("transformer.h.{}.attn.c_attn", 2, True),
    "blocks.attention.out": Location("transformer.h.{}.attn.c_proj", 0, True),
    "blocks.feed_forward_norm": Location("transformer.h.{}.ln_2"),
    "blocks.feed_forward.up": Location("transformer.h.{}.mlp.c_fc", 0, True),
    "blocks.feed_forward.down": Location("transformer.h.{}.mlp.c_proj", 0, True),
    "norm": Location("transformer.ln_f"),
    "head": Location("lm_head"),
}
_LLAMA = {
    "embedding": Location("model.embed_tokens"),
    "blocks.attention_norm": Location("model.layers.{}.input_layernorm"),
    "blocks.attention.query": Location("model.layers.{}.self_attn.q_proj"),
    "blocks.attention.key": Location("model.layers.{}.self_attn.k_proj"),
    "blocks.attention.value": Location("model.layers.{}.self_attn.v_proj"),
    "blocks.attention.query_norm": Location("model.layers.{}.self_attn.q_norm"),
    "blocks.attention.key_norm": Location("model.layers.{}.self_attn.k_norm"),
    "blocks.attention.out": Location("model.layers.{}.self_attn.o_proj"),
    "blocks.feed_forward_norm": Location("model.layers.{}.post_attention_layernorm"),
    "blocks.feed_forward.gate": Location("model.layers.{}.mlp.gate_proj"),
    "blocks.feed_forward.up": Location("model.layers.{}.mlp.up_proj"),
    "blocks.feed_forward.down": Location("model.layers.{}.mlp.down_proj"),
    "norm": Location("model.norm"),
    "head": Location("lm_head"),
}
FAMILIES = {
    "gpt2": Family("gpt2", "GPT2LMHeadModel", "transformer.", _GPT2, configs.GPT2_SIZES),
    "llama": Family("llama", "LlamaForCausalLM", "model.", _LLAMA, configs.ROTARY_SIZES),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM", "model.", _LLAMA, configs.ROTARY_SIZES),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", "model.", _LLAMA, configs.ROTARY_SIZES),
}


def format_of(config: ModelConfig) -> Family:
    """Return the family that has such a model. Raises: ValueError with what is in the way of the nearest one."""
    misfits = {family.model_type: family.misfits(config) for family in FAMILIES.values()}
    nearest = min(misfits, key=lambda model_type: len(misfits[model_type]))
    if misfits[nearest]:
        raise ValueError(
            f"no family of Hugging Face that is known here ({', '.join(FAMILIES)}) has such a model; the nearest: "
            + "; ".join(misfits[nearest])
        )
    return FAMILIES[nearest]
