"""The files of a tokenizer in a Hugging Face folder, and the tokens that end a text."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megamix.data.json_table import read_table, write_table
from megamix.data.tokenizer import open_tokenizer
from megamix.data.tokenizer_files import SP_MODEL, TOKENIZER, copy_files, read_settings, save_settings, special_token
from megamix.hf.place import CONFIG

GENERATION = "generation_config.json"
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def tokenizer_in(folder: Path) -> Path | None:
    """Return the folder's tokenizer.json, else its tokenizer.model; None if it has neither."""
    return next((folder / name for name in (TOKENIZER, SP_MODEL) if (folder / name).is_file()), None)


def copy_tokenizer(place: Path, output: Path) -> None:
    """Copy the files of a tokenizer to `output`. A tokenizer.json without settings gets those that it needs."""
    copy_files(place, output)
    if (output / TOKENIZER).is_file() and not read_settings(output):
        with contextlib.suppress(ValueError):  # it cannot be opened here
            save_settings(open_tokenizer(output / TOKENIZER), output)


def copy_generation(folder: Path, output: Path, tokenizer: Path | None) -> dict[str, Any]:
    """Write the settings of generation to `output`, always with the ids of special tokens. Return these ids."""
    ids = special_ids(folder, tokenizer)
    write_table(output / GENERATION, read_table(folder / GENERATION) | ids)
    return ids


def special_ids(folder: Path, tokenizer: Path | None) -> dict[str, Any]:
    """Return the ids of the tokens that begin, end and pad a text: each an id, a list of ids, or None. They come from
    the folder's settings of generation or, where these say nothing, from its config.json. If neither names an end
    token, the tokenizer's files do; a token that begins no text was not trained.
    """
    ids: dict[str, Any] = dict.fromkeys(_IDS)
    for path in (folder / CONFIG, folder / GENERATION):
        ids |= {key: value for key, value in read_table(path).items() if key in _IDS and value is not None}
    if ids["eos_token_id"] is None and tokenizer is not None:
        opened = open_tokenizer(tokenizer)
        pad = special_token(read_settings(tokenizer), "pad_token")
        own = {"bos_token_id": next(iter(opened.begin), None), "pad_token_id": opened.token_id(pad) if pad else None}
        with contextlib.suppress(ValueError):  # the tokenizer has no end token, either
            own["eos_token_id"] = opened.end_of_text
        ids = {key: own.get(key) if token_id is None else token_id for key, token_id in ids.items()}
    return ids


def end_ids(ids: Mapping[str, Any]) -> tuple[int, ...]:
    end = ids["eos_token_id"]
    if end is None:
        return ()
    return tuple(end) if isinstance(end, list) else (end,)
