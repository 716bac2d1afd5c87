"""Import and export. An import turns a Hugging Face folder into a folder that a run begins from: a checkpoint of the
weights alone, the section [model] to base a job on, and the tokenizer. An export turns a model into a Hugging Face
folder: safetensors in shards, config.json, tokenizer.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import torch
from torch import Tensor

from megamix.base.durable import write_text
from megamix.base.progress import ProgressLine
from megamix.checkpoint.boxes import Box, sub_boxes
from megamix.checkpoint.folder import CHECKPOINTS, Files, new_folder
from megamix.checkpoint.manifest import (
    BUFFER,
    MASTER,
    OF_BUFFER,
    UNTRAINED,
    LayoutRecord,
    Manifest,
    ParamRecord,
    RunRecord,
)
from megamix.checkpoint.save import begin, commit, write_rank
from megamix.checkpoint.snapshot import DTYPE_NAMES, Snapshot, StateBox
from megamix.checkpoint.tensor_file import key_of, safetensors_header, tensor_chunks
from megamix.config import DecoderConfig
from megamix.config.toml_text import tables_to_toml, value_text
from megamix.data.json_table import write_table
from megamix.hf.folder import INDEX, WEIGHTS, HuggingFaceWeights
from megamix.hf.links import Link, format_of, links_of, their_shapes
from megamix.hf.place import CONFIG
from megamix.hf.source import Source, WatchedWeights, Weights
from megamix.hf.tokenizer_files import copy_generation, copy_tokenizer, tokenizer_in
from megamix.model.family import family_of
from megamix.model.transformers_model import TransformersModel
from megamix.train.objects import DTYPES

T = TypeVar("T")

MODEL = "model.toml"
FILE_SIZE = 1 << 30  # bytes of a file at most: ranks share the reading by files


def import_model(
    folder: Path,
    output: Path,
    *,
    allow_non_finite: bool = False,
    progress: ProgressLine | None = None,
) -> str:
    """Write `output`, whole or not at all. Return the path of the checkpoint in it. Memory holds a few boxes of 16 MiB
    at a time.

    Raises: ValueError if the folder holds no model that we can compute, if a weight is not finite and that is not
    allowed, or if `output` exists; OSError.
    """
    with new_folder(output, "--output") as aside:
        weights = HuggingFaceWeights(folder)
        copy_tokenizer(folder, aside)
        copy_generation(folder, aside, tokenizer_in(folder))
        config = tables_to_toml({"model": weights.config.model_dump()})
        if (tokenizer := tokenizer_in(aside)) is not None:
            config += f"\n[data]\ntokenizer = {value_text(str(output / tokenizer.name))}\n"
        name = write_checkpoint(
            aside / CHECKPOINTS, weights.config, weights, config, progress or ProgressLine(), allow_non_finite
        )
        checkpoint = str(output / CHECKPOINTS / name)
        write_text(aside / MODEL, f"{config}\n[checkpoint]\nresume = {value_text(checkpoint)}\n")
    return checkpoint


def write_checkpoint(
    folder: Path,
    model: DecoderConfig,
    weights: Weights,
    config: str,
    progress: ProgressLine,
    allow_non_finite: bool = False,
    buffers: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> str:
    """Write a checkpoint of the weights, and commit it as a run's save is. Return its name. `buffers`: shapes of those
    that are written, too, in FP32.

    Raises: ValueError if a weight is not finite and that is not allowed; OSError.
    """
    watched = WatchedWeights(weights)
    shapes = {**family_of(model).shapes(model), **buffers}
    states = (UNTRAINED, OF_BUFFER) if buffers else (UNTRAINED,)
    progress.begin("writing the weights", total=sum(map(math.prod, shapes.values())))
    aliases = family_of(model).aliases(model)
    manifest = Manifest(
        applied_updates=0, skipped_steps=0, loss_scale={}, run=RunRecord(config=config),
        layout=LayoutRecord(axes={"dp": 1}, buckets=()), states=states,
        params=tuple(
            ParamRecord(
                name=name, shape=shape, aliases=tuple(sorted(aliases.get(name, ()))), states=int(name in buffers)
            )
            for name, shape in shapes.items()
        ),
    )  # fmt: skip
    files = Files()
    begun = folder / begin(folder, 0, Snapshot(manifest, []).largest_size, files)
    most = FILE_SIZE // 4  # elements of a file; a larger parameter is cut
    parts = (
        StateBox(name, BUFFER if name in buffers else MASTER, box)
        for name, shape in shapes.items()
        for box in sub_boxes(Box.whole(shape), most)
    )
    written = [
        write_rank(begun, number, _box_chunks(boxes, watched, progress), files)
        for number, boxes in enumerate(_filled(parts, lambda part: part.box.numel, most))
    ]
    watched.judge(allow_non_finite)
    return commit(begun, manifest, written, files)


def _filled(items: Iterable[T], numel: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Yield the items of each file, in order: at most `most` elements together, or a single item."""
    held = list[T]()
    room = most
    for item in items:
        if held and numel(item) > room:
            yield held
            held, room = [], most
        held.append(item)
        room -= numel(item)
    yield held


