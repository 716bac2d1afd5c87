"""A model becomes a Hugging Face folder: safetensors in shards, config.json, tokenizer."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megamix.checkpoint.boxes import Box, pieces
from megamix.checkpoint.folder import Files, new_folder
from megamix.checkpoint.tensor_file import safetensors_header, tensor_chunks
from megamix.durable import write_text
from megamix.hub.families import Link, family_of, their_shapes
from megamix.hub.family_configs import write_config
from megamix.hub.hugging_face import CONFIG, INDEX, WEIGHTS
from megamix.hub.source import DTYPES, Source, Weights
from megamix.hub.tokenizer_files import copy_generation, copy_tokenizer

SHARD_SIZE = 5 * 10**9  # bytes, as transformers has it; a larger tensor has a shard of its own
_FORMAT = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}


def export_model(
    source: Source, output: Path, dtype: str, shard_size: int = SHARD_SIZE, tokenizer: Path | None = None
) -> int:
    """Write `output`, whole or not at all; the bytes of its tensors. Holds a few pieces of 16 MiB at a time.

    `tokenizer`: a file that goes with it in place of the model's own.

    Raises: ValueError if there is something at `output`, no family has such a model, or a weight is not finite
    or beyond `dtype`;
    OSError.
    """
    with new_folder(output, "OUT:") as aside:
        tokenizer = tokenizer or source.tokenizer
        if tokenizer is not None and not tokenizer.is_file():
            raise ValueError(f"{tokenizer} is missing; start in the folder that the run was started in, or name it")
        family = family_of(source.config)
        size = _write_shards(aside, source.weights, family.links(source.config), dtype, shard_size)
        copy_tokenizer(tokenizer or source.home, aside)
        ids = copy_generation(source.home, aside, tokenizer)
        config = {
            "architectures": [family.architecture], "model_type": family.model_type,
            **write_config(family.model_type, source.config),
            "initializer_range": source.config.init_std, "tie_word_embeddings": source.config.tie_embeddings,
            "torch_dtype": str(DTYPES[dtype]).removeprefix("torch."), **ids,
        }  # fmt: skip
        _write_json(aside / CONFIG, config)
    return size


def _write_shards(folder: Path, weights: Weights, links: list[Link], dtype: str, shard_size: int) -> int:
    itemsize = DTYPES[dtype].itemsize
    shapes = their_shapes(links)
    by_tensor: dict[str, list[Link]] = defaultdict(list)
    for link in links:
        by_tensor[link.theirs].append(link)
    shards = list(_shards(shapes, shard_size // itemsize))
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names if len(shards) > 1 else [WEIGHTS], shards, strict=True):
        head = safetensors_header(shard, _FORMAT[dtype], itemsize, {"format": "pt"})
        Files().write_file(folder / name, _chunks(head, weights, shard, by_tensor, DTYPES[dtype]))
    size = itemsize * sum(map(math.prod, shapes.values()))
    if len(shards) > 1:
        weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        _write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
    return size


def _shards(shapes: Mapping[str, tuple[int, ...]], most: int) -> Iterator[dict[str, tuple[int, ...]]]:
    """Whole tensors of at most `most` elements together."""
    shard: dict[str, tuple[int, ...]] = {}
    held = 0
    for name, shape in shapes.items():
        if shard and held + math.prod(shape) > most:
            yield shard
            shard, held = {}, 0
        shard[name] = shape
        held += math.prod(shape)
    yield shard


def _chunks(
    head: bytes, weights: Weights, shapes: Mapping[str, tuple[int, ...]], links: Mapping[str, list[Link]],
    dtype: torch.dtype,
) -> Iterator[memoryview]:  # fmt: skip
    yield memoryview(head)
    for name, shape in shapes.items():
        for piece in pieces(Box.whole(shape)):  # in order, so that one after the other they are the tensor
            part = _read(weights, links[name], piece)
            largest = float(torch.stack(part.aminmax()).abs().max())  # without a copy of the piece; NaN if there is one
            if not math.isfinite(largest):
                raise ValueError(
                    f"{name} has a weight of {largest}: the model is damaged; export an earlier checkpoint"
                )
            if largest > torch.finfo(dtype).max:
                wider = "bf16 or fp32" if dtype == torch.float16 else "fp32"
                raise ValueError(
                    f"{name} has a weight of {largest:.6g}, {dtype} ends at {torch.finfo(dtype).max:g}; export with "
                    f"--dtype {wider}"
                )
            yield from tensor_chunks(part.to(dtype).view(-1))


def _read(weights: Weights, links: list[Link], piece: Box) -> Tensor:
    """A piece of one of their tensors out of our parameters that lie in it, FP32."""
    out = torch.empty(piece.size)
    for link in links:
        if common := piece.intersection(link.region):
            ours = weights.read(link.ours, link.to_ours(common))
            out[common.slices_in(piece)] = ours.T if link.transposed else ours
    return out


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=2) + "\n")
