"""Copies of a run's finished checkpoints elsewhere, made by a thread while training goes on. A failure ends no run."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from megamix.checkpoint.copying import copy_checkpoint
from megamix.checkpoint.folder import CHECKPOINTS, Files, checkpoints
from megamix.checkpoint.save import Stays, remove_old
from megamix.config import Config, ConfigError
from megamix.durable import remove_asides, write_text
from megamix.run.run_folder import CONFIG, copy_problems
from megamix.supervise.run_lock import run_lock

RETRY_S = 60.0  # seconds from a failure to the next try

Take = Callable[[Path], str]  # takes a checkpoint elsewhere, and returns that in words


class Copier:
    """Thread that takes each checkpoint of a folder elsewhere, the newest first.

    `taking`: the checkpoint that must not be removed now. A failure is told once, and tried again until it succeeds; a
    checkpoint that is damaged is told and left out.
    """

    def __init__(self, folder: Path, take: Take, tell: Callable[[str], None]):
        self.taking: Path | None = None
        self._folder, self._take, self._tell = folder, take, tell
        self._ended = set[str]()  # names of the checkpoints that are taken or left out
        self._in_trouble = self._closing = False
        self._wake = threading.Event()
        # A daemon, so a run that fails does not wait for it. Its copy ends as if it were killed.
        self._thread = threading.Thread(target=self._run, name="copies", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Look for new checkpoints now."""
        self._wake.set()

    def close(self) -> None:
        """Take what is left, with one try, and end."""
        self._closing = True
        self._wake.set()

    def ends_within(self, seconds: float) -> bool:
        """Return whether the thread has ended, after waiting so long at most."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    @property
    def has_taken_all(self) -> bool:
        """Return whether the thread has ended without a failure."""
        return not self._thread.is_alive() and not self._in_trouble

    def _run(self) -> None:
        closing = False
        while not closing:
            closing = self._closing
            self._take_all()
            if not closing:
                self._wake.wait(RETRY_S if self._in_trouble else None)
                self._wake.clear()

    def _take_all(self) -> None:
        """Take what is left, until a failure."""
        try:
            while left := [path for path in checkpoints(self._folder) if path.name not in self._ended]:
                self.taking = left[0]
                self._take_one(left[0])
                self._ended.add(left[0].name)
            self._in_trouble = False
        except Exception as error:  # of a disk, of a program, of the job that holds the target
            if not self._in_trouble:
                self._tell(f"checkpoint NOT copied, which is tried again: {' '.join(str(error).split())}")
            self._in_trouble = True
        finally:
            self.taking = None

    def _take_one(self, path: Path) -> None:
        try:
            self._tell(self._take(path))
        except (OSError, ValueError) as error:
            if not path.exists():  # removed before its copy began
                return
            if isinstance(error, OSError):
                raise
            self._tell(f"checkpoint NOT copied: {error}")


def takes_of(config: Config, stays: Stays, tell: Callable[[str], None]) -> Iterator[Take]:
    """Yield the ways on which the configuration wants checkpoints to be taken elsewhere. `stays`: see `remove_old`."""
    if config.checkpoint.copy_to is not None:
        yield _to_folder(config, Path(config.checkpoint.copy_to), stays, tell)
    if config.checkpoint.copy_command:
        yield _by_command(config.checkpoint.copy_command)


def _to_folder(config: Config, home: Path, stays: Stays, tell: Callable[[str], None]) -> Take:
    disk: int | None = None  # the file system of the first copy

    def take(path: Path) -> str:
        nonlocal disk
        (home / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        now = home.stat().st_dev
        if disk not in (None, now):
            raise OSError(f"{home} lies on another file system than before; mount it again")
        disk, files = now, Files()
        try:
            with run_lock(home, tell):
                for problem in copy_problems(config):
                    raise OSError(problem)
                remove_asides(home, CONFIG)
                write_text(home / CONFIG, config.text)
                keep = config.checkpoint.copy_keep or sys.maxsize
                drop = partial(remove_old, home / CHECKPOINTS, keep, files=files, stays=stays)
                drop(None)  # those that an earlier, larger copy_keep has left
                drop(copied := copy_checkpoint(path, home / CHECKPOINTS, files))
        except ConfigError as error:  # another job holds the folder
            raise OSError(error.problems[0]) from None
        return f"copied {path.name} to {copied}"

    return take


def _by_command(command: tuple[str, ...]) -> Take:
    def take(path: Path) -> str:
        words = [word.replace("{path}", str(path)).replace("{name}", path.name) for word in command]
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, errors="replace"
        )
        if done.returncode:
            last = " ".join(done.stderr.splitlines()[-1:])
            raise OSError(f"{words[0]} ended with {done.returncode}: {last}")
        return f"copied {path.name} by {words[0]}"

    return take
