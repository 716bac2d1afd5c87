"""Copies of a run's finished checkpoints elsewhere, made by a thread while training goes on. A failure ends no run."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megamix.base.durable import remove_asides, write_text
from megamix.checkpoint.copying import copy_checkpoint
from megamix.checkpoint.folder import CHECKPOINTS, Files, checkpoints
from megamix.checkpoint.save import Stays, remove_old
from megamix.config import ConfigError
from megamix.config.sections import CheckpointConfig
from megamix.launch.run_folder import CONFIG, copy_problems
from megamix.launch.run_lock import run_lock

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
        try:
            while left := [path for path in checkpoints(self._folder) if path.name not in self._ended]:
                self.taking = path = left[0]
                try:
                    self._tell(self._take(path))
                except (OSError, ValueError) as error:
                    if path.exists() and isinstance(error, OSError):
                        raise
                    if path.exists():  # else it was removed before its copy began
                        self._tell(f"checkpoint NOT copied: {error}")
                self._ended.add(path.name)
            self._in_trouble = False
        except Exception as error:  # of a disk, of a program, of the job that holds the target
            if not self._in_trouble:
                self._tell(f"checkpoint NOT copied, which is tried again: {' '.join(str(error).split())}")
            self._in_trouble = True
        finally:
            self.taking = None


def takes_of(section: CheckpointConfig, text: str, stays: Stays, tell: Callable[[str], None]) -> Iterator[Take]:
    """Yield the ways on which checkpoints are to be taken elsewhere.

    `text`: the configuration of the run. `stays`: see `remove_old`.
    """
    if section.copies is not None:
        yield ToFolder(section, text, Path(section.copies.folder), section.copies.keep, stays, tell)
    if section.copy_command:
        yield partial(_by_command, section.copy_command)


@dataclass
class ToFolder:
    """Takes checkpoints to a folder, which holds copies of this run alone."""

    section: CheckpointConfig
    text: str
    home: Path
    keep: int  # newest copies; 0: all
    stays: Stays
    tell: Callable[[str], None]
    _disk: int | None = None  # the file system of the first copy

    def __call__(self, path: Path) -> str:
        there, files = self.home / CHECKPOINTS, Files()
        there.mkdir(parents=True, exist_ok=True)
        now = self.home.stat().st_dev
        if self._disk not in (None, now):
            raise OSError(f"{self.home} lies on another file system than before; mount it again")
        self._disk = now
        try:
            with run_lock(self.home, self.tell):
                for problem in copy_problems(self.section):
                    raise OSError(problem)
                remove_asides(self.home, CONFIG)
                write_text(self.home / CONFIG, self.text)
                drop = partial(remove_old, there, self.keep or sys.maxsize, files=files, stays=self.stays)
                drop(None)  # those that an earlier, larger number has left
                drop(copied := copy_checkpoint(path, there, files))
        except ConfigError as error:  # another job holds the folder
            raise OSError(error.problems[0]) from None
        return f"copied {path.name} to {copied}"


def _by_command(command: tuple[str, ...], path: Path) -> str:
    words = [word.replace("{path}", str(path)).replace("{name}", path.name) for word in command]
    done = subprocess.run(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, errors="replace"
    )
    if done.returncode:
        last = " ".join(done.stderr.splitlines()[-1:])
        raise OSError(f"{words[0]} ended with {done.returncode}: {last}")
    return f"copied {path.name} by {words[0]}"
