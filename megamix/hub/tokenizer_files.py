"""What belongs to a tokenizer in a Hugging Face folder, and which tokens end a text."""

import contextlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megamix.data.tokenizer import open_tokenizer
from megamix.durable import write_text
from megamix.hub.place import CONFIG, read_json
from megamix.model.formats import shown

TOKENIZER, SENTENCEPIECE, GENERATION = "tokenizer.json", "tokenizer.model", "generation_config.json"
_SETTINGS = "tokenizer_config.json"
_FILES = (
    TOKENIZER, _SETTINGS, "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt",
    SENTENCEPIECE, "chat_template.jinja",
)  # fmt: skip
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def tokenizer_in(folder: Path) -> Path | None:
    """Return the file to open, if the folder has it."""
    path = folder / TOKENIZER
    return path if path.is_file() else None


def copy_tokenizer(place: Path, output: Path) -> None:
    """`place`: a folder, of which everything that belongs to a tokenizer is taken as it is; or a tokenizer's file, with
    its folder's others if it has its usual name, else alone, under that name: the others are another tokenizer's.

    A tokenizer.json without settings gets those that it needs.
    """
    usual_name = SENTENCEPIECE if place.suffix == ".model" else TOKENIZER
    if place.is_file() and place.name != usual_name:
        shutil.copyfile(place, output / usual_name)  # the user has named it
    else:
        folder = place.parent if place.is_file() else place
        for name in _FILES:
            if _is_own_file(folder / name):
                shutil.copyfile(folder / name, output / name)
    if (output / TOKENIZER).is_file() and not (output / _SETTINGS).exists():
        settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
        with contextlib.suppress(ValueError):  # it cannot be opened here, or no end token is known
            settings["eos_token"] = open_tokenizer(output / TOKENIZER).end_token
        write_text(output / _SETTINGS, json.dumps(settings, indent=2) + "\n")


def _is_own_file(path: Path) -> bool:
    """Whether it is there. Raises: ValueError if it is no file, or a link to one elsewhere: a folder from the net must
    not make its reader publish a file of his own. A cache of Hugging Face links to `blobs` beside `snapshots`.
    """
    if not path.is_symlink() and not path.exists():
        return False
    if not path.is_file():
        raise ValueError(f"{path} is no file; remove it")
    real, folder = path.resolve(), path.parent.resolve()
    if real.parent not in (folder, folder.parent.parent / "blobs"):
        raise ValueError(f"{path} is a link to {real}, which is outside the folder; copy that file in its place")
    return True


def copy_generation(folder: Path, output: Path, tokenizer: Path | None) -> dict[str, Any]:
    """Settings of generation, with the ids of special tokens in any case; the ids."""
    ids = special_ids(folder, tokenizer)
    settings = read_json(folder / GENERATION) if (folder / GENERATION).is_file() else {}
    write_text(output / GENERATION, json.dumps({**settings, **ids}, indent=2) + "\n")
    return ids


def special_ids(folder: Path, tokenizer: Path | None) -> dict[str, Any]:
    """Return what begins, ends and pads a text: each an id, several, or None. By the folder's settings of generation or
    its config.json or, where neither says so, by the end token of the tokenizer's file.
    """
    ids: dict[str, Any] = dict.fromkeys(_IDS)
    for name in (CONFIG, GENERATION):
        if (folder / name).is_file():
            told = {key: value for key, value in read_json(folder / name).items() if key in _IDS and value is not None}
            for key, value in told.items():
                several = value if isinstance(value, list) else [value]
                if not all(type(one) is int and -(2**31) <= one < 2**31 for one in several):
                    what = f"{folder / name}: {key} is {shown(value)}"
                    raise ValueError(f"{what}, and must be a token's id or a list of such")
            ids |= told
    if ids["eos_token_id"] is None and tokenizer is not None:
        opened = open_tokenizer(tokenizer)
        with contextlib.suppress(ValueError):  # it has none, and nothing else names one
            ids["eos_token_id"] = opened.end_of_text
    return ids


def end_ids(ids: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the tokens that end a text."""
    end = ids["eos_token_id"]
    if end is None:
        return ()
    return tuple(end) if isinstance(end, list) else (end,)
