"""A model by its path: a run's folder, an imported folder, a checkpoint, or a Hugging Face folder.

Weights that are NaN or inf are reported by tensor: a single one makes every loss and every text of the model NaN.
"""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from pydantic import ValidationError
from torch import Tensor

from megamix.checkpoint.boxes import Box, sub_boxes
from megamix.checkpoint.folder import MANIFEST
from megamix.checkpoint.manifest import AVERAGE, BUFFER, MASTER, DamagedCheckpoint, naming
from megamix.checkpoint.verify import Checkpoint, verify_named
from megamix.config import ConfigError, DecoderConfig
from megamix.hf.folder import HuggingFaceWeights
from megamix.hf.place import find_model, is_hugging_face
from megamix.hf.tokenizer_files import GENERATION, tokenizer_in
from megamix.launch.run_folder import RESUME_WORDS
from megamix.model.family import family_of, section_of
from megamix.model.formats import first_problem
from megamix.model.language_model import LanguageModel
from megamix.train.run_record import check_if_run, check_params

log = logging.getLogger("megamix")
_TOLD = 8  # tensors that a message names
_OF_TORCH = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


class Weights(Protocol):
    """The parameters of a model on the disk, by our names, read a box at a time."""

    def read(self, param: str, box: Box) -> Tensor:
        """Return a box of a parameter. Shapes: FP32 (*box.size)."""

    def where(self, param: str, place: tuple[int, ...]) -> str:
        """Return the name and index by which the files know an element of a parameter."""


class WatchedWeights:
    """Weights that count the values read that are not finite."""

    def __init__(self, weights: Weights):
        self._weights = weights
        self._found = dict[str, tuple[int, str]]()  # by parameter: number of such values, and the first one in words

    def read(self, param: str, box: Box) -> Tensor:
        values = self._weights.read(param, box)
        wrong = ~torch.isfinite(values)
        if count := int(wrong.sum()):
            place = wrong.nonzero()[0] + torch.tensor(box.offset)
            first = f"{float(values[wrong][0])} at {self._weights.where(param, tuple(place.tolist()))}"
            before, first = self._found.get(param, (0, first))
            self._found[param] = before + count, first
        return values

    def judge(self, allow: bool) -> None:
        """Refuse, or log if `allow`, values that are not finite. Call it after all is read. Raises: ValueError with the
        tensors' names.
        """
        if not self._found:
            return
        lines = [f"{count:,}, the first {first}" for count, first in self._found.values()]
        more = f"; and {len(lines) - _TOLD} more parameters" if len(lines) > _TOLD else ""
        told = f"weights that are not finite: {'; '.join(lines[:_TOLD])}{more}"
        if not allow:
            raise ValueError(f"{told}; the model is damaged: get it again, or accept it with --allow-non-finite")
        log.warning(told)


@dataclass(frozen=True, slots=True)
class Source:
    """A model on the disk."""

    path: Path  # the checkpoint or Hugging Face folder itself
    config: DecoderConfig
    weights: Weights
    dtype: str  # the dtype in which it was trained
    tokenizer: Path | None  # file of its own tokenizer
    # the run's token files by validation set ("": one without a name); empty unless each set is a single file
    valid: dict[str, str] = field(default_factory=dict)
    began: Path | None = None  # the checkpoint that its run began from
    # shapes of the buffers that are saved, such as the biases of a router; a Hugging Face folder has none
    buffers: dict[str, tuple[int, ...]] = field(default_factory=dict)
    text: str | None = None  # the configuration in the checkpoint; None: no checkpoint

    @property
    def home(self) -> Path:
        """Return the folder of its own tokenizer and of its settings of generation, if it has any."""
        if is_hugging_face(self.path):
            return self.path
        model = (self.began or self.path).parent.parent
        return model if self.tokenizer is None or (model / GENERATION).is_file() else self.tokenizer.parent

    def load(self, dtype: torch.dtype, device: torch.device, *, allow_non_finite: bool = False) -> LanguageModel:
        """Return the model with its weights, for inference. Raises: ValueError if one is not finite, unless allowed."""
        watched = WatchedWeights(self.weights)
        model = family_of(self.config).on_meta(self.config).to(dtype).to_empty(device=device)
        model.tie()
        with torch.no_grad():
            saved = [(name, buffer) for name, buffer in model.named_buffers() if name in self.buffers]
            for name, buffer in saved:
                if tuple(buffer.shape) != self.buffers[name]:
                    raise ValueError(f"{self.path}: {name} is {self.buffers[name]}, the model's {tuple(buffer.shape)}")
            for name, param in (*model.named_parameters(), *saved):
                whole = Box.whole(tuple(param.shape))
                for sub_box in sub_boxes(whole):
                    param[sub_box.slices_in(whole)].copy_(watched.read(name, sub_box))
        watched.judge(allow_non_finite)
        return model.requires_grad_(False).eval()


