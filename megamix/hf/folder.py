"""A Hugging Face folder: config.json and safetensors, in one file or in shards, read box by box."""

import logging
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from megamix.base.git_lfs import refuse_pointer
from megamix.checkpoint.boxes import Box, sub_boxes
from megamix.checkpoint.manifest import naming
from megamix.hf.links import Link, formats, links_of, their_shapes
from megamix.hf.place import CONFIG, read_json
from megamix.model.formats import OTHERS, Keys, shown

log = logging.getLogger("megamix")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = ("F32", "F16", "BF16")
_TOLD = 8  # tensors that a message names
# Buffers that older versions of transformers saved beside the weights; they follow from the configuration.
_NOT_WEIGHTS = re.compile(r"(^|\.)(rotary_emb\.inv_freq|attn\.bias|attn\.masked_bias)$")
_WRAPPERS = re.compile(r"^(module\.)+|\b_orig_mod\.")  # of DistributedDataParallel and torch.compile


class HuggingFaceWeights:
    """The weights of a folder whose tensors have the names and shapes of a format. They are read a box at a time.

    Raises: ValueError naming tensors that are missing, unknown or of another shape; OSError.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.json = Keys(read_json(folder / CONFIG))
        known = formats()
        if (model_type := self.json.get("model_type")) not in known:
            raise ValueError(
                f"{folder / CONFIG}: model_type is {shown(model_type)}; known are: {', '.join(known)}; {OTHERS}"
            )
        self.form = known[model_type]
        with naming(folder):
            self.config = self.form.read(self.json)
            links = links_of(self.form, self.config)
        self._slices = dict[str, Any]()
        wrapped = list[str]()
        file_names = _file_names(folder)
        for file in file_names:
            refuse_pointer(folder / file)
            with naming(folder / file):
                opened: Any = safe_open(folder / file, "pt")
            for stored in opened.keys():  # noqa: SIM118  # it is no mapping, and cannot be iterated
                name = _WRAPPERS.sub("", stored)
                if name in self._slices:
                    raise ValueError(f"{folder} has a second tensor in place of {name}; leave one of them out")
                self._slices[name] = opened.get_slice(stored)
                if name != stored:
                    wrapped.append(stored)
        # A model saved without its head has names without the prefix.
        based = any(name.startswith(self.form.base) for name in self._slices)
        self._base = "" if based else self.form.base
        self._links = dict[str, list[Link]]()
        for link in links:
            self._links.setdefault(link.ours, []).append(link)
        self._check_tensors(links)
        unread = sorted({path.name for path in folder.glob("*.safetensors")}.difference(file_names))
        buffers = [name for name in self._slices if _NOT_WEIGHTS.search(name)]
        for names, what in (
            (wrapped, "names of tensors are read without the prefixes of wrappers"),
            (unread, "files are not read"),
            (buffers, f"buffers are not read, as they follow from {CONFIG}"),
            (self.json.unread(), f"keys of {CONFIG} are not read"),
        ):
            if names:
                log.warning("%s: %s (%d): %s", folder, what, len(names), ", ".join(names[:_TOLD]))

    def read(self, param: str, box: Box) -> Tensor:
        """Return a box of one of our parameters. Shapes: FP32 (*box.size)."""
        links = self._links[param]
        if links[0].number is None:
            return torch.empty(box.size).copy_(self._part(links[0], box))
        linked = links[box.offset[0] : box.end[0]]
        return torch.stack([self._part(link, box).float() for link in linked])

    def _part(self, link: Link, box: Box) -> Tensor:
        origin = Box((0,) * len(link.shape), box.size[-len(link.shape) :])
        part: Tensor = self._slices[link.theirs.removeprefix(self._base)][link.to_theirs(box).slices_in(origin)]
        return part.T if link.transposed else part

    def where(self, param: str, place: tuple[int, ...]) -> str:
        links = self._links[param]
        link = links[0] if links[0].number is None else links[place[0]]
        theirs = link.to_theirs(Box(place, (1,) * len(place))).offset
        return f"{link.theirs.removeprefix(self._base)} {list(theirs)}"

    def _check_tensors(self, links: list[Link]) -> None:
        want = {name.removeprefix(self._base): shape for name, shape in their_shapes(links).items()}
        problems = [f"missing {name} {list(shape)}" for name, shape in want.items() if name not in self._slices]
        embedding = f"{self.form.places['embedding'].name}.weight".removeprefix(self._base)
        head = f"{self.form.places['head'].name}.weight"
        for name, tensor in self._slices.items():
            shape, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
            if name not in want:
                if name == head and self.config.tie_embeddings and embedding in self._slices:
                    if not self._equal(head, embedding):
                        problems.append(f"{head} is not {embedding}: write tie_word_embeddings = false into {CONFIG}")
                elif not _NOT_WEIGHTS.search(name):
                    problems.append(f"unknown {name} {list(shape)}")
            elif shape != want[name]:
                problems.append(f"{name} has shape {list(shape)}, config.json makes it {list(want[name])}")
            elif dtype not in _FLOATS:
                problems.append(f"{name} is {dtype}, only {', '.join(_FLOATS)} are read")
        if problems:
            more = f"; and {len(problems) - _TOLD} more" if len(problems) > _TOLD else ""
            absent = [key for key in (*self.form.size_keys.values(), "tie_word_embeddings") if key not in self.json]
            more += f"; that file lacks {', '.join(absent)}: are the defaults right?" if absent else ""
            raise ValueError(
                f"{self.folder}: the tensors are not those of its config.json: {'; '.join(problems[:_TOLD])}{more}"
            )

    def _equal(self, one: str, other: str) -> bool:
        first, second = self._slices[one], self._slices[other]
        whole = Box.whole(tuple(first.get_shape()))
        parts = (part.slices_in(whole) for part in sub_boxes(whole))
        return all(torch.equal(first[part].float(), second[part].float()) for part in parts)


def _file_names(folder: Path) -> list[str]:
    """Return the names of a folder's safetensors files. Raises: ValueError if there is none, or one of the index is
    missing.
    """
    if (folder / WEIGHTS).is_file():
        return [WEIGHTS]
    if not (folder / INDEX).is_file():
        pickles = [path.name for path in sorted(folder.iterdir()) if path.suffix in (".bin", ".pt", ".pth")]
        if pickles:
            raise ValueError(
                f"{folder} has its weights in {pickles[0]}, a pickle, which runs code when it is read; save them as "
                "safetensors (transformers: model.save_pretrained) and give that folder"
            )
        raise ValueError(f"{folder} has neither {WEIGHTS} nor {INDEX}; give a folder with its weights as safetensors")
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{folder / INDEX} has no weight_map of names; copy the folder again")
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise ValueError(f"{folder / INDEX} names {name}, which is no file of the folder; copy the folder again")
    return names
