"""`megamix doctor --first-light`: all that the first run on a GPU should show, part by part, each under a limit.

Each part is a process of this package, such as a bench. Its lines of JSON are kept at once, so whatever ends early has
told what it found.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from megamix.base.console import say
from megamix.base.log_file import parsed
from megamix.base.processes import children_of
from megamix.base.signals import end_noted
from megamix.tools.doctor.finding import Finding

RESULTS, PAGE, LOG = "results.jsonl", "page.txt", "log.txt"
_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)
_PATH = re.compile(r"(?:(?<![\w.])|(?<=\\n))/(?!dev/|proc/|sys/)(?:[\w.+@-]+/)+")
_NO_TIME, _ASKED = "no time was left, name it by --only", "interrupted"
_ENDS = {"status 0": "ok", _NO_TIME: "not judged", _ASKED: "not judged"}  # of parts; any other one is broken
_LEAST_S = 15.0  # seconds that a part begins with at least
_OWN = "-m", "megamix.tools.doctor.first_parts"
_CHECKS = "cores,driver,torch,/dev/shm,collectives,wire,device,host waits,compiled blocks"
# The page has these titles of verdicts, in this order.
_TITLES = {
    "broken": "What is wrong", "slow": "What is slow", "not judged": "What is not judged", "ok": "What is right",
    "does not apply": "What is not here",
}  # fmt: skip


class LightPart(NamedTuple):
    """A part: Python's arguments, and the seconds that it may take."""

    name: str
    arguments: Sequence[str]
    limit_s: float


def parts(*, on_gpu: bool) -> list[LightPart]:
    """Return all parts. Without a GPU they are small, to try this command."""
    device, rounds = ("cuda", "3") if on_gpu else ("cpu", "1")
    bench = ["-m", "megamix", "bench", "--json", "--device", device, "--rounds", rounds]
    small, large = ("124M", "1.3B") if on_gpu else ("3M", "12M")
    in_fp8 = "ours,fp8_rowwise,fp8_tensorwise,muon"
    doctor = ["-m", "megamix", "doctor", "--json", "--only"]
    chosen = [
        LightPart("machine", [*doctor, _CHECKS, "--limit", "180"], 200),
        LightPart("smoke", [*_OWN, "smoke"], 120),
        LightPart("verify", [*_OWN, "verify"], 200),
        LightPart("job", [*_OWN, "job"], 160),
        LightPart("update", [*bench, "update"], 90),
        LightPart(small, [*bench, "train", "--size", small, "--sides", "ours,plain,fsdp2"], 150),
        LightPart(f"{large} beside torch", [*bench, "train", "--size", large, "--sides", "ours,plain,fsdp2"], 180),
        LightPart("FP8 and Muon", [*bench, "train", "--size", large, "--sides", in_fp8], 180),
        LightPart("plan", [*_OWN, "plan"], 120),
    ]
    return chosen if on_gpu else [part._replace(limit_s=3 * part.limit_s) for part in chosen]


class LightResults:
    """The results so far: rows on the disk, and the page made of them. None names a host, a user or a path."""

    def __init__(self, folder: Path, anew: Sequence[str]) -> None:
        """Begin with what the folder has of other parts than those that run `anew`."""
        self.folder = folder
        self._begun_s, self._lock = time.monotonic(), threading.Lock()
        names = {socket.gethostname(), Path.home().name} - {"root", ""}
        self._own = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b")
        (folder / RESULTS).touch()  # it may have rows of an earlier run with other parts
        kept = (json.dumps(row) + "\n" for row in self._rows() if row["part"] not in anew)
        (folder / RESULTS).write_text("".join(kept))

    def _rows(self) -> list[dict[str, Any]]:
        with self._lock:
            return [*filter(None, map(parsed, (self.folder / RESULTS).read_bytes().splitlines()))]

    def add(self, part: str, row: Mapping[str, Any]) -> None:
        text = json.dumps({"at_s": round(time.monotonic() - self._begun_s, 1), "part": part, **row})
        text = _PATH.sub("", self._own.sub("...", text))
        with self._lock, (self.folder / RESULTS).open("a") as file:
            file.write(text + "\n")

    def write_page(self) -> str:
        text = "\n".join(page(self._rows())) + "\n"
        (self.folder / PAGE).write_text(text)
        return text


