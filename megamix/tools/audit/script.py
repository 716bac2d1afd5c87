"""Audit of any script: run its command, have each of its processes watch one update, and put the facts together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from megamix.base.signals import sigterm_noted
from megamix.tools.audit.facts import Note
from megamix.tools.audit.report import AuditReport

POLL_S = 0.1
LEAVE_S = 10.0  # seconds that the command has to end after its audit, and again after SIGTERM
_START = Path(__file__).with_name("start")


class ScriptReport(NamedTuple):
    """Result of a script's audit."""

    report: AuditReport
    ranks: int
    unseen: int  # tensors that its optimizers move and no module holds
    waiting: int  # parameters whose optimizer made no step


def audit_script(command: Sequence[str], updates: int, *, quiet: bool = False) -> ScriptReport:
    """Return the report on update number `updates` of the script that a command starts.

    The command is ended after that update. `quiet`: its output goes to stderr. Raises: OSError if it does not start;
    ValueError that says why nothing was seen.
    """
    with TemporaryDirectory(prefix="megamix-audit-") as folder, ExitStack() as stack:
        paths = [str(_START), *filter(None, [os.environ.get("PYTHONPATH")])]
        added = {
            "PYTHONPATH": os.pathsep.join(paths),
            "MEGAMIX_AUDIT_FOLDER": folder,
            "MEGAMIX_AUDIT_PATH": str(Path(__file__).parents[3]),
            "MEGAMIX_AUDIT_UPDATES": str(updates),
        }
        asked = stack.enter_context(sigterm_noted())  # it may come before the child is known
        # A session of its own, so that all its processes can be ended together.
        child = subprocess.Popen(
            command, env=os.environ | added, stdout=sys.stderr if quiet else None, start_new_session=True
        )
        stack.callback(_end, child)
        notes = _wait(child, Path(folder), updates, asked)
        with suppress(subprocess.TimeoutExpired):
            child.wait(LEAVE_S)
    if asked:
        sys.exit(128 + asked[0])
    report = AuditReport()
    report.fill(notes, skipped=False)
    unseen, waiting = (max(note[kind] for note in notes) for kind in ("unseen", "waiting"))
    return ScriptReport(report, len(notes), unseen, waiting)


def _wait(child: subprocess.Popen[bytes], folder: Path, updates: int, asked: Sequence[int]) -> list[Note]:
    """Return the notes of all ranks. Raises: ValueError if they do not come, or one is a refusal."""
    while not asked:
        status = child.poll()  # before the notes are read: a process writes its own before it ends
        if refusals := _notes(folder, "refusal"):
            raise ValueError(f"the script cannot be audited: {refusals[0]['text']}")
        told = _notes(folder, "facts")
        if told and len(told) >= told[0]["world"]:
            return told
        if told and status is not None:
            world = told[0]["world"]
            raise ValueError(f"{len(told)} of {world} ranks were seen; start all of them here, by one command")
        if status is not None:
            raise ValueError(_why_not(_notes(folder, "end"), status, updates))
        time.sleep(POLL_S)
    return []


def _notes(folder: Path, kind: str) -> list[Note]:
    return [json.loads(path.read_text()) for path in folder.glob(f"*.{kind}")]


def _why_not(ends: Sequence[Note], status: int, updates: int) -> str:
    if status:
        return f"the command ended with status {status} before its update {updates}; its own message is above"
    if not ends:
        return (
            "no Python of this command has imported torch with the audit's PYTHONPATH, which python -I or another "
            "environment leaves out; write megamix audit -- python SCRIPT"
        )
    made = max(note["made"] for note in ends)
    if not made:
        return (
            "no torch.optim.Optimizer made an update: one that is written by hand, or is no subclass of it, cannot be "
            "seen from outside; megamix verify --trainer judges such a loop by its results, see docs/verify.md"
        )
    more = f"write --updates {made}, or give" if made > 1 else "give"
    return f"it made {made} update(s) that can be audited; {more} it more to do"


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            child.wait(LEAVE_S)
    with suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(child.pid, signal.SIGKILL)  # also processes that it has started and left
        child.wait(LEAVE_S)