class CheckpointWeights:
    """The masters of a checkpoint or their average, and its buffers."""

    def __init__(self, checkpoint: Checkpoint, state: str = MASTER):
        self._checkpoint, self._state = checkpoint, state

    def read(self, param: str, box: Box) -> Tensor:
        state = self._state if (param, self._state) in self._checkpoint.stored else BUFFER
        return self._checkpoint.gather(param, state, box)

    def where(self, param: str, place: tuple[int, ...]) -> str:
        return f"{param} {list(place)}"


def open_source(path: Path, *, average: bool = False) -> Source:
    """Open a model by its path; for a run or an imported folder its newest checkpoint. `average`: the average of its
    weights.

    Raises: ValueError naming what is missing; DamagedCheckpoint.
    """
    path = find_model(path)
    none = f"--average: {path} has no average of its weights, which a job with [training.average] keeps; leave it out"
    if is_hugging_face(path):
        if average:
            raise ValueError(none)
        weights = HuggingFaceWeights(path)
        saved = weights.json.get("dtype") or weights.json.get("torch_dtype")
        dtype = _OF_TORCH.get(str(saved), "fp32")
        return Source(path, weights.config, weights, dtype, tokenizer_in(path))
    try:
        checkpoint = verify_named(path, check_if_run)
    except ConfigError as error:
        raise ValueError(error.problems[0]) from None
    if average and not any(AVERAGE in states for states in checkpoint.manifest.states):
        raise ValueError(none)
    return _of_checkpoint(checkpoint, AVERAGE if average else MASTER)


def _of_checkpoint(checkpoint: Checkpoint, state: str) -> Source:
    manifest = checkpoint.manifest
    if not (manifest.run.config or manifest.weights_only):
        other = "`megamix checkpoint export` hands on its weights"
        raise ValueError(f"{checkpoint.path} is a checkpoint of the library, without [model]; {other}")
    try:
        tables = manifest.run.tables()
        keys = tables.get("model", {})
        config = section_of(keys).model_validate(keys)
    except ValueError as error:
        wrong = f"its configuration: model.{first_problem(error, {})}" if isinstance(error, ValidationError) else error
        raise DamagedCheckpoint([f"{checkpoint.path / MANIFEST}: {wrong}"]) from None
    data, resume = tables.get("data", {}), tables.get("checkpoint", {}).get("resume")
    tokenizer, dtype = data.get("tokenizer"), tables.get("precision", {}).get("dtype", "fp32")
    with naming(checkpoint.path):
        check_params(manifest, config)
        buffers = {param.name: param.shape for param in manifest.params if BUFFER in manifest.states[param.state_set]}
    return Source(
        checkpoint.path, config, CheckpointWeights(checkpoint, state), dtype,
        None if tokenizer is None else Path(tokenizer), _prefixes(data.get("valid")),
        None if resume in (None, *RESUME_WORDS) else Path(resume), buffers, manifest.run.config,
    )  # fmt: skip


def _prefixes(valid: object) -> dict[str, str]:
    """Return the token file of each set of data.valid, by the set's name; empty unless each set is a single file."""
    sets = valid if isinstance(valid, dict) else {"": valid}
    found = {}
    for name, sources in sets.items():
        match sources:
            case str(path) | [{"path": str(path)}]:
                found[name] = path
    return found if len(found) == len(sets) else {}
