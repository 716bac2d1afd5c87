"""Trackers: other places for a run's values. Each has a thread and queue of its own, so that none can hurt the run."""

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from megamix.data import import_extra

MOST_WAITING = 1000  # rows and texts; with more waiting, a tracker is too slow
CLOSE_S = 30.0  # seconds at the end of a run for rows that still wait

log = logging.getLogger("megamix")


class Tracker(Protocol):
    """Tracker of a run, built by a registered `build(**keys, folder=, config=)`.

    `folder`: the run's, as a Path. `config`: the effective configuration, as a dict. Building and all calls come from
    one thread that no other tracker shares.
    """

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take a row: numbers by tag, as TensorBoard gets them; one step may have several."""

    def text(self, name: str, text: str) -> None:
        """Take the sample at the end of a run."""

    def close(self) -> None: ...


class TrackerThread:
    """Thread that hands calls to a tracker. Nothing here raises or waits; only `close` waits a moment.

    The first failure is logged, and at the end how much was lost.
    """

    def __init__(self, name: str, build: Callable[[], Tracker]):
        self.name, self._given, self._taken, self._in_trouble = name, 0, 0, False
        self._calls = queue.SimpleQueue[Callable[[Tracker], None] | None]()
        # a daemon: a tracker that hangs ends with the process
        self._thread = threading.Thread(target=self._run, args=(build,), name=f"tracker {name}", daemon=True)
        self._thread.start()

    def tell(self, call: Callable[[Tracker], None]) -> None:
        self._given += 1
        if self._calls.qsize() < MOST_WAITING:
            self._calls.put(call)
        else:
            self._trouble(f"{MOST_WAITING} rows wait for it")

    def close(self) -> None:
        self._calls.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._trouble(f"it does not end within {CLOSE_S:.0f} s")
        if lost := self._given - self._taken:
            log.warning("tracker %s: %d of %d rows are lost", self.name, lost, self._given)

    def _run(self, build: Callable[[], Tracker]) -> None:
        with self._guarded():
            tracker = build()
            while (call := self._calls.get()) is not None:
                with self._guarded():
                    call(tracker)
                    self._taken += 1
            tracker.close()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a stranger's code may raise anything
            self._trouble(f"{type(error).__name__}: {error}")

    def _trouble(self, reason: str) -> None:
        if not self._in_trouble:
            log.warning(
                "tracker %s: %s; the run goes on, and the rows that it does not take are lost", self.name, reason
            )
        self._in_trouble = True


class WandbTracker:
    """Weights & Biases, which writes into the run's folder and sends nothing; `wandb sync` sends it later."""

    def __init__(self, *, project: str, folder: Path, config: Mapping[str, Any]):
        wandb = import_extra("wandb", "wandb", what="[metrics.wandb]: ")
        quiet = {"silent": True, "console": "off"}
        self._run = wandb.init(
            project=project, name=folder.name, dir=folder, config=config, mode="offline", settings=quiet
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def text(self, name: str, text: str) -> None:
        self._run.summary[name] = text

    def close(self) -> None:
        self._run.finish()
