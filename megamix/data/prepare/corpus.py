"""The files of a corpus: text that is already on the machine, or files that the user names. Nothing is copied."""

import json
import logging
import os
import sysconfig
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from megamix.base.names import first_few
from megamix.data import import_extra
from megamix.data.prepare.compressed import DAMAGE, is_named, open_plain
from megamix.data.prepare.faults import fault_of
from megamix.data.prepare.json_records import json_kind
from megamix.plugins import COMPRESSIONS, FILE_KINDS, READERS

log = logging.getLogger("megamix")

# Directories without prose, or with code that not every machine has (distributions remove tests and idlelib).
_LEFT_OUT = frozenset(
    {"test", "tests", "idle_test", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
)
_HUB = "hf:"
_TABLES = ("parquet", "arrow")
_JL = tuple(f".jl{more}" for more in ("", *COMPRESSIONS))  # JSON Lines or Julia, by the content
_HEAD = 2**13  # bytes that tell a file's kind: no text has a zero among them; a PDF need not have one
_LARGEST_OBJECT = 2**24  # bytes of a .json that is parsed as a whole


@dataclass(frozen=True, slots=True)
class CorpusFile:
    path: str  # path by which it is opened
    name: str  # path from the folder in which it was found, with "/" on every system; decides whether it validates
    kind: str  # text, jsonl, json (not by lines), parquet, arrow, or an ending that a plugin reads
    # The name decides train or valid. False: the text decides, of a record, or of files that share the name.
    drawn_by_name: bool = True
    passed_over: str = ""  # why it is not read, though it lies in a folder that is; empty if it is read


@dataclass(frozen=True, slots=True)
class Corpus:
    """Files in reading order."""

    flag: str  # the user's arguments, for messages and the manifest
    files: tuple[CorpusFile, ...]

    def outside(self, *folders: Path) -> "Corpus":
        """Return the corpus without the files in these folders. prepare may write into a folder that it reads, and its
        output is not the user's text.
        """
        inside = tuple(f"{os.path.realpath(folder)}{os.sep}" for folder in folders)
        files = (file for file in self.files if not os.path.realpath(file.path).startswith(inside))
        return replace(self, files=tuple(files))


def named_corpus(name: str) -> Corpus:
    """Return the corpus of `--corpus NAME`: "stdlib" (about 11 MB of Python code) or "torch" (about 46 MB).

    Raises: ValueError for another name.
    """
    if name == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
    elif name == "torch":
        root = Path(str(distribution("torch").locate_file("torch")))  # importing torch takes a second
    else:
        raise ValueError(f"--corpus {name!r} is unknown; use stdlib or torch, or --input PATH for your own files")
    return Corpus(f"--corpus {name}", folder_files(root, suffix=".py", left_out=_LEFT_OUT))


def input_corpus(paths: Sequence[str], split: str = "train", text_key: str = "text") -> Corpus:
    """Return the corpus of `--input PATH...`: files, folders, datasets saved by `datasets`, or hf:NAME for
    `load_dataset`. Log which files of the folders are passed over, and why. JSON Lines of these are among the corpus's
    files: they are records, and count as lost.

    Raises: ValueError for a path that is none of these, or holds no file.
    """
    files = list[CorpusFile]()
    passed_over = list[CorpusFile]()
    given = dict[str, int]()  # by file, index of the path that holds it
    for number, path in enumerate(paths):
        found = _hub_files(path, split) if path.startswith(_HUB) else _path_files(path, split, text_key)
        passed_over += [file for file in found if file.passed_over]
        found = tuple(file for file in found if not file.passed_over)
        if not found:
            raise ValueError(f"--input {path!r} holds no file that can be read; give files, or a folder of them")
        for file in found:
            before = given.setdefault(os.path.realpath(file.path), number)
            if before != number:
                raise ValueError(f"--input {paths[before]!r} and {path!r} both hold {file.path}; give each file once")
        files += found
    names = Counter(file.name for file in files)
    flag = " ".join(path if path.startswith(_HUB) else os.path.normpath(path) for path in paths)
    unread = [file for file in passed_over if os.path.realpath(file.path) not in given]
    for why in dict.fromkeys(file.passed_over for file in unread):
        those = [file for file in unread if file.passed_over == why]
        size = sum(os.path.getsize(file.path) for file in those if os.path.exists(file.path))  # a link may be broken
        told = f"{counted(len(those), 'file')} ({size:,} bytes) {why}: {first_few([file.path for file in those])}"
        log.warning("--input: passed over %s; name one by --input to have it read, or told why not", told)
    lost = [file for file in unread if file.kind == "jsonl"]
    files += [replace(file, passed_over=f"{file.passed_over}; name it by --input, too") for file in lost]
    drawn = (replace(file, drawn_by_name=file.kind == "text" and names[file.name] == 1) for file in files)
    return Corpus(f"--input {flag}", tuple(drawn))


def folder_files(root: Path, suffix: str = "", left_out: frozenset[str] = frozenset()) -> tuple[CorpusFile, ...]:
    """Return the files below a folder, sorted by name as strings: the order is the same on every file system.

    Hidden files, hidden directories and `left_out` directories are not read. Links to directories are followed last, so
    that no directory is read twice and files have their names from the real directory.
    """
    names = list[str]()
    read = set[Path]()
    tops = deque([root])
    while tops:
        for folder, subfolders, files in os.walk(tops.popleft(), onerror=_raise):
            real = Path(folder).resolve()
            subfolders[:] = sorted(name for name in subfolders if name not in left_out and not name.startswith("."))
            if real in read:
                subfolders.clear()
                continue
            read.add(real)
            tops.extend(path for name in subfolders if (path := Path(folder, name)).is_symlink())
            names += [
                path.relative_to(root).as_posix()
                for name in files
                if name.endswith(suffix) and not name.startswith(".") and (path := Path(folder, name)).is_file()
            ]
    return _files(root, sorted(names))


def _raise(error: OSError) -> None:
    raise error


def _hidden_files(root: Path) -> Iterator[CorpusFile]:
    """Yield the files of a folder that are not read because of their names, and links without a file behind."""
    for path in sorted(root.rglob("*")):
        is_hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
        if not path.is_dir() and (is_hidden or not path.exists()):
            yield CorpusFile(str(path), path.name, "", passed_over="hidden" if is_hidden else "linked to nothing")


def _files(root: Path, names: Iterable[str]) -> tuple[CorpusFile, ...]:
    return tuple(CorpusFile(str(root / name), name, _kind_of(root / name)) for name in names)


def _kind_of(path: Path) -> str:
    kinds = FILE_KINDS | {suffix: suffix for suffix in READERS.registered}
    name = path.name.lower()
    return next((kind for ending, kind in kinds.items() if name.endswith(ending.lower())), "text")


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _readable(given: str, files: tuple[CorpusFile, ...], text_key: str) -> tuple[CorpusFile, ...]:
    """Mark files without text, and other files beside tables, as passed over. Look into the remaining .json files for
    their kind.

    Raises: ValueError if no file remains.
    """
    kinds = dict[CorpusFile, str]()  # those that the content decides
    if any(file.kind in _TABLES for file in files):
        others = [file for file in files if file.kind in ("text", "json", "jsonl")]
        why = dict.fromkeys(others, "beside Parquet or Arrow")
    else:
        texts = [file for file in files if file.kind == "text"]
        contents = {file: _content(file.path) for file in texts}
        why = dict.fromkeys([file for file in texts if contents[file] == "binary"], "that are no text in UTF-8")
        objects = [file for file in texts if contents[file] == "object"]
        kinds |= {file: "jsonl" for file in objects if is_named(file.path, _JL)}
        if plain := [file.name for file in objects if file not in kinds]:
            told = "are read as plain text, keys and braces included; name them .jsonl to have their records read"
            log.warning("--input %r: files that begin with a JSON object %s: %s", given, told, first_few(plain))
        if why.keys() < contents.keys():  # a package.json of a folder of code
            single = [file for file in files if file.kind == "json" and _is_one_object(file.path, text_key)]
            why |= dict.fromkeys(single, f"of one object without the key {text_key!r}")
    if why and len(why) == len(files):
        found = first_few([file.name for file in why])
        fix = "give text, .jsonl, .json, .parquet or .arrow"
        raise ValueError(f"--input {given!r} holds no text in UTF-8, but {found}; {fix}")
    kinds |= {file: json_kind(_head(file.path)) for file in files if file.kind == "json" and file not in why}
    return tuple(replace(file, kind=kinds.get(file, file.kind), passed_over=why.get(file, "")) for file in files)


def _is_one_object(path: str, text_key: str) -> bool:
    """Return whether a .json is one object without the key, and so no records. A large file is not looked into."""
    content = None
    if path.endswith(".json") and os.path.getsize(path) <= _LARGEST_OBJECT:
        with suppress(ValueError):
            content = json.loads(Path(path).read_bytes())
    return isinstance(content, dict) and text_key not in content


def _head(path: str) -> bytes:
    try:
        with open_plain(path) as file:
            return file.read(_HEAD)
    except DAMAGE:
        return b""  # its reader will report the damage


def _content(path: str) -> str:
    """Return what a text file holds by its first bytes: "text", "binary", or a JSON "object" in its first line. One in
    UTF-16 is text, which its reader will refuse.
    """
    head = b"" if fault_of(path, "text")[0] else _head(path)
    if head.startswith(b"%PDF-") or (b"\0" in head and not head.startswith((b"\xff\xfe", b"\xfe\xff"))):
        return "binary"
    line = head.partition(b"\n")[0]
    try:
        is_object = isinstance(json.loads(line), dict)
    except ValueError:
        is_object = len(line) == _HEAD and line.startswith(b'{"')  # the line is longer
    return "object" if is_object else "text"


def _path_files(given: str, split: str, text_key: str) -> tuple[CorpusFile, ...]:
    if not given:
        raise ValueError("--input '' names nothing; give files or folders, . for the current one")
    path = Path(given)
    if path.is_file():
        return _readable(given, _files(path.parent, [path.name]), text_key)
    if not path.is_dir():
        raise ValueError(f"--input {given!r} is not there; give files, or a folder of them")
    if (path / "dataset_dict.json").is_file():
        splits = _saved(path / "dataset_dict.json", lambda content: list(content["splits"]))
        if split not in splits:
            raise ValueError(f"--input {given!r} has no split {split!r}; set --split to one of {', '.join(splits)}")
        path = path / split
    if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
        return _files(path, _saved(path / "state.json", lambda state: [x["filename"] for x in state["_data_files"]]))
    return (*_readable(given, folder_files(path), text_key), *_hidden_files(path))


def _saved(path: Path, names: Callable[[Any], list[str]]) -> list[str]:
    """Return names from a JSON file that save_to_disk of `datasets` wrote. Raises: ValueError for another content."""
    try:
        return names(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"--input: {path} is not as `datasets` saves it ({error!r}), though the folder is like one that it saved; "
            "save it again, or give the files themselves"
        ) from error


def _hub_files(path: str, split: str) -> tuple[CorpusFile, ...]:
    """Load a dataset by `datasets`, and return the files of its cache. They are then read like any others, without
    `datasets`.
    """
    datasets = import_extra("datasets", "datasets", what=f"--input {path}: ")
    try:
        dataset = datasets.load_dataset(path.removeprefix(_HUB), split=split)
    except (OSError, ValueError, RuntimeError) as error:  # a wrong name or split raises one of these
        raise ValueError(f"--input {path} --split {split}: {error}") from error
    files = tuple(CorpusFile(file["filename"], Path(file["filename"]).name, "arrow") for file in dataset.cache_files)
    if not files or "[" in split:
        raise ValueError(
            f"--input {path} --split {split} is no whole split on the disk; save it by datasets' save_to_disk and "
            "give that folder"
        )
    return files
