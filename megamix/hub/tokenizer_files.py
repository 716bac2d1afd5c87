"""The files of a tokenizer in a Hugging Face folder, and the tokens that end a text."""

import contextlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megamix.data.tokenizer import open_tokenizer
from megamix.durable import write_text
from megamix.hub.place import CONFIG, read_json

TOKENIZER, SENTENCEPIECE, GENERATION = "tokenizer.json", "tokenizer.model", "generation_config.json"
_SETTINGS = "tokenizer_config.json"
_FILES = (
    TOKENIZER, _SETTINGS, "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt",
    SENTENCEPIECE, "chat_template.jinja",
)  # fmt: skip
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def tokenizer_in(folder: Path) -> Path | None:
    """Return the folder's tokenizer.json; None if it has none."""
    path = folder / TOKENIZER
    return path if path.is_file() else None


def copy_tokenizer(place: Path, output: Path) -> None:
    """Copy a tokenizer's files to `output`, unchanged. A tokenizer.json without settings gets those that it needs.

    `place`: a folder, or a tokenizer's file. All files of a tokenizer in the folder are copied, also if `place` is a
    file of the usual name. A file of another name is copied alone, to the usual name: the other files of its folder
    belong to another tokenizer.
    """
    usual_name = SENTENCEPIECE if place.suffix == ".model" else TOKENIZER
    if place.is_file() and place.name != usual_name:
        shutil.copyfile(place, output / usual_name)  # may be a link: the user has named it
    else:
        folder = place.parent if place.is_file() else place
        for name in _FILES:
            if _is_own_file(folder / name):
                shutil.copyfile(folder / name, output / name)
    if (output / TOKENIZER).is_file() and not (output / _SETTINGS).exists():
        settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
        with contextlib.suppress(ValueError):  # it cannot be opened here, or has no known end token
            settings["eos_token"] = open_tokenizer(output / TOKENIZER).end_token
        write_text(output / _SETTINGS, json.dumps(settings, indent=2) + "\n")


def _is_own_file(path: Path) -> bool:
    """Return whether a file is there. Raises: ValueError if the path is no file, or is a link to a file elsewhere: a
    folder from the net must not make its user publish a file of the user's own. In a cache of Hugging Face links lead
    to `blobs` beside `snapshots`; these are allowed.
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
    """Write the settings of generation to `output`, always with the ids of special tokens. Return these ids."""
    ids = special_ids(folder, tokenizer)
    settings = read_json(folder / GENERATION) if (folder / GENERATION).is_file() else {}
    write_text(output / GENERATION, json.dumps({**settings, **ids}, indent=2) + "\n")
    return ids


def special_ids(folder: Path, tokenizer: Path | None) -> dict[str, Any]:
    """Return the ids of the tokens that begin, end and pad a text: each an id, a list of ids, or None. They come from
    the folder's settings of generation or, where these say nothing, from its config.json. If neither names an end
    token, the tokenizer's file does.
    """
    ids: dict[str, Any] = dict.fromkeys(_IDS)
    for name in (CONFIG, GENERATION):
        if (folder / name).is_file():
            told = {key: value for key, value in read_json(folder / name).items() if key in _IDS and value is not None}
            ids |= told
    if ids["eos_token_id"] is None and tokenizer is not None:
        opened = open_tokenizer(tokenizer)
        with contextlib.suppress(ValueError):  # the tokenizer has no end token, either
            ids["eos_token_id"] = opened.end_of_text
    return ids


def end_ids(ids: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the tokens that end a text."""
    end = ids["eos_token_id"]
    if end is None:
        return ()
    return tuple(end) if isinstance(end, list) else (end,)
