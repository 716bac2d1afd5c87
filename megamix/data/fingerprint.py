"""What a checkpoint remembers of its data, so that a run does not go on with other data unnoticed. No torch here."""

from __future__ import annotations

import hashlib
import socket
from pathlib import Path

from megamix.data.steady_file import SteadyFile
from megamix.data.token_file import bin_path, idx_path, sampled_blocks

_PIECE = 1 << 22


def token_file_fingerprint(prefix: Path) -> str:
    """Of the whole index, and of the tokens' size and 64 MiB: every document added, removed or moved changes it, but
    single tokens changed in place in a larger file may not.
    """
    digest = hashlib.sha256()
    _add_file(digest, idx_path(prefix))
    tokens = SteadyFile(bin_path(prefix))
    digest.update(tokens.size.to_bytes(8, "little"))
    for start, stop in sampled_blocks(tokens.size):
        digest.update(tokens.read(start, stop))
    return digest.hexdigest()


def file_fingerprint(path: Path) -> str:
    digest = hashlib.sha256()
    _add_file(digest, path)
    return digest.hexdigest()


def file_identity(path: Path) -> list[int]:
    """What a running system knows a file by, and the moment when it was last written."""
    found = path.stat()
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns]


def machine_identity() -> str:
    """Of the system that runs: containers of one machine share it, as they share what `file_identity` reads."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # not Linux
        return socket.gethostname()


def _add_file(digest: hashlib._Hash, path: Path) -> None:
    file = SteadyFile(path)
    for start in range(0, file.size, _PIECE):
        digest.update(file.read(start, min(start + _PIECE, file.size)))
