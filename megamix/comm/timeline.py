"""The timeline of a step's transfers: when each was launched, had arrived, was needed and was waited for.

Only profiled steps pay for it: on a CPU with a thread for each transfer, on a GPU only with events. The results of the
step stay the same, bit for bit.
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from megamix.comm.collectives import Pending

_MOST_THREADS = 256  # most transfers watched at once; further transfers seem to arrive late

Instant = Any  # host: seconds; GPU: an event


class Transfer(NamedTuple):
    """One bucket's collective. Units: seconds since the step began; `waited_s` is a duration in seconds."""

    kind: str
    bucket: int
    launched_s: float
    landed_s: float  # the whole transfer had arrived
    needed_s: float  # the step first waited for the transfer
    waited_s: float  # the step stood still for the transfer; on Gloo this includes the sum of the parts


@dataclass
class _Watched:
    kind: str
    bucket: int
    launched: Instant
    landed: Instant = None
    waits: list[tuple[Instant, Instant]] = field(default_factory=list)


class Timeline:
    """Records the transfers of one step, which begins now."""

    def __init__(self, device: torch.device):
        self._device, self._on_gpu = device, device.type == "cuda"
        self._watched = list[_Watched]()
        self._threads = ThreadPoolExecutor(_MOST_THREADS, "arrivals")  # threads start on demand
        # A stream that waits for transfers, beside the stream that computes.
        self._stream = torch.cuda.Stream(device) if self._on_gpu else None  # type: ignore[no-untyped-call]  # untyped in torch
        self._begin = self._now()

    def watch(self, kind: str, bucket: int, pending: Pending) -> None:
        """Record a transfer that has just been launched."""
        watched = _Watched(kind, bucket, self._now())
        self._watched.append(watched)
        pending.noted = partial(self._noted, watched)
        if self._stream is None:
            arrival = self._threads.submit(self._arrive, watched, pending.works)
            pending.works = [SimpleNamespace(wait=arrival.result)]  # raises the thread's error
        else:
            with torch.cuda.stream(self._stream):
                self._arrive(watched, pending.works)

    def transfers(self) -> list[Transfer]:
        """Return all transfers in the order of their launches, after each was waited for. It waits for the device."""
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
        return [
            Transfer(
                one.kind, one.bucket, self._s(self._begin, one.launched), self._s(self._begin, one.landed),
                self._s(self._begin, one.waits[0][0]), sum(self._s(*wait) for wait in one.waits),
            )
            for one in self._watched
        ]  # fmt: skip

    def _arrive(self, watched: _Watched, works: Sequence[Any]) -> None:
        for work in works:
            work.wait()
        watched.landed = self._now()

    @contextmanager
    def _noted(self, watched: _Watched) -> Iterator[None]:
        start = self._now()
        yield
        watched.waits.append((start, self._now()))

    def _now(self) -> Instant:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # untyped in torch
        event.record()
        return event

    def _s(self, start: Instant, end: Instant) -> float:
        seconds: float = start.elapsed_time(end) / 1e3 if self._on_gpu else end - start
        return seconds
