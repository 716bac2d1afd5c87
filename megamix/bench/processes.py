"""The processes of a bench: each side of a comparison has ranks of its own, alive for the whole bench and blocked on a
pipe while another side runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

_DEADLINE_S = 600.0  # for one answer; the slowest is a step of FP16 products on a CPU without FP16 units


class Ranks:
    """`world_size` new processes, joined by Gloo, each holding one `actor(*args)` whose methods `call` runs on all."""

    def __init__(
        self,
        name: str,
        actor: Callable[..., Any],
        *args: Any,
        world_size: int = 1,
        threads: int = 1,
        environment: Mapping[str, str] | None = None,
    ):
        self._name = name
        self._pipes: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="megamix-bench-")
        settings = {**os.environ, **process_environment(threads), **(environment or {})}
        try:
            for rank in range(world_size):
                mine, theirs = Pipe()
                self._pipes.append(mine)
                # A new interpreter, not a fork: OpenMP and malloc read their settings when a program starts. Its
                # standard output would mix Gloo's greetings into the report.
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "megamix.bench.worker", str(theirs.fileno())],
                        env=settings,
                        pass_fds=[theirs.fileno()],
                        stdout=subprocess.DEVNULL,
                    )
                )
                theirs.close()
                mine.send((rank, world_size, str(Path(self._folder.name) / "store"), actor, args))
            self._answers()
        except BaseException:
            self.close(kill=True)
            raise

    def call(self, method: str, *args: Any) -> list[Any]:
        """Run one method on every rank at the same time; their answers in rank order.

        Raises: RuntimeError with the rank's own traceback, or saying which rank died or did not answer.
        """
        for pipe in self._pipes:
            pipe.send((method, args))
        return self._answers()

    def close(self, *, kill: bool = False) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=False):
            if kill:
                process.kill()
            else:
                with contextlib.suppress(BrokenPipeError):
                    pipe.send(None)
        for process in self._processes:
            process.wait()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self.close(kill=error is not None)  # after an error a rank may wait for ever for another one

    def _answers(self) -> list[Any]:
        return [self._answer(rank) for rank in range(len(self._pipes))]

    def _answer(self, rank: int) -> Any:
        who = f"{self._name}: rank {rank} of {len(self._pipes)}"
        if not self._pipes[rank].poll(_DEADLINE_S):
            raise RuntimeError(f"{who} did not answer for {_DEADLINE_S:.0f} s")
        try:
            kind, value = self._pipes[rank].recv()
        except (EOFError, ConnectionResetError) as error:
            raise RuntimeError(f"{who} died with exit code {self._processes[rank].wait()}") from error
        if kind == "raised":
            raise RuntimeError(f"{who} failed:\n{value}")
        return value


def process_environment(threads: int) -> dict[str, str]:
    """What launch/pretrain.sh sets for its ranks: the same for every side of a comparison."""
    return {"OMP_NUM_THREADS": str(threads), **_malloc_settings()}


def _malloc_settings() -> dict[str, str]:
    """glibc told to keep the pages that a step frees for the next one; the reasons are in launch/pretrain.sh."""
    try:  # glibc before 2.35 refuses more than 32 MiB; M_MMAP_THRESHOLD is -3
        largest_kept = 2**32 if ctypes.CDLL(None).mallopt(-3, 2**30) else 2**25
    except (AttributeError, OSError, TypeError):  # not glibc
        return {}
    return {
        "MALLOC_MMAP_THRESHOLD_": str(largest_kept),
        "MALLOC_TRIM_THRESHOLD_": str(2**32),
        "MALLOC_TOP_PAD_": str(2**28),
    }
