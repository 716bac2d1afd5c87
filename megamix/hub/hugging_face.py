"""A Hugging Face folder: config.json and safetensors, in one file or in shards, read piece by piece."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megamix.checkpoint.boxes import Box
from megamix.hub.families import FAMILIES, Family
from megamix.hub.links import Link, their_shapes

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_FLOATS = ("F32", "F16", "BF16")
# Buffers that transformers' older versions saved beside the weights; they follow from the configuration.
_NOT_WEIGHTS = re.compile(r"(^|\.)(rotary_emb\.inv_freq|attn\.bias|attn\.masked_bias)$")


class HuggingFaceWeights:
    """A folder whose tensors are those of a family, each with its shape. Reading takes a piece at a time.

    Raises: ValueError naming what is missing, unknown or of another shape; OSError.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.json = read_json(folder / CONFIG)
        self.family = _family(self.json, folder)
        try:
            self.config = self.family.read_config(self.json)
            links = self.family.links(self.config)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from None
        self._links = {link.ours: link for link in links}
        self._files: dict[str, Any] = {}  # open ones, mapped: a header is parsed once
        self._file_of = self._find_tensors()
        # A model saved without its head has names without the base.
        based = any(name.startswith(self.family.base) for name in self._file_of)
        self._base = "" if based else self.family.base
        self._check_tensors(links)

    def read(self, param: str, box: Box) -> Tensor:
        """A box of one of our parameters, FP32."""
        link = self._links[param]
        name = link.theirs.removeprefix(self._base)
        origin = Box((0,) * len(box.size), box.size)
        part: Tensor = self._file(self._file_of[name]).get_slice(name)[link.to_theirs(box).slices_in(origin)]
        return torch.empty(box.size).copy_(part.T if link.transposed else part)

    def _file(self, name: str) -> Any:
        if name not in self._files:
            try:
                self._files[name] = safe_open(self.folder / name, "pt")
            except SafetensorError as error:
                raise ValueError(f"{self.folder / name}: {error}") from None
        return self._files[name]

    def _find_tensors(self) -> dict[str, str]:
        """The file of each tensor, as the files themselves say."""
        names = _file_names(self.folder)
        return {tensor: name for name in names for tensor in self._file(name).keys()}  # noqa: SIM118 (it is no dict)

    def _check_tensors(self, links: list[Link]) -> None:
        want = {name.removeprefix(self._base): shape for name, shape in their_shapes(links).items()}
        problems = [f"missing {name} {list(shape)}" for name, shape in want.items() if name not in self._file_of]
        for name, file in self._file_of.items():
            tensor = self._file(file).get_slice(name)
            shape, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
            tied = name == "lm_head.weight" and self.config.tie_embeddings  # the embedding once more
            if name not in want:
                if not tied and not _NOT_WEIGHTS.search(name):
                    problems.append(f"unknown {name} {list(shape)}")
            elif shape != want[name]:
                problems.append(f"{name} has shape {list(shape)}, config.json makes it {list(want[name])}")
            elif dtype not in _FLOATS:
                problems.append(f"{name} is {dtype}, only {', '.join(_FLOATS)} are read")
        if problems:
            raise ValueError(f"{self.folder}: the tensors are not those of its config.json: " + "; ".join(problems))


def is_hugging_face(path: Path) -> bool:
    return (path / CONFIG).is_file()


def read_json(path: Path) -> dict[str, Any]:
    """Raises: ValueError naming the file."""
    if not path.is_file():
        raise ValueError(f"{path} is missing; give a Hugging Face folder with config.json and safetensors")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no table")
    return content


def _family(content: dict[str, Any], folder: Path) -> Family:
    model_type = content.get("model_type")
    if model_type not in FAMILIES:
        raise ValueError(f"{folder / CONFIG}: model_type is {model_type!r}; what is known here: {', '.join(FAMILIES)}")
    return FAMILIES[str(model_type)]


def _file_names(folder: Path) -> list[str]:
    """The safetensors files of a folder. Raises: ValueError if there are none, or not all of the index's."""
    if (folder / WEIGHTS).is_file():
        return [WEIGHTS]
    if not (folder / INDEX).is_file():
        pickles = sorted(path.name for path in (*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")))
        if pickles:
            raise ValueError(
                f"{folder} has its weights in {pickles[0]}, a pickle, which runs code when it is read; save them as "
                "safetensors (transformers: model.save_pretrained) and give that folder"
            )
        raise ValueError(f"{folder} has neither {WEIGHTS} nor {INDEX}; give a folder with its weights as safetensors")
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{folder / INDEX} has no weight_map of names; copy the folder again")
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise ValueError(f"{folder / INDEX} names {name}, which is not there; copy the folder again")
    return names
