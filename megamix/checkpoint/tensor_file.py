"""A safetensors file as a stream of chunks, so that memory never holds anything as large as the file.

The format (github.com/huggingface/safetensors): 8 bytes with the header's length; the header, which is JSON with each
tensor's dtype, shape and place; the tensors' bytes without gaps. The `safetensors` library checks headers.
"""

import json
import math
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from megamix.base import constants
from megamix.base.durable import advise
from megamix.base.names import plain_name
from megamix.checkpoint.boxes import Box
from megamix.checkpoint.manifest import FileRecord
from megamix.checkpoint.snapshot import DTYPE_NAMES, DTYPES, Part, StateBox

_ALIGNMENT = 64  # bytes: the first tensor begins at a multiple of this number
_USUAL_HEADER = 1 << 16  # bytes read ahead; the rest of a longer header is read more slowly


def key_of(part: StateBox) -> str:
    """Return a tensor's name in the file. The name does not contain the box's size, which is the tensor's shape."""
    return f"{part.param}|{part.state}|{','.join(map(str, part.box.offset))}"


@dataclass(frozen=True, slots=True)
class Stored:
    """The place of a box on the disk."""

    file: str
    key: str
    dtype: str  # safetensors' name
    box: Box
    start: int  # byte in the file

    @property
    def end(self) -> int:
        return self.start + DTYPES[self.dtype].itemsize * self.box.numel


def safetensors_header(
    tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return the header of a file whose tensors follow each other in this order.

    `tensors`: the format's name of the dtype, and the shape, by the tensor's name.
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
        # Without this advice the kernel reads megabytes beyond the header, while the caller waits.
        advise(file, 0, _USUAL_HEADER, "WILLNEED")
        (length,) = struct.unpack("<Q", file.read(8))
        with safe_open(path, "pt"):  # it checks the header and the tensors' places
            entries = json.loads(file.read(length))
    entries.pop("__metadata__", None)
    for key, entry in entries.items():
        param, state, numbers = key.rsplit("|", 2)  # from the right: a module's name may contain "|"
        box = Box(tuple(map(int, numbers.split(","))) if numbers else (), tuple(entry["shape"]))
        start = 8 + length + entry["data_offsets"][0]
        yield plain_name(param), state, Stored(path.name, key, entry["dtype"], box, start)


def read_ahead(path: Path, size: int) -> Iterator[memoryview]:
    """Yield the first `size` bytes of a file in chunks of 1 MiB. Each chunk is valid until the next one is asked for. A
    thread reads one chunk ahead; otherwise the disk would be idle while a chunk is used. Raises: OSError, also if the
    file is shorter.
    """
    being_read, used = memoryview(bytearray(constants.READ_AHEAD)), memoryview(bytearray(constants.READ_AHEAD))
    with open(path, "rb") as file, ThreadPoolExecutor(1) as reader:
        reading = reader.submit(_read_whole, file, being_read[:size])
        while size:
            ready = reading.result()
            size -= len(ready)
            being_read, used = used, being_read
            if size:
                reading = reader.submit(_read_whole, file, being_read[:size])
            yield ready


def _read_whole(file: BufferedReader, buffer: memoryview) -> memoryview:
    if file.readinto(buffer) < len(buffer):
        raise OSError(f"{file.name}: it became shorter while it was read")
    return buffer


def verified_chunks(path: Path, record: FileRecord) -> Iterator[memoryview]:
    """Yield all bytes of a file in chunks of 1 MiB, each valid until the next one is asked for. Raises: ValueError,
    after the last chunk, if the checksum shows that the bytes are not what was written; OSError.
    """
    crc32 = 0
    for chunk in read_ahead(path, record.size):
        crc32 = zlib.crc32(chunk, crc32)
        yield chunk
    if crc32 != record.crc32:
        raise ValueError(f"{path}: its checksum is not that of the bytes that were written")


def chunks(parts: Sequence[Part]) -> Iterator[memoryview]:
    """Yield the bytes of a checkpoint's file with these parts, in order: the header, then the tensors."""
    kinds = {key_of(part): (DTYPE_NAMES[str(part.tensor.dtype)], part.box.size) for part in parts}
    yield memoryview(safetensors_header(kinds))
    for part in parts:
        assert part.tensor.numel() == part.box.numel, (part.tensor.shape, part.box)
        yield from tensor_chunks(part.tensor.view(-1))


def tensor_chunks(flat: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor on any device, in chunks. Shapes: flat (n,)."""
    for chunk in torch.split(flat, constants.SAVED_CHUNK):
        yield memoryview(chunk.cpu().view(torch.uint8).numpy().data)  # viewed as bytes, because numpy has no BF16
