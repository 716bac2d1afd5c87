"""The time of a step in named spans, measured on the host or, on a GPU, on the device without waiting."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Sums the seconds spent in each named span, without the seconds of spans inside it. Off until `enabled` is set.

    On a CPU a wait blocks the host, so host time is exact. On a GPU a wait only orders streams. There a pair of events
    on the compute stream measures how long the stream stalled, and `read` takes the pairs that the device has passed.
    """

    def __init__(self, device: torch.device):
        self.enabled = False
        self.entered = 0  # number of spans so far, measured or not; shows this thread's progress to other threads
        self.loaded = 0  # bytes of a checkpoint so far; shows progress, too
        self._on_gpu = device.type == "cuda"
        self._open = list[tuple[str, str]]()  # names of the open spans, and where each is
        self._last = "the start"
        self._seconds = defaultdict[str, float](float)
        self.total_s = defaultdict[str, float](float)  # seconds per span since the start, as far as read
        self._events = list[tuple[str, str | None, torch.cuda.Event, torch.cuda.Event]]()

    @contextmanager
    def span(self, name: str, where: str = "") -> Iterator[None]:
        """Measure the block. `where`: words behind the name for `doing`, such as ` of stage 1`."""
        outer = self._open[-1][0] if self._open else None
        self._open.append((name, where))
        self._last = name + where
        self.entered += 1
        try:
            if not self.enabled:
                yield
            elif self._on_gpu:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                start.record()
                yield
                end.record()
                self._events.append((name, outer, start, end))
            else:
                start_s = time.perf_counter()
                yield
                self._add(name, outer, time.perf_counter() - start_s)
        finally:
            self._open.pop()

    def doing(self) -> str:
        """Return the innermost open span, else the last one. Any thread may call it."""
        return next((name + where for name, where in self._open[-1:]), f"the code after {self._last}")

    def read(self) -> dict[str, float]:
        """Return the seconds per span since the last call.

        On a GPU the host runs ahead. Spans that the device has not passed yet are left to the next call, because
        waiting for them would drain the device's queue.
        """
        events = enumerate(self._events)
        outermost = [number for number, (_, outer, _, end) in events if outer is None and end.query()]  # type: ignore[no-untyped-call]  # untyped in torch
        passed = max(outermost, default=-1) + 1  # an outermost span ends after all spans inside it
        for name, outer, start, end in self._events[:passed]:
            self._add(name, outer, start.elapsed_time(end) / 1e3)
        del self._events[:passed]
        seconds = dict(self._seconds)
        self._seconds.clear()
        return seconds

    def _add(self, name: str, outer: str | None, seconds: float) -> None:
        self._seconds[name] += seconds
        self.total_s[name] += seconds
        if outer is not None:
            self._seconds[outer] -= seconds
            self.total_s[outer] -= seconds
