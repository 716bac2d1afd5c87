"""A Hugging Face folder becomes a folder that a run begins from: a checkpoint of the weights alone, the section
[model] to build on, and the tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megamix.checkpoint.boxes import Box, pieces
from megamix.checkpoint.folder import CHECKPOINTS, Files, new_folder
from megamix.checkpoint.manifest import MASTER, LayoutRecord, Manifest, ParamRecord, RunRecord
from megamix.checkpoint.save import begin, commit, write_rank
from megamix.checkpoint.snapshot import Snapshot, StateBox
from megamix.checkpoint.tensor_file import header, tensor_chunks
from megamix.config import ModelConfig, section_to_toml
from megamix.config.toml_text import value_text
from megamix.durable import write_text
from megamix.hub.families import param_shapes
from megamix.hub.hugging_face import HuggingFaceWeights
from megamix.hub.source import WatchedWeights, Weights
from megamix.hub.tokenizer_files import TOKENIZER, copy_generation, copy_tokenizer, tokenizer_in

MODEL = "model.toml"
FILE_SIZE = 1 << 30  # bytes of one file at most: all ranks share in reading them


def import_model(folder: Path, output: Path, file_size: int = FILE_SIZE, *, allow_non_finite: bool = False) -> str:
    """Write `output`, whole or not at all; the path of the checkpoint in it. Holds a few pieces of 16 MiB at a time.

    Raises: ValueError if the folder does not hold a model that ours can be, a weight is not finite and may not be, or
    `output` is there; OSError.
    """
    with new_folder(output, "--output") as aside:
        weights = HuggingFaceWeights(folder)
        copy_tokenizer(folder, aside)
        copy_generation(folder, aside, tokenizer_in(folder))
        config = section_to_toml("model", weights.config)
        if tokenizer_in(aside):
            config += f"\n[data]\ntokenizer = {value_text(str(output / TOKENIZER))}\n"
        watched = WatchedWeights(weights)
        name = _write_checkpoint(aside / CHECKPOINTS, weights.config, watched, config, file_size)
        watched.judge(allow_non_finite)
        checkpoint = str(output / CHECKPOINTS / name)
        write_text(aside / MODEL, f"{config}\n[checkpoint]\nresume = {value_text(checkpoint)}\n")
    return checkpoint


def _write_checkpoint(folder: Path, model: ModelConfig, weights: Weights, config: str, file_size: int) -> str:
    """Its name. Committed as a save of a run is."""
    shapes = param_shapes(model)
    tied = ("head.weight",) if model.tie_embeddings else ()
    manifest = Manifest(
        applied_updates=0, skipped_steps=0, loss_scale={}, run=RunRecord(config=config),
        layout=LayoutRecord(dp_size=1, buckets=()), states=(MASTER,),
        params=tuple(
            ParamRecord(name=name, shape=shape, aliases=tied if name == "embedding.weight" else ())
            for name, shape in shapes.items()
        ),
    )  # fmt: skip
    files = Files()
    begun = folder / begin(folder, Snapshot(manifest, []), files)
    written = [
        write_rank(begun, number, _chunks(boxes, weights), files)
        for number, boxes in enumerate(_files_of(shapes, file_size))
    ]
    return commit(begun, manifest, written, files)


def _files_of(shapes: dict[str, tuple[int, ...]], file_size: int) -> Iterator[list[StateBox]]:
    """Which boxes each file holds; a parameter larger than a file is cut."""
    held: list[StateBox] = []
    room = most = file_size // 4  # elements
    for name, shape in shapes.items():
        for box in pieces(Box.whole(shape), most):
            if held and box.numel > room:
                yield held
                held, room = [], most
            held.append(StateBox(name, MASTER, box))
            room -= box.numel
    yield held


def _chunks(boxes: list[StateBox], weights: Weights) -> Iterator[memoryview]:
    yield memoryview(header(boxes))
    for part in boxes:
        for piece in pieces(part.box):  # in order, so that one after the other they are the box
            yield from tensor_chunks(weights.read(part.param, piece).view(-1))
