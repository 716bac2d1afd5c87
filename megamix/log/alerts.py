"""Alerts: a program of the user's that is told how a run ends, and of many overflows. It never holds up a run."""

import datetime
import json
import logging
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megamix.log.metrics import TAGS
from megamix.log.trackers import Tracker

LIMIT_S = 10.0  # seconds that the program may take
STORM = 10  # overflows without a log line between them that are told
_LONGEST = 5_000  # characters of a text, of 12 bytes at most, so that a pipe of 64 KiB takes the object at once

log = logging.getLogger("megamix")


def send(command: Sequence[str], folder: Path, event: str, **facts: Any) -> None:
    """Start the program and give it one JSON object on stdin, without waiting for it. A failure is only logged."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    cut = {name: fact[:_LONGEST] if isinstance(fact, str) else fact for name, fact in facts.items()}
    alert = {"event": event, "run": str(folder), "host": socket.gethostname(), "time": now, **cut}
    quiet = subprocess.DEVNULL
    try:
        # In a session of its own: the signal that ends a run must not end the program that tells of it.
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True, text=True
        )
        assert child.stdin is not None
        with suppress(BrokenPipeError), child.stdin:
            child.stdin.write(json.dumps(alert) + "\n")
    except OSError as error:
        log.warning("alert %s: %s", event, error)
        return
    # No daemon: at a run's end the program has its time.
    threading.Thread(target=_see_to_its_end, args=(child, event), name="alert").start()


def _see_to_its_end(child: subprocess.Popen[str], event: str) -> None:
    try:
        if status := child.wait(LIMIT_S):
            log.warning("alert %s: the program ended with %d", event, status)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        log.warning("alert %s: the program took more than %.0f s and is ended", event, LIMIT_S)


class AlertTracker(Tracker):
    """Tracker that tells of many overflows in a row, once until a log line comes. The search for the first loss scale
    does not count.
    """

    def __init__(self, *, command: Sequence[str], folder: Path, config: Mapping[str, Any]):
        self._command, self._folder = command, folder
        self._overflows: int | None = None  # since the last log line; None before the first one

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if TAGS["loss"] in values:
            self._overflows = 0
        elif TAGS["skipped_steps"] in values and self._overflows is not None:
            self._overflows += 1
            if self._overflows == STORM:
                scale = values.get(TAGS["loss_scale"])
                send(self._command, self._folder, "overflows", step=step, overflows=STORM, loss_scale=scale)
