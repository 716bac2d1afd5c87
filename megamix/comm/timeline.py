"""When the transfers of a step's buckets were launched, had arrived, were needed and were waited for.

Only steps that are to be profiled are looked at so: on a CPU by a thread for each transfer, on a GPU by events alone.
What is computed stays the same, bit for bit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from megamix.comm.collectives import Pending

Instant = Any  # of the host: seconds; of a GPU: an event


class Transfer(NamedTuple):
    """One bucket's collective. Units: seconds since the step began, and `waited_s` long."""

    kind: str
    bucket: int
    launched_s: float
    landed_s: float  # all of it was there
    needed_s: float  # the step first asked for it
    waited_s: float  # in which nothing was computed; of Gloo with the sum of what had arrived


@dataclass
class _Watched:
    kind: str
    bucket: int
    launched: Instant
    landed: Instant = None
    waits: list[tuple[Instant, Instant]] = field(default_factory=list)


class Timeline:
    """Of one step, which begins now. `watch` is for `Clock.watch`."""

    def __init__(self, device: torch.device):
        self._device, self._on_gpu = device, device.type == "cuda"
        self._watched: list[_Watched] = []
        # Waits for transfers beside the stream that computes.
        self._stream = torch.cuda.Stream(device) if self._on_gpu else None  # type: ignore[no-untyped-call]
        self._begin = self._now()

    def watch(self, kind: str, bucket: int, pending: Pending) -> None:
        """Note what becomes of a transfer that has just been launched."""
        watched = _Watched(kind, bucket, self._now())
        self._watched.append(watched)
        pending.noted = partial(self._noted, watched)
        if self._stream is None:
            arrival = _Arrival(pending.works, watched)
            arrival.start()
            pending.works = [arrival]
        else:
            with torch.cuda.stream(self._stream):
                for work in pending.works:
                    work.wait()
                watched.landed = self._now()

    def transfers(self) -> list[Transfer]:
        """Return what has become of them, in the order of their launches; all must have been waited for. Waits for the
        device.
        """
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
        return [
            Transfer(
                one.kind, one.bucket, self._s(self._begin, one.launched), self._s(self._begin, one.landed),
                self._s(self._begin, one.waits[0][0]), sum(self._s(*wait) for wait in one.waits),
            )
            for one in self._watched
        ]  # fmt: skip

    @contextmanager
    def _noted(self, watched: _Watched) -> Iterator[None]:
        start = self._now()
        yield
        watched.waits.append((start, self._now()))

    def _now(self) -> Instant:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # no types
        event.record()
        return event

    def _s(self, start: Instant, end: Instant) -> float:
        seconds: float = start.elapsed_time(end) / 1e3 if self._on_gpu else end - start
        return seconds


class _Arrival(threading.Thread):
    """Waits for works in the place of whoever has launched them, and notes when they have arrived."""

    def __init__(self, works: Sequence[Any], watched: _Watched):
        super().__init__(name="arrival", daemon=True)
        self._works, self._watched, self._error = works, watched, list[Exception]()

    def run(self) -> None:
        try:
            for work in self._works:
                work.wait()
        except Exception as error:  # a peer died: told to the one who waits
            self._error = [error]
        self._watched.landed = time.perf_counter()

    def wait(self) -> None:
        self.join()
        for error in self._error:
            raise error
