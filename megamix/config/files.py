"""Configuration files and their bases, read within bounds: whatever a path leads to, the answer is quick."""

from __future__ import annotations

import errno
import os
import re
import select
import stat
from pathlib import Path
from typing import Any, NamedTuple

from megamix.config.problems import ConfigError, nearest, one_line, short
from megamix.config.toml_text import TooDeepError, parse_toml

MOST_BYTES = 256 * 1024  # of a file and its bases: over two thousand token files, and tomllib needs a second for them
MOST_FILES = 32  # from a file down to its last base
_KINDS = {stat.S_IFDIR: "folder", stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket"}
_WRITER_S = 3.0  # until which somebody must have opened a named pipe for writing
# Before the effective configuration left out what is not read it listed every key, those not set like this.
_LISTS_ALL = re.compile(r"^# \w+ is not set$", re.MULTILINE)


class Layer(NamedTuple):
    """What one file or override says."""

    name: str
    tree: dict[str, Any]
    lists_all: bool = False  # also keys that nobody chose: an effective configuration of before


def read_layers(path: Path) -> list[Layer]:
    """A file behind its bases, the last one of which comes first. Only the file itself may be a pipe.

    Raises: ConfigError
    """
    layers: list[Layer] = []
    room = MOST_BYTES
    places: dict[tuple[int, int], Path] = {}  # by what the system calls the file, whatever links lead to it
    while True:
        files = [one_line(str(file)) for file in (*places.values(), path)]
        what = f"base: got {files[-1]}, named by {files[-2]}" if places else f"config: got {files[-1]}"
        text, place = _read(path, what, room, may_be_pipe=not places)
        room -= len(text.encode())
        if place in places:
            raise ConfigError([f"{what}, files inherit in a circle: {' -> '.join(files)}; remove one base"])
        places[place] = path
        tree = _parse(text, what)
        base = tree.pop("base", None)
        layers.insert(0, Layer(str(path), tree, bool(_LISTS_ALL.search(text))))
        if base is None:
            return layers
        if not isinstance(base, str) or not base:
            raise ConfigError([f'base: got {short(base)} in {files[-1]}, must be a path; write base = "other.toml"'])
        if len(layers) == MOST_FILES:
            problem = f"base: got {short(base)} in {files[-1]}, the {MOST_FILES}th file in a row; make some of them one"
            raise ConfigError([problem])
        path = path.parent / base


def _read(path: Path, what: str, room: int, *, may_be_pipe: bool) -> tuple[str, tuple[int, int]]:
    """A file's text, and what the system calls the file."""
    try:
        found = path.stat()
        kind = stat.S_IFMT(found.st_mode)
        if kind not in ((stat.S_IFREG, stat.S_IFIFO) if may_be_pipe else (stat.S_IFREG,)):
            # Not even opened: with a device that may already do something, and its bytes need not end.
            raise OSError(errno.EINVAL, f"it is a {_KINDS.get(kind, 'device')}")
        data = _bytes(path, room + 1)
        if len(data) > room:
            raise OSError(errno.EFBIG, f"a configuration has {MOST_BYTES // 1024} KiB at most")
        return data.decode("utf-8"), (found.st_dev, found.st_ino)
    except FileNotFoundError:
        near = nearest(path.name, [file.name for file in path.parent.glob("*.toml")])
        fix = f"did you mean {one_line(str(path.parent / near))}?" if near else "write the path of a TOML file"
        raise ConfigError([f"{what}, there is no such file; {fix}"]) from None
    except (OSError, ValueError) as error:  # also no UTF-8, or a path that no file can have
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError([f"{what}, cannot be read: {reason}; write the path of a TOML file"]) from error


def _bytes(path: Path, most: int) -> bytes:
    """What a file or pipe holds, up to so many bytes."""
    # Opening a named pipe waits for its writer, and would wait for ever.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb") as file:
        ready = select.poll()
        ready.register(handle, select.POLLIN)
        ready.poll(_WRITER_S * 1000)
        os.set_blocking(handle, True)  # from here on: without a writer it is at its end, else the writer is waited for
        return file.read(most)


def _parse(text: str, what: str) -> dict[str, Any]:
    try:
        return parse_toml(text)
    except TooDeepError as error:
        raise ConfigError([f"{what}, which {error}; no setting needs that"]) from None
    except ValueError as error:
        raise ConfigError(
            [f"{what}, is no TOML: {one_line(str(error))}; correct that line (text needs quotes)"]
        ) from error
