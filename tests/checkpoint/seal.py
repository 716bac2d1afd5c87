"""Checkpoints that no save wrote, with every checksum right."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megamix.checkpoint.folder import MANIFEST
from megamix.checkpoint.manifest import (
    UNTRAINED,
    FileRecord,
    LayoutRecord,
    Manifest,
    ParamRecord,
    RunRecord,
    manifest_text,
    read_manifest,
)

SHARD = "rank_00000.safetensors"


def seal(path: Path, body: bytes) -> None:
    """Write a manifest whose checksum is right."""
    (path / MANIFEST).write_bytes(body + b',\n"crc32":"%08x"}\n' % zlib.crc32(body))


def body_of(path: Path) -> bytes:
    """Return all of a manifest but its checksum."""
    text = (path / MANIFEST).read_bytes()
    return text[: text.rindex(b',\n"crc32"')]


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest; all files' sizes and checksums, and its own, are right afterwards."""
    fields = json.loads(body_of(path) + b"}")
    for record in fields["files"]:
        content = (path / record["name"]).read_bytes()
        record |= {"size": len(content), "crc32": zlib.crc32(content)}
    change(fields)
    seal(path, json.dumps(fields).removesuffix("}").encode())


def write_sealed(path: Path, content: bytes, params: Sequence[ParamRecord]) -> None:
    """Write a checkpoint of weights alone, in one file."""
    (path / SHARD).write_bytes(content)
    manifest = Manifest(
        applied_updates=0, skipped_steps=0, loss_scale={}, run=RunRecord(), states=(UNTRAINED,), params=tuple(params),
        layout=LayoutRecord(axes={"dp": 1}, buckets=()),
        files=(FileRecord(name=SHARD, size=len(content), crc32=zlib.crc32(content)),),
    )  # fmt: skip
    (path / MANIFEST).write_bytes(manifest_text(manifest))
    assert read_manifest(path / MANIFEST) == manifest
