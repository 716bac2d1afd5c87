"""The size at which a job is verified: short sequences, small micro-batches, and windows that end within a sequence."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from megamix.base import constants
from megamix.config import Config, DecoderConfig, Llama3Scaling, ModelConfig, TransformersConfig, YarnScaling

# Longer sequences and larger batches prove nothing more. 2, 3, 4, 6, 8 and 12 ranks divide 24 positions evenly.
SEQ_LEN, MICRO_BATCH_SIZE = 24, 2
_SIZES, _EARLIER = "model.window.sizes", "model.rope.scaling.original_seq_len"
_THEIR_WINDOWS = ("sliding_window", "attention_chunk_size")  # in the config.json of transformers' families


def at_own_size(config: Config, overrides: Iterable[str], layouts: Sequence[str] = ()) -> Config:
    """Return the configuration with short sequences and small micro-batches, unless an override sets them. The
    context-parallel ranks of the named layouts can divide the sequences. What reaches beyond a sequence is shortened.
    """
    sizes = [{axis: int(size) for axis, size in re.findall(r"(cp|tp)(\d+)", name)} for name in layouts]
    divided = [constants.DEALT_CHUNKS * of["cp"] * of.get("tp", 1) for of in sizes if "cp" in of]
    seq_len = -(-SEQ_LEN // math.lcm(*divided)) * math.lcm(*divided)
    given = {text.partition("=")[0].strip() for text in overrides}
    if "model.seq_len" not in given:
        config = config.with_keys(model={"seq_len": min(seq_len, config.model.seq_len)})
    if "training.micro_batch_size" not in given:
        # A product in FP8 takes tokens in multiples of 16, whatever part of a sequence ranks have.
        over_tokens = config.precision.fp8 is not None and config.precision.fp8.weight_grad == "fp8"
        config = config.with_keys(training={"micro_batch_size": 16 if over_tokens else MICRO_BATCH_SIZE})
    for key, reach in _reach(config.model).items():
        if not any(f"{key}.".startswith(f"{name}.") for name in given):  # of the key, or of a table that it is in
            config = config.with_keys(model=_shortened(config.model, key, reach))
    return config


def size_told(config: Config) -> str:
    """Return the line of the report on the sizes that were verified."""
    model, size = config.model, config.training.micro_batch_size
    told = {"training.micro_batch_size": size, "model.seq_len": model.seq_len, **_reach(model)}
    return f"at {' '.join(f'{key}={value}' for key, value in told.items())} (overrides take another size)"


def _shortened(model: Any, key: str, reach: Any) -> dict[str, object]:
    """Return a key of [model] that reaches beyond a sequence, with a value that ends within it. A window as long as the
    sequence is none: ranks that ignored it would be right.
    """

    def within(length: int) -> int:
        return length if length < model.seq_len else max(1, model.seq_len // 3)

    if key == _SIZES:
        return {"window": model.window.model_copy(update={"sizes": tuple(map(within, reach))})}
    if key == _EARLIER:
        earlier = {"original_seq_len": min(reach, model.seq_len)}  # the first of 8192 are hardly stretched
        return {"rope": model.rope.model_copy(update={"scaling": model.rope.scaling.model_copy(update=earlier)})}
    return {"config_json": json.dumps(json.loads(model.config_json) | {key: within(reach)})}


def _reach(model: DecoderConfig) -> dict[str, Any]:
    """Return the lengths in a model that may reach beyond a sequence, by the names of their keys."""
    if isinstance(model, TransformersConfig):
        sizes = {key: getattr(model.theirs, key, None) for key in _THEIR_WINDOWS}
        return {key: size for key, size in sizes.items() if size}
    found = dict[str, Any]()
    if isinstance(model, ModelConfig):
        if model.window is not None and any(model.window.sizes):
            found[_SIZES] = [*model.window.sizes]
        scaling = model.rope and model.rope.scaling
        if isinstance(scaling, Llama3Scaling | YarnScaling):
            found[_EARLIER] = scaling.original_seq_len
    return found
