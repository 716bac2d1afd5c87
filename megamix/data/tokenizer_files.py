"""The files of a tokenizer, by their names in Hugging Face folders: vocabularies, settings, chat templates."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megamix.data.json_table import read_table, write_table
from megamix.data.text_tokenizer import TextTokenizer

TOKENIZER, SP_MODEL = "tokenizer.json", "tokenizer.model"
_SETTINGS, _SPECIAL_TOKENS = "tokenizer_config.json", "special_tokens_map.json"
_FILES = (
    TOKENIZER, SP_MODEL, "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt",
    _SETTINGS, _SPECIAL_TOKENS, "chat_template.jinja", "additional_chat_templates/*.jinja",
)  # fmt: skip


def tokenizer_files(place: Path) -> dict[str, Path]:
    """Return a tokenizer's files by their usual names. `place`: its folder, or a file, which may have another name;
    if a vocabulary of a usual name lies beside it, the other files of the folder belong to that one.

    Raises: ValueError for a link to a file elsewhere that the user has not named: a folder from the net must not make
    its user publish a file of the user's own. In a cache of Hugging Face links lead to `blobs` beside `snapshots`.
    """
    folder = place.parent if place.is_file() else place
    usual = SP_MODEL if place.suffix == ".model" else TOKENIZER
    named = {usual: place} if place.is_file() and place.name != usual else {}
    if named and any((folder / name).exists() for name in (TOKENIZER, SP_MODEL)):
        return named
    paths = [path for name in _FILES for path in sorted(folder.glob(name))]
    inside = folder.resolve()
    for path in paths:
        real = path.resolve()
        if not real.is_relative_to(inside) and real.parent != inside.parent.parent / "blobs" and path != place:
            raise ValueError(f"{path} is a link to {real}, which is outside the folder; copy that file in its place")
    return {str(path.relative_to(folder)): path for path in paths} | named


def copy_files(place: Path, output: Path) -> None:
    """Copy a tokenizer's files to their usual names. Settings that name code, or files elsewhere, stay behind."""
    for name, path in tokenizer_files(place).items():
        (output / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(path, output / name)
    stays = ("auto_map", "name_or_path", "_file", "_files")  # transformers writes name_or_path whenever it loads
    if settings := read_table(output / _SETTINGS):
        write_table(output / _SETTINGS, {key: value for key, value in settings.items() if not key.endswith(stays)})


def read_settings(place: Path) -> dict[str, Any]:
    """Return a tokenizer's settings, special tokens among them. `place`: as for `tokenizer_files`."""
    files, none = tokenizer_files(place), Path()
    return read_table(files.get(_SPECIAL_TOKENS, none)) | read_table(files.get(_SETTINGS, none))


def save_settings(tokenizer: TextTokenizer, folder: Path) -> None:
    """Write to a folder's settings how a document begins and ends, where they say something else."""
    settings = read_settings(folder)
    kind = "PreTrainedTokenizerFast" if tokenizer.file_name == TOKENIZER else "LlamaTokenizer"
    changes = {
        "tokenizer_class": settings.get("tokenizer_class", kind),
        "eos_token": tokenizer.end_token or None,
        "bos_token": tokenizer.begin_token if tokenizer.begin else None,
        "add_bos_token": bool(tokenizer.begin) if tokenizer.begin_token else None,
        "add_eos_token": False if settings.get("add_eos_token") else None,  # a prompt goes on
    }
    for name in (_SETTINGS, _SPECIAL_TOKENS):
        table = read_table(folder / name)
        keys = [key for key in changes if changes[key] not in (None, special_token(table, key))]
        if told := {key: changes[key] for key in keys if name == _SETTINGS or key in table}:
            write_table(folder / name, table | told)


def special_token(settings: Mapping[str, Any], key: str) -> Any:
    """Return a special token of the settings, where it is a text, or an object with the text as its content; "" if
    there is none.
    """
    token = settings.get(key)
    return token.get("content") if isinstance(token, dict) else token or ""
