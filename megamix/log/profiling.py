"""Profiles of the steps that `[profiling]` names: a trace of each rank, and the times of the first rank's transfers."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from megamix.base.console import Console
from megamix.base.durable import aside_name
from megamix.comm.collectives import Pending
from megamix.comm.timeline import Timeline, Transfer
from megamix.config.sections import ProfilingConfig
from megamix.log.metrics import TRANSFERS, MetricsWriter
from megamix.mixed_precision.bucket import Bucket
from megamix.mixed_precision.engine import ShardedEngine
from megamix.mixed_precision.observer import StepObserver, TransferKind


class Transfers(StepObserver):
    """Observer that shows a step's transfers to its timeline."""

    def __init__(self, timeline: Timeline):
        self._timeline = timeline

    def on_transfer(self, kind: TransferKind, bucket: Bucket, pending: Pending) -> None:
        self._timeline.watch(kind, bucket.number, pending)


class Profiling:
    """Traces of the chosen attempts, in one file per rank, for chrome://tracing or Perfetto.

    A run that resumes among the chosen attempts traces the rest.
    """

    def __init__(
        self,
        section: ProfilingConfig,
        folder: Path,
        engine: ShardedEngine,
        console: Console,
        writer: MetricsWriter | None,
    ):
        self._attempts = range(section.start_step, section.start_step + section.num_steps)
        self._engine, self._console, self._writer = engine, console, writer
        self._trace = folder / f"trace_rank{engine.topology.world.rank}.json"
        self._profiler: torch.profiler.profile | None = None
        self._timelines = dict[int, Timeline]()

    @contextmanager
    def attempt(self, number: int, update: int) -> Iterator[None]:
        """Trace the attempt in the block, if it is chosen. `update`: the last one whose outcome is known."""
        if number not in self._attempts:
            yield
            return
        if self._profiler is None:
            self._profiler = torch.profiler.profile()
            self._profiler.start()
        timeline = self._timelines[number] = Timeline(self._engine.device)
        with self._engine.observe(Transfers(timeline)):
            yield
        if number == self._attempts[-1]:
            # Gloo's sends and receives that begin under the profiler and end after it crash the process.
            self._engine.wait()
            self._profiler.stop()
            self._tell(number, update, self._profiler)

    def _tell(self, attempt: int, update: int, profiler: torch.profiler.profile) -> None:
        with self._console.telling(self._trace):
            aside = self._trace.with_name(aside_name(self._trace.name))  # the file is whole or as it was
            profiler.export_chrome_trace(str(aside))  # renames its file, and raises nothing if it could not write
            if not aside.exists():
                raise OSError(f"{self._trace}: the profiler could not write it")
            aside.rename(self._trace)
            self._console.line(f"attempt {attempt} | profile up to it in {self._trace}")
        if self._writer is not None:
            for number, timeline in self._timelines.items():
                for row in _rows_by_bucket(timeline.transfers()):
                    # Only metrics.jsonl has them: a curve would show one of several rows of a step.
                    self._writer.append(update, {TRANSFERS + "attempt": number, **row})
        self._timelines.clear()  # ends the timelines' threads


def _rows_by_bucket(transfers: Sequence[Transfer]) -> Iterator[dict[str, float]]:
    """Yield a row for each bucket, or several if a step sends it more than once: for each micro-batch or pass."""
    rows = dict[tuple[int, int], dict[str, float]]()
    times = Counter[tuple[str, int]]()
    for kind, bucket, *seconds in transfers:
        row = rows.setdefault((bucket, times[kind, bucket]), {TRANSFERS + "bucket": bucket})
        times[kind, bucket] += 1
        row |= {f"{TRANSFERS}{kind}/{name}": s for name, s in zip(Transfer._fields[2:], seconds, strict=True)}
    yield from (rows[key] for key in sorted(rows))
