"""A safetensors file as a stream of chunks, so that nothing as large as the file is ever held.

The format (github.com/huggingface/safetensors): 8 bytes, the header's length; the header, JSON that gives each
tensor's dtype, shape and place; the tensors' bytes without gaps. What reads it here is the `safetensors` library.
"""

import json
import math
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from megamix import tuned
from megamix.checkpoint.boxes import Box
from megamix.checkpoint.manifest import FileRecord
from megamix.checkpoint.snapshot import DTYPE_NAMES, DTYPES, Part, StateBox
from megamix.names import plain_name

_ALIGNMENT = 64  # of the first tensor's bytes in the file
_USUAL_HEADER = 1 << 16  # bytes; of a longer one the rest is only read more slowly
# Bytes: 65,000 tensors with usual names, 20,000 parameters of a rank. It takes two seconds to check, and ten times its
# size in memory; the library would take 100 MB.
_LARGEST_HEADER = 8 << 20


def key_of(param: str, state: str, box: Box) -> str:
    """Return a tensor's name in the file; the box's size is the tensor's shape."""
    return f"{param}|{state}|{','.join(map(str, box.offset))}"


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a box lies on the disk."""

    file: str
    key: str
    dtype: str  # safetensors' name
    box: Box
    start: int  # byte in the file

    @property
    def end(self) -> int:
        return self.start + DTYPES[self.dtype].itemsize * self.box.numel


def _parse_key(key: str, shape: Sequence[int]) -> tuple[str, str, Box]:
    """Return the parameter, the state and the box of `key_of`. Raises: ValueError."""
    try:
        param, state, numbers = key.rsplit("|", 2)  # from the right: a module may bear any name
        offset = tuple(map(int, numbers.split(","))) if numbers else ()
    except ValueError:
        raise ValueError(f"{key[:200]!r} is not parameter|state|offset") from None
    if len(offset) != len(shape):
        raise ValueError(f"{key[:200]!r} has {len(offset)} dims by its name and {len(shape)} by its shape")
    return param, state, Box(offset, tuple(shape))


def header(parts: Sequence[StateBox], dtypes: Iterable[str]) -> bytes:
    """Return all that precedes the tensors' bytes. Raises: ValueError if it is longer than `read_header` takes."""
    keys = (key_of(part.param, part.state, part.box) for part in parts)
    kinds = zip(dtypes, (part.box.size for part in parts), strict=True)
    text = safetensors_header(dict(zip(keys, kinds, strict=True)))
    if len(text) > _LARGEST_HEADER:
        raise ValueError(
            f"{len(parts)} tensors of a rank have a header of {len(text)} bytes, a checkpoint's file has at most "
            f"{_LARGEST_HEADER}; use more ranks, or put small parameters together into larger ones"
        )
    return text


def safetensors_header(
    tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return the header of tensors, each with the format's name of its dtype and its shape, that follow each other in
    this order.
    """
    entries: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + DTYPES[dtype].itemsize * math.prod(shape)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def read_header(path: Path) -> Iterator[tuple[str, str, Stored]]:
    """Yield parameter, state and place of every tensor. Raises: ValueError, OSError."""
    with open(path, "rb", buffering=0) as file:
        # Left alone, the disk reads megabytes beyond a header while one waits for it: of every file, on every rank.
        os.posix_fadvise(file.fileno(), 0, _USUAL_HEADER, os.POSIX_FADV_WILLNEED)
        (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
        if length > _LARGEST_HEADER:
            raise ValueError(f"header too large: {length} bytes; it has at most {_LARGEST_HEADER}")
    with safe_open(path, "pt"), open(path, "rb") as file:  # the library judges the header, and the tensors' places
        file.seek(8)
        entries = json.loads(file.read(length))
    entries.pop("__metadata__", None)
    for key, entry in entries.items():
        start, dtype = 8 + length + entry["data_offsets"][0], entry["dtype"]
        if dtype not in DTYPES:
            raise ValueError(f"{key[:200]!r} is {dtype}, no state or buffer is")
        if start % DTYPES[dtype].itemsize:  # its elements would not be whole in a chunk
            raise ValueError(f"{key[:200]!r} begins at byte {start}, no multiple of {DTYPES[dtype].itemsize}")
        param, state, box = _parse_key(key, entry["shape"])
        yield plain_name(param), state, Stored(path.name, key, dtype, box, start)


def read_ahead(path: Path, size: int) -> Iterator[memoryview]:
    """Yield the first `size` bytes of a file, 1 MiB at a time, each good until the next is asked for. A thread reads
    one ahead, since the disk would rest while the bytes are used. Raises: OSError, also if the file ends before.
    """
    being_read, used = memoryview(bytearray(tuned.READ_AHEAD)), memoryview(bytearray(tuned.READ_AHEAD))
    with open(path, "rb", buffering=0) as file, ThreadPoolExecutor(1) as reader:
        reading = reader.submit(_read_whole, file, being_read[:size])
        while size:
            ready = reading.result()
            size -= len(ready)
            being_read, used = used, being_read
            if size:
                reading = reader.submit(_read_whole, file, being_read[:size])
            yield ready


def _read_whole(file: FileIO, buffer: memoryview) -> memoryview:
    rest = buffer
    while rest:  # one read may give less than it is asked for
        length = file.readinto(rest)
        if not length:
            raise OSError(f"{file.name}: it has become shorter while it was read")
        rest = rest[length:]
    return buffer


def verified_chunks(path: Path, record: FileRecord) -> Iterator[memoryview]:
    """Yield all bytes of a file, 1 MiB at a time, each good until the next is asked for. Whether they are what was
    written is known when all have gone by. Raises: ValueError then, if they are not; OSError.
    """
    crc32 = 0
    for chunk in read_ahead(path, record.size):
        crc32 = zlib.crc32(chunk, crc32)
        yield chunk
    if crc32 != record.crc32:
        raise ValueError(f"{path}: its checksum is not that of what was written")


def chunks(parts: Sequence[Part]) -> Iterator[memoryview]:
    """Yield the whole file, in order."""
    yield memoryview(header(parts, [DTYPE_NAMES[str(part.tensor.dtype)] for part in parts]))
    for part in parts:
        assert part.tensor.numel() == part.box.numel, (part.tensor.shape, part.box)
        yield from tensor_chunks(part.tensor.view(-1))


def tensor_chunks(flat: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor (n,), on whatever device."""
    for piece in torch.split(flat, tuned.SAVED_PIECE):
        yield memoryview(piece.cpu().view(torch.uint8).numpy().data)  # as bytes: numpy knows no BF16
