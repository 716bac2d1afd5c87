"""The size at which a job is verified: short sequences, small micro-batches, and windows that end within a sequence."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from megamix import tuned
from megamix.config import Config, DecoderConfig, ModelConfig, TransformersConfig

# Longer sequences and larger batches prove nothing more. 2, 3, 4, 6, 8 and 12 ranks divide 24 positions evenly.
SEQ_LEN, MICRO_BATCH_SIZE = 24, 2
_THEIR_WINDOWS = ("sliding_window", "attention_chunk_size")  # in the config.json of transformers' families


def at_own_size(config: Config, overrides: Iterable[str], layouts: Sequence[str] = ()) -> Config:
    """Return the configuration with short sequences and small micro-batches, unless an override sets them. The
    context-parallel ranks of the named layouts can divide the sequences. What reaches beyond a sequence is shortened.
    """
    sizes = [{axis: int(size) for axis, size in re.findall(r"(cp|tp)(\d+)", name)} for name in layouts]
    divided = [tuned.DEALT_CHUNKS * of["cp"] * of.get("tp", 1) for of in sizes if "cp" in of]
    seq_len = -(-SEQ_LEN // math.lcm(*divided)) * math.lcm(*divided)
    given = {text.partition("=")[0].strip() for text in overrides}
    if "model.seq_len" not in given:
        config = config.with_keys(model={"seq_len": min(seq_len, config.model.seq_len)})
    if "training.micro_batch_size" not in given:
        # A product in FP8 takes tokens in multiples of 16, whatever part of a sequence ranks have.
        over_tokens = config.precision.fp8 is not None and config.precision.fp8.weight_grad == "fp8"
        config = config.with_keys(training={"micro_batch_size": 16 if over_tokens else MICRO_BATCH_SIZE})
    shorter = _shortened(config.model, config.model.seq_len)
    kept = {key for key in shorter if any(name.startswith(f"model.{key}") for name in given)}
    return config.with_keys(model={key: value for key, value in shorter.items() if key not in kept})


def size_told(config: Config) -> str:
    """Return the line of the report on the sizes that were verified."""
    model, size = config.model, config.training.micro_batch_size
    told = {"training.micro_batch_size": size, "model.seq_len": model.seq_len, **_reach(model)}
    return f"at {' '.join(f'{key}={value}' for key, value in told.items())} (overrides take another size)"


def _shortened(model: DecoderConfig, seq_len: int) -> dict[str, object]:
    """Return the keys of [model] that reach beyond a sequence, with values that end within it. A window as long as the
    sequence is none: ranks that ignored it would be right.
    """

    def within(length: int) -> int:
        return length if length < seq_len else max(1, seq_len // 3)

    if isinstance(model, TransformersConfig):
        windows = {key: within(size) for key, size in _reach(model).items()}
        return {"config_json": json.dumps(json.loads(model.config_json) | windows)} if windows else {}
    keys = dict[str, object]()
    if isinstance(model, ModelConfig):
        keys["windows"] = tuple(map(within, model.windows))
        if (scaling := model.rope_scaling) is not None:  # of 8192 positions, the first few are hardly stretched
            earlier = {"original_seq_len": min(scaling.original_seq_len, seq_len)}
            keys["rope_scaling"] = scaling.model_copy(update=earlier)
    return keys


def _reach(model: DecoderConfig) -> dict[str, Any]:
    """Return the lengths in a model that may reach beyond a sequence, by the names of their keys."""
    if isinstance(model, TransformersConfig):
        sizes = {key: getattr(model.theirs, key, None) for key in _THEIR_WINDOWS}
        return {key: size for key, size in sizes.items() if size}
    found = dict[str, Any]()
    if isinstance(model, ModelConfig):
        if any(model.windows):
            found["model.windows"] = [*model.windows]
        if model.rope_scaling is not None and model.rope_scaling.rule != "linear":
            found["model.rope_scaling.original_seq_len"] = model.rope_scaling.original_seq_len
    return found
