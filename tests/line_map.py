"""Map each line of the package to the tests that run it, with the seconds of each, for tests/mutate.py.

`make(folder)` runs all tests once with their lines counted, and this module as a plugin of pytest. Ranks and programs
that a test starts count for it.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import coverage
import pytest

from tests.programs import MAP_FOLDER, counting

ROOT = Path(__file__).parents[1]
SETTINGS = """[run]
source = megamix
data_file = {folder}/lines
parallel = true
concurrency = thread
patch = subprocess,_exit
context = ${{PYTEST_CURRENT_TEST-}}
"""
passed_s = {}
failed = set()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    """Count the lines of this process for the test that runs."""
    if (running := counting()) is not None:
        running.switch_context(item.nodeid)
    return (yield)


def pytest_runtest_logreport(report):
    """Sum the seconds of a test's phases."""
    passed_s[report.nodeid] = passed_s.get(report.nodeid, 0.0) + report.duration
    if not report.passed:
        failed.add(report.nodeid)


def pytest_sessionfinish():
    """Write how long each test that passed took: the process that hands tests out knows of all."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        seconds = {test: round(took_s, 3) for test, took_s in passed_s.items() if test not in failed}
        Path(os.environ[MAP_FOLDER], "seconds.json").write_text(json.dumps(seconds, indent=0), encoding="utf-8")


def make(folder):
    """Run all tests, and leave the map and the source that it is of in `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    settings = folder / "settings.ini"
    settings.write_text(SETTINGS.format(folder=folder), encoding="utf-8")
    (folder / "root.txt").write_text(str(ROOT), encoding="utf-8")
    shutil.copytree(ROOT / "megamix", folder / "megamix", ignore=shutil.ignore_patterns("__pycache__"))
    coverage_of = [sys.executable, "-m", "coverage"]
    pytest_with = ["-m", "pytest", "-p", "tests.line_map", "-n", "2", "--dist", "worksteal", "-q"]
    environment = os.environ | {MAP_FOLDER: str(folder)}
    subprocess.run([*coverage_of, "run", f"--rcfile={settings}", *pytest_with], cwd=ROOT, env=environment, check=False)
    subprocess.run([*coverage_of, "combine", "--quiet", f"--rcfile={settings}"], cwd=folder, check=True)


class LineMap:
    """A map that `make` has left in `folder`."""

    def __init__(self, folder):
        self.source = folder
        self._seconds = json.loads((folder / "seconds.json").read_text(encoding="utf-8"))
        self._root = (folder / "root.txt").read_text(encoding="utf-8")
        self._data = coverage.CoverageData(str(folder / "lines"))
        self._data.read()

    def seconds(self, test):
        """Return the seconds that a test took when the map was made, 0 if it is not in it."""
        return self._seconds.get(test, 0.0)

    def tests(self, path, lines):
        """Return the tests that run one of the lines, the quickest first. `path` begins with `megamix`."""
        by_line = self._data.contexts_by_lineno(f"{self._root}/{path}")
        contexts = {context for line in lines for context in by_line.get(line, [])}
        names = {context.rpartition("|")[2].partition(" (")[0] for context in contexts}
        return sorted(names & self._seconds.keys(), key=lambda name: (self._seconds[name], name))
