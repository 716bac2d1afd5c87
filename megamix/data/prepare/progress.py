"""A bar for a person who waits at a terminal; nothing in a log."""

import sys
from typing import Protocol


class ProgressBar(Protocol):
    def update(self, num_bytes: int) -> object: ...

    def close(self) -> None: ...


class _Silent:
    def update(self, num_bytes: int) -> None: ...

    def close(self) -> None: ...


def progress_of_bytes(total: int, what: str) -> ProgressBar:
    """A bar on stderr, if that is a terminal and tqdm is installed."""
    if not sys.stderr.isatty():
        return _Silent()
    try:
        from tqdm import tqdm
    except ImportError:
        return _Silent()
    bar: ProgressBar = tqdm(total=total, desc=what, unit="B", unit_scale=True)
    return bar
