"""`python -m tests.gpu.cpu_only` runs the tests of engine and model on the simulated GPU and writes down which of them
it cannot run, and why: cpu_only.txt, by which `pytest --device cuda` chooses its tests.
"""

import re
import sys

import pytest

from tests.devices import CPU_ONLY, ROOMS


class Recorder:
    """Keeps the first error of each test that fails, and the names of those that pass."""

    def __init__(self):
        self.errors = {}
        self.passed = set()

    def pytest_runtest_logreport(self, report):
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.errors.setdefault(report.nodeid, _told(str(crash.message if crash else report.longrepr)))
        elif report.passed and report.when == "call":
            self.passed.add(report.nodeid)

    def lines(self):
        """Return a line for each test of which no case passes, and for each case that fails of another one."""
        mixed = {_test(case) for case in self.passed}
        found = {case if (test := _test(case)) in mixed else test: why for case, why in self.errors.items()}
        return [f"{name}\t{why}\n" for name, why in sorted(found.items())]


def _test(case):
    return case.partition("[")[0]


def _told(error):
    """Return the line of an error that says what it is, a rank's in place of its pool's, without what differs from run
    to run.
    """
    lines = error.strip().splitlines()
    last = [line for line in lines if re.match(r"(rank \d: )?[\w.]*(Error|Exception|HostRead)\b", line)] or lines[:1]
    return " ".join(re.sub(r"0x[0-9a-f]+|/tmp/\S+", "", last[-1]).split())[:120].strip()


if __name__ == "__main__":
    CPU_ONLY.write_text("", encoding="utf-8")
    recorder = Recorder()
    pytest.main(["--device", "simulated", "-q", "--tb=short", *sys.argv[1:], *ROOMS], plugins=[recorder])
    CPU_ONLY.write_text("".join(recorder.lines()), encoding="utf-8")
