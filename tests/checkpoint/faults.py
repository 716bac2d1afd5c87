"""A `Files` that counts its calls and does something else at one of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

from megamix.checkpoint.folder import Files

CALLS = (
    "make_directory",
    "create",
    "write",
    "begin_sync",
    "sync_file",
    "sync_directory",
    "rename",
    "remove_file",
    "remove_directory",
    "free_space",
)


class FaultyFiles(Files):
    """A `Files` with a fault. `calls`: the names of all calls so far. `fault(name, arguments)` is called just before
    call number `at`, and may raise or kill.
    """

    begun_each = 1 << 12  # files of tests are small

    def __init__(self, at: int | None = None, fault: Callable[[str, tuple[Any, ...]], None] | None = None):
        self.at, self.fault = at, fault
        self.calls: list[str] = []

    def count(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.calls.append(name)
        if len(self.calls) - 1 == self.at:
            assert self.fault is not None
            self.fault(name, arguments)


def _counted(name: str) -> Callable[..., Any]:
    def call(self: FaultyFiles, *arguments: Any) -> Any:
        self.count(name, arguments)
        return getattr(super(FaultyFiles, self), name)(*arguments)

    return call


for _name in CALLS:
    setattr(FaultyFiles, _name, _counted(_name))


def kill(name: str, arguments: tuple[Any, ...]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in_the_middle(name: str, arguments: tuple[FileIO, memoryview]) -> None:
    file, chunk = arguments
    file.write(chunk[: len(chunk) // 2])
    kill(name, arguments)


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
