"""A checkpoint found good, or what is wrong with it, file by file. Nothing in it is executed or believed unchecked."""

from __future__ import annotations

import zlib
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from megamix.checkpoint.boxes import Box, tiling_problem
from megamix.checkpoint.folder import MANIFEST
from megamix.checkpoint.manifest import FileRecord, Manifest, read_manifest
from megamix.checkpoint.tensor_file import parse_key, tensor_starts

_CHUNK = 1 << 20  # bytes: two of them stay in the processor's cache


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a box lies on the disk."""

    file: str
    key: str
    box: Box
    start: int  # byte in the file


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose files fit its manifest and cover every state of every parameter exactly once."""

    path: Path
    manifest: Manifest
    stored: dict[tuple[str, str], list[Stored]]  # by parameter and state


class Damaged(ValueError):
    """A checkpoint that must not be loaded; each of `problems` is a line that names a file."""

    def __init__(self, problems: list[str]):
        super().__init__("; ".join(problems))
        self.problems = problems


def read_checkpoint(path: Path, rank: int = 0, size: int = 1) -> Checkpoint:
    """Check everything but the tensors' bytes, of which this rank checks one file in `size`.

    Raises: Damaged.
    """
    if path.is_symlink() or not path.is_dir():
        raise Damaged([f"{path}: not there, or no folder"])
    try:
        manifest = read_manifest(path / MANIFEST)
    except (ValueError, OSError) as error:
        raise Damaged([str(error)]) from None
    shapes = {param.name: param.shape for param in manifest.params}
    stored = defaultdict(list)
    problems = []
    for number, record in enumerate(manifest.files):
        try:
            check_bytes(path / record.name, record, content=number % size == rank)
            for param, state, place in read_header(path / record.name):
                if param not in shapes or state not in manifest.states:
                    raise ValueError(f"{path / record.name}: {place.key!r} is no state that the manifest names")
                stored[param, state].append(place)
        except (ValueError, OSError) as error:
            problems.append(str(error))
    if not problems:  # else what is missing is known already
        for param, shape in shapes.items():
            for state in manifest.states:
                if problem := tiling_problem([place.box for place in stored[param, state]], shape):
                    problems.append(f"{path}: {state} of {param}: {problem}")
    if problems:
        raise Damaged(problems)
    return Checkpoint(path, manifest, dict(stored))


def check_bytes(path: Path, record: FileRecord, content: bool) -> None:
    """Compare size and, if asked, content with the manifest's record. Raises: ValueError, OSError."""
    if path.is_symlink() or not path.is_file():
        raise ValueError(f"{path}: not there, or no ordinary file")
    if (size := path.stat().st_size) != record.size:
        raise ValueError(f"{path}: {size} bytes, written were {record.size}")
    if content and file_crc32(path) != record.crc32:
        raise ValueError(f"{path}: its checksum is not that of what was written")


def file_crc32(path: Path) -> int:
    """Of a file that is read by a thread one chunk ahead, since the disk would rest while a checksum is taken."""
    crc32 = 0
    being_read, ready = memoryview(bytearray(_CHUNK)), memoryview(bytearray(_CHUNK))
    with open(path, "rb", buffering=0) as file, ThreadPoolExecutor(1) as reader:
        reading = reader.submit(file.readinto, being_read)
        while length := reading.result():
            being_read, ready = ready, being_read
            reading = reader.submit(file.readinto, being_read)
            crc32 = zlib.crc32(ready[:length], crc32)
    return crc32


def read_header(path: Path) -> list[tuple[str, str, Stored]]:
    """Parameter, state and place of every tensor. Raises: ValueError."""
    found = []
    try:
        with safe_open(path, "pt") as file:
            starts = tensor_starts(path)
            for key in file.keys():  # noqa: SIM118 (it is no dict)
                part = file.get_slice(key)
                if part.get_dtype() != "F32":
                    raise ValueError(f"{key[:200]!r} is {part.get_dtype()}, every state is F32")
                param, state, box = parse_key(key, part.get_shape())
                found.append((param, state, Stored(path.name, key, box, starts[key])))
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    return found