def page(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the page's lines: what is wrong, what is slow, what is right, and the figures of the benches."""
    by_verdict, tables = defaultdict[str, list[str]](list), list[str]()
    for row in rows:
        if "verdict" in row:
            by_verdict[row["verdict"]] += Finding(*(row[name] for name in Finding.__slots__)).lines()
        elif "ended" in row:
            told = f"part {row['part']}: {row['ended']}, {row['took']} s"
            by_verdict[_ENDS.get(row["ended"], "broken")].append(told)
        elif "columns" in row:
            from megamix.tools.bench.report import table  # imports torch

            tables += ["", f"{row['part']} ({row['bench']})", *table(row["columns"], row["rows"])]
            tables += row["notes"]
            for goal in row["goals"]:
                told = f"{'met' if goal['met'] else 'MISSED'} {goal['value']:.3f}: {goal['text']}, {row['part']}"
                by_verdict["ok" if goal["met"] else "slow"].append(told)
    for verdict, title in _TITLES.items():
        if by_verdict[verdict]:
            yield from [title, *by_verdict[verdict], ""]
    yield from tables
    yield from ["", f"To tell others, send {RESULTS}: no host, user or path is in it."]


def run(folder: Path, only: Sequence[str], limit_s: float, *, on_gpu: bool) -> int:
    """Run the parts named `only` within `limit_s`, and print the page. Return 1 if anything is wrong, else 0."""
    folder.mkdir(parents=True, exist_ok=True)
    results, end_s, over = LightResults(folder, only), time.monotonic() + limit_s, end_noted()
    with (folder / LOG).open("ab") as log, TemporaryDirectory(dir=folder) as place:
        for part in [part for part in parts(on_gpu=on_gpu) if part.name in only]:
            begun_s, ended = time.monotonic(), _NO_TIME
            if not over.is_set() and end_s - begun_s > _LEAST_S:
                until_s = min(begun_s + part.limit_s, end_s)
                say(f"first light: {part.name}, at most {until_s - begun_s:.0f} s")
                ended = _run(part, Path(place), results, log, until_s, over)
            results.add(part.name, {"ended": ended, "took": round(time.monotonic() - begun_s, 1)})
            results.write_page()
    say(f"{(text := results.write_page())}\n{folder / PAGE}")
    return 130 if over.is_set() else int(_TITLES["broken"] in text)


def _run(part: LightPart, place: Path, results: LightResults, log: Any, until_s: float, over: threading.Event) -> str:
    """Run a part in a folder until it ends, its time is up or all is `over`; return how it ended."""
    process = start(part.arguments, place, log)
    reader = threading.Thread(target=_keep, args=(process, part.name, results, log), daemon=True)
    reader.start()
    while process.poll() is None and time.monotonic() < until_s and not over.wait(0.1):
        pass
    if (status := process.poll()) is None:
        end_tree(process.pid)
        process.wait()
    reader.join(5.0)
    return f"status {status}" if status is not None else _ASKED if over.is_set() else "cut"


def start(arguments: Sequence[str], folder: Path, errors: Any, **settings: str) -> subprocess.Popen[bytes]:
    """Start Python in a folder, as a process that ends with this one, however this one ends (on Linux)."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    return subprocess.Popen(
        [sys.executable, *arguments], cwd=folder, stdout=subprocess.PIPE, stderr=errors, start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), **settings},
        preexec_fn=prctl and partial(prctl, _DIES_WITH_PARENT, signal.SIGTERM),
    )  # fmt: skip


def _keep(process: subprocess.Popen[bytes], part: str, results: LightResults, log: Any) -> None:
    """Keep a part's lines of JSON; all else it says goes to the log."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(b"{"):
            results.add(part, row := json.loads(line))
            if "verdict" in row:
                say("\n".join(Finding(**row).lines()))
        else:
            log.write(line)


def end_tree(pid: int) -> None:
    """Kill a process and all that it has started, in sessions of their own, too."""
    below = children_of(pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    for child in below:
        end_tree(child)