def _box_chunks(boxes: list[StateBox], weights: WatchedWeights, progress: ProgressLine) -> Iterator[memoryview]:
    yield memoryview(safetensors_header({key_of(part): ("F32", part.box.size) for part in boxes}))
    for part in boxes:
        for sub_box in sub_boxes(part.box):  # in order: their bytes one after the other are the box's
            yield from tensor_chunks(weights.read(part.param, sub_box).view(-1))
            progress.advance(sub_box.numel)


SHARD_SIZE = 5 * 10**9  # bytes of a shard, as in transformers; a larger tensor has a shard of its own


def export_model(
    source: Source,
    output: Path,
    dtype: str,
    shard_size: int = SHARD_SIZE,
    tokenizer: Path | None = None,
    progress: ProgressLine | None = None,
) -> int:
    """Write `output`, whole or not at all. Return the bytes of its tensors. Memory holds a few boxes of 16 MiB at a
    time.

    `tokenizer`: a file to copy in place of the model's own.

    Raises: ValueError if `output` exists, no format can express the model, or a weight is not finite or beyond the
    range of `dtype`; OSError.
    """
    with new_folder(output, "OUT:") as aside:
        config, tokenizer = source.config, tokenizer or source.tokenizer
        if tokenizer is not None and not tokenizer.is_file():
            raise ValueError(f"{tokenizer} is missing; start in the folder that the run was started in, or name it")
        copy_tokenizer(tokenizer or source.home, aside)
        if family_of(config) is TransformersModel:
            return _save_theirs(source, aside, DTYPES[dtype], shard_size)
        form = format_of(config)
        links = links_of(form, config)
        size = _write_shards(aside, source.weights, links, DTYPES[dtype], shard_size, progress or ProgressLine())
        ids = copy_generation(source.home, aside, tokenizer)
        write_table(aside / CONFIG, {
            "architectures": [form.architecture], "model_type": form.model_type,
            **form.write(config),
            "initializer_range": config.init_std, "tie_word_embeddings": config.tie_embeddings,
            "torch_dtype": str(DTYPES[dtype]).removeprefix("torch."), **ids,
        })  # fmt: skip
    return size


def _save_theirs(source: Source, folder: Path, dtype: torch.dtype, shard_size: int) -> int:
    """Write a model of transformers by its own function. Memory holds the whole model."""
    model = source.load(torch.float32, torch.device("cpu"))
    assert isinstance(model, TransformersModel)
    for name, param in model.named_parameters():
        _check_range(name, param, dtype)
    model.to(dtype).save(folder, shard_size)
    return sum(param.nbytes for param in model.parameters())


def _write_shards(
    folder: Path, weights: Weights, links: list[Link], dtype: torch.dtype, shard_size: int, progress: ProgressLine
) -> int:
    shapes = their_shapes(links)
    numel = sum(map(math.prod, shapes.values()))
    progress.begin("writing the weights", total=numel)
    by_tensor = defaultdict[str, list[Link]](list)
    for link in links:
        by_tensor[link.theirs].append(link)

    def chunks(shard: dict[str, tuple[int, ...]]) -> Iterator[memoryview]:
        tensors = {name: (DTYPE_NAMES[str(dtype)], shape) for name, shape in shard.items()}
        yield memoryview(safetensors_header(tensors, {"format": "pt"}))
        for name, shape in shard.items():
            for sub_box in sub_boxes(Box.whole(shape)):  # in order: their bytes one after the other are the tensor's
                part = _read(weights, by_tensor[name], sub_box)
                _check_range(name, part, dtype)
                yield from tensor_chunks(part.to(dtype).view(-1))
                progress.advance(sub_box.numel)

    filled = _filled(shapes.items(), lambda tensor: math.prod(tensor[1]), shard_size // dtype.itemsize)
    shards = [dict(tensors) for tensors in filled]
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names if len(shards) > 1 else [WEIGHTS], shards, strict=True):
        Files().write_file(folder / name, chunks(shard))
    size = dtype.itemsize * numel
    if len(shards) > 1:
        weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        write_table(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
    return size


def _check_range(name: str, part: Tensor, dtype: torch.dtype) -> None:
    """Refuse elements that are not finite, or beyond the end of `dtype`. Raises: ValueError."""
    largest = float(torch.stack(part.aminmax()).abs().max())  # copies nothing; NaN if any element is
    if not math.isfinite(largest):
        raise ValueError(f"{name} has a weight of {largest}: the model is damaged; export an earlier checkpoint")
    if largest > torch.finfo(dtype).max:
        wider = "bf16 or fp32" if dtype == torch.float16 else "fp32"
        raise ValueError(
            f"{name} has a weight of {largest:.6g}, {dtype} ends at {torch.finfo(dtype).max:g}; export with "
            f"--dtype {wider}"
        )


def _read(weights: Weights, links: list[Link], sub_box: Box) -> Tensor:
    """Return a box of a Hugging Face tensor in FP32, put together from our parameters that lie in it."""
    out = torch.empty(sub_box.size)
    for link in links:
        if common := sub_box.intersection(link.region):
            ours = weights.read(link.ours, link.to_ours(common))
            # torch drops the first dim of a stack's box, which is 1.
            out[common.slices_in(sub_box)] = ours.T if link.transposed else ours
    return out
