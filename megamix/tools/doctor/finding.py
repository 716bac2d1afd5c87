"""Findings of checks, and the way checks run: a check that raises or hangs is a finding as well."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megamix.base.console import say

# Verdicts with their marks on the page.
_MARKS = {"ok": "ok", "slow": "SLOW", "broken": "BROKEN", "not judged": "?", "does not apply": "-"}
HANGS = "a check of megamix doctor"  # name of a check's thread, which may be left behind
_SILENT_S = 2.0  # seconds until a check that does not answer is named on stderr


@dataclass(frozen=True, slots=True)
class Finding:
    """Finding of one check. `verdict`: a key of _MARKS. `fix`: what to do; empty if nothing has to be done."""

    check: str
    looked_at: str
    seen: str
    expected: str
    verdict: str
    fix: str = ""

    def lines(self) -> Iterator[str]:
        told = f" (expected: {self.expected})" if self.expected else ""
        yield f"{_MARKS[self.verdict]:<7}{self.check:<15} {self.seen}{told}"
        if self.fix:
            yield f"{'':<22} -> {self.fix}"


@functools.cache
def expected() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("expected.toml").read_text())


def found(check: str, seen: str, wrong: bool, of: str = "", **words: object) -> Finding:
    """Return a finding.

    `of`: tells it from others of the same check. `words`: values for the braces in the check's texts.
    """
    said = {key: text.format(**words) for key, text in expected()["checks"][check].items()}
    verdict, fix = (said["wrong"], said["fix"]) if wrong else ("ok", "")
    return Finding(f"{check} {of}".strip(), said["looked_at"], seen, said["expected"], verdict, fix)


def not_here(check: str, reason: str) -> Finding:
    return Finding(check, "", f"does not apply: {reason}", "", "does not apply")


def run_check(
    check: str, run: Callable[[], Sequence[Finding]], limit_s: float, *, may_last: bool = False
) -> Sequence[Finding]:
    """Return the findings of a check, within `limit_s`.

    The check runs in a thread. If it hangs, as on a lost file system, the thread is left behind. A check that takes
    longer than a moment is named on stderr. `may_last`: it is not judged if it takes longer or has too little
    memory.
    """
    answers = list[Sequence[Finding]]()

    def answer() -> None:
        try:
            answers.append(run())
        except Exception as error:
            last = (str(error).strip().splitlines() or [""])[-1]
            late = isinstance(error, TimeoutError | subprocess.TimeoutExpired) or "OutOfMemory" in str(error)
            answers.append([_unanswered(check, f"{type(error).__name__}: {last}", late=late, may_last=may_last)])

    thread = threading.Thread(target=answer, daemon=True, name=HANGS)
    thread.start()
    silent_s = min(_SILENT_S, limit_s)
    thread.join(silent_s)
    if thread.is_alive():
        say(f"megamix doctor: {check}, at most {limit_s:.0f} s", sys.stderr)
        thread.join(limit_s - silent_s)
    return answers[0] if answers else [_unanswered(check, f"none in {limit_s:.0f} s", late=True, may_last=may_last)]


def _unanswered(check: str, told: str, *, late: bool, may_last: bool) -> Finding:
    """Return the finding of a check that failed or hung, which is broken.

    A late check is not judged if it `may_last` longer, or if other programs slow it down: then the load is beyond that
    of our ranks, which fill the cores. The load is the whole machine's, also in a container that has few of its cores.
    """
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    busy = f"the machine is busy (load {load:.1f} on {cores} core(s))" if load > 1.5 * cores else ""
    if late and (may_last or busy):
        return found("time", f"not judged: {told}; {busy or 'it may need more'}", True, of=check)
    return found("answer", told, True, of=check)


def is_fit(findings: Sequence[Finding]) -> bool:
    return not any(one.verdict == "broken" for one in findings)


def summary(findings: Sequence[Finding]) -> str:
    """Return the page's last line."""
    counts = {verdict: sum(one.verdict == verdict for one in findings) for verdict in _MARKS}
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    fit = "fit as far as judged" if counts["not judged"] else "fit to train"
    return f"{'NOT fit: repair each BROKEN line' if counts['broken'] else fit}: {told}"
