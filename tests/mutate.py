"""Planted faults: 30 one-line changes of each folder of the package, drawn by a seed, judged by their quickest tests.

    python -m tests.mutate --map                # which tests run which line, and how long they take: once for a source
    python -m tests.mutate --draw 0             # write tests/faults.jsonl anew, without verdicts
    python -m tests.mutate                      # judge what has no verdict yet; goes on after a kill
    python -m tests.mutate --again              # today's verdicts on the same faults, beside those of the log
    python -m tests.mutate --again --folder config

Comparisons, constants, + and -, `and` and `or`, `not`, conditions and whole statements are changed, in copies of the
tree. Changes of words, waiting times and of what only a GPU runs are not drawn. A fault is killed if one of the 20
quickest tests that run its line fails or hangs; it has survived if these pass, if none runs the line, or after 30 s.
`--again` looks first at the test that killed it, and writes to .mutate/again.jsonl; its exit status is 1 if in one
folder more than one fault survives that was killed before.
"""

import argparse
import ast
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import coverage
import psutil
import pytest

from tests.line_map import LineMap, make

ROOT = Path(__file__).parents[1]
LOG = ROOT / "tests" / "faults.jsonl"
STATE = ROOT / ".mutate"  # the map, and the verdicts of --again
COPIED = [
    *("megamix", "tests", "docs", "configs", "launch", ".ci", "pyproject.toml", "constraints.txt"),
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "AGENTS.md", "LICENSE", ".gitignore"),
]
PER_FOLDER = 30
QUICKEST = 20  # tests of a fault
LIMIT_S = 30.0  # of a fault's tests
KNOWN_S = 15.0  # at most what the chosen tests took when the map was made
WORKERS = 2
FAULT = ("folder", "path", "line", "function", "kind", "before", "after")  # of a row; the others are its verdict

SWAPS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in", ast.Add: "-", ast.Sub: "+", ast.And: "or", ast.Or: "and",
}  # fmt: skip
TELLS = {"print", "warn", "log", "say", "note", "info", "warning", "error", "debug", "exception", "tell"}
WAITS = ("_S", "_s", "timeout")  # ends of names of waiting times: they decide when, not what


@dataclass(frozen=True)
class Mutant:
    """One changed line: bytes `start` to `end` of line `line` (from 1) of `path` become `text`."""

    path: Path  # inside the tree
    kind: str
    line: int
    start: int
    end: int
    text: str

    def apply(self, source):
        lines = source.splitlines(keepends=True)
        line = lines[self.line - 1].encode()
        lines[self.line - 1] = (line[: self.start] + self.text.encode() + line[self.end :]).decode()
        return "".join(lines)


def _between(left, right, operator, kind):
    """The operator's place, spaces and brackets included: only where it stands bare on one line."""
    if left.end_lineno == right.lineno and left.end_col_offset is not None and type(operator) in SWAPS:
        yield kind, right.lineno, left.end_col_offset, right.col_offset, f" {SWAPS[type(operator)]} "


def _changes(node):
    """Yield (kind, line, start, end, text) of every change of this node alone."""
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            yield from _between(left, right, operator, "compare")
        case ast.BinOp(left=left, op=operator, right=right):
            yield from _between(left, right, operator, "plus or minus")
        case ast.BoolOp(op=operator, values=[left, right]):
            yield from _between(left, right, operator, "and or or")
        case ast.Constant(value=bool() | int() | float() as value) if node.end_col_offset is not None:
            new = not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else value * 2 or 1.0
            yield "constant", node.lineno, node.col_offset, node.end_col_offset, str(new)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "not", node.lineno, node.col_offset, operand.col_offset, ""
        case ast.If(test=test) | ast.While(test=test) if test.lineno == test.end_lineno:
            yield "not", test.lineno, test.col_offset, test.col_offset, "not "
        case (
            ast.Expr(value=ast.Call())
            | ast.AugAssign()
            | ast.Raise()
            | ast.Continue()
            | ast.Break()
            | ast.Assign(targets=[ast.Attribute() | ast.Subscript()])
        ) if node.lineno == node.end_lineno and node.end_col_offset is not None:
            yield "removed statement", node.lineno, node.col_offset, node.end_col_offset, "pass"


def _called(node):
    function = node.func if isinstance(node, ast.Call) else None
    return getattr(function, "attr", getattr(function, "id", ""))


def _left_out(node, above):
    """Return why a change of `node` below `above` is no fault that a test could see, or ""."""
    chain = [*above, node]
    for parent, child in zip(chain, [*chain[1:], None], strict=True):
        match parent:
            case ast.Raise() if child is not None:
                return "words of an error"
            case ast.Assert(msg=message) if child is not None and child is message:
                return "words of an assertion"
            case ast.JoinedStr():
                return "words"
            case ast.Expr(value=call) if _called(call) in TELLS:
                return "words of a log"
            case ast.FunctionDef(name="__repr__" | "__str__"):
                return "words"
            case ast.keyword(arg=str(name)) if name == "help" or name.endswith(WAITS):
                return "a waiting time"
            case ast.Assign(targets=[ast.Name(id=name)]) if name.endswith(WAITS) and isinstance(node, ast.Constant):
                return "a waiting time"
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                return "types alone"
            case ast.ClassDef(decorator_list=decorators) if child in decorators:
                return "a guard against ourselves"  # frozen, slots
    return ""


def folder_of(path):
    """Return the folder of the package in which `path` counts: `config`, `tools/plan`, or `.` for the loose files."""
    parts = path.parts[1:-1]
    return "/".join(parts[: 2 if parts[:1] == ("tools",) else 1]) or "."


def mutants(tree):
    """Return every fault of the package under `tree` that a test on a CPU could see, in order of files and lines."""
    found = []
    report = coverage.Coverage(data_file=None, config_file=str(tree / "pyproject.toml"))
    for path in sorted((tree / "megamix").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        code = compile(source, "mutant", "exec", dont_inherit=True)
        not_here = set(report.analysis2(str(path))[2])  # what only a GPU runs
        waiting = [(ast.parse(source), [])]
        while waiting:
            node, above = waiting.pop()
            waiting += [(child, [*above, node]) for child in ast.iter_child_nodes(node)]
            for kind, line, start, end, text in _changes(node):
                if line in not_here or _left_out(node, above):
                    continue
                mutant = Mutant(path.relative_to(tree), kind, line, start, end, text)
                try:
                    changed = compile(mutant.apply(source), "mutant", "exec", dont_inherit=True)
                except SyntaxError:  # a bracket stood between operator and operand
                    continue
                if changed != code:
                    found.append(mutant)
    return sorted(found, key=lambda one: (one.path, one.line, one.start, one.kind))


def draw(seed):
    """Return the rows of `PER_FOLDER` faults of each folder, the kinds alike often."""
    folders = {}
    for mutant in mutants(ROOT):
        folders.setdefault(folder_of(mutant.path), {}).setdefault(mutant.kind, []).append(mutant)
    rows = []
    for folder, kinds in sorted(folders.items()):
        dice = random.Random(f"{seed} {folder}")
        for _ in range(PER_FOLDER):
            kind = dice.choice(sorted(kinds))
            mutant = kinds[kind].pop(dice.randrange(len(kinds[kind])))
            if not kinds[kind]:
                del kinds[kind]
            source = (ROOT / mutant.path).read_text(encoding="utf-8")
            before, after = (text.splitlines()[mutant.line - 1].strip() for text in (source, mutant.apply(source)))
            where = {"path": str(mutant.path), "line": mutant.line, "function": _functions(source).get(mutant.line, "")}
            rows.append({"folder": folder, **where, "kind": kind, "before": before, "after": after})
    return rows


def place(row, tree):
    """Return where a row's line stands in `tree` today: file and number; None if it is gone."""
    known = tree / row["path"]
    files = [known, *(path for path in sorted((tree / "megamix").rglob(known.name)) if path != known)]
    for path in (path for path in files if path.is_file()):
        source = path.read_text(encoding="utf-8")
        inside = _functions(source)
        numbers = [
            number
            for number, line in enumerate(source.splitlines(), start=1)
            if line.strip() == row["before"] and inside.get(number, "") == row["function"]
        ]
        if numbers:
            return path, min(numbers, key=lambda number: abs(number - row["line"]))
    return None


def _functions(source):
    """Return the dotted name of the function or class around each line that has one."""
    names = {}
    waiting = [(ast.parse(source), "")]
    while waiting:
        node, name = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = f"{name}.{node.name}".lstrip(".")
            names |= dict.fromkeys(range(node.lineno, (node.end_lineno or node.lineno) + 1), name)
        waiting += [(child, name) for child in ast.iter_child_nodes(node)]
    return names


class Judge:
    """A copy of the tree in which one fault after another is planted and judged."""

    def __init__(self, tree, line_map):
        self.tree, self._map = tree, line_map
        for name in COPIED:
            there = ROOT / name
            if there.exists():
                (shutil.copytree if there.is_dir() else shutil.copy2)(there, tree / name)
        self._clean = {}  # tests that fail here without a fault judge nothing
        self._known = self._tests_of_today()

    def verdict(self, row, killer=""):
        """Return what the tests of a row's line say of its fault, `killer` first.

        `verdict` is killed, survived or gone; `test` the test that failed or hung; `word` why.
        """
        today, then = place(row, self.tree), place(row, self._map.source)
        if today is None:
            return {"verdict": "gone", "test": "", "word": ""}
        tests = self._map.tests(then[0].relative_to(self._map.source), _lines(row, *then)) if then else []
        tests = [test for test in [killer, *(test for test in tests if test != killer)] if test in self._known]
        path, number = today
        stamp, source = path.stat(), path.read_text(encoding="utf-8")
        line = source.splitlines(keepends=True)[number - 1]
        planted = source.splitlines(keepends=True)
        planted[number - 1] = line.replace(row["before"], row["after"])
        while True:
            chosen = self._chosen(tests)
            if not chosen:
                return {"verdict": "survived", "test": "", "word": "no test runs it"}
            path.write_text("".join(planted), encoding="utf-8")
            try:
                passed, test, word = self._run(chosen)
            finally:
                path.write_text(source, encoding="utf-8")
                os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # its compiled file stays good
            if passed:
                return {"verdict": "survived", "test": "", "word": word or f"{len(chosen)} tests pass"}
            if test not in chosen or self._is_clean(test):
                return {"verdict": "killed", "test": test if test in chosen else chosen[0], "word": word}
            tests.remove(test)

    def _chosen(self, tests):
        chosen = []
        known_s = 0.0
        for test in tests[:QUICKEST]:
            known_s += self._map.seconds(test)
            if chosen and known_s > KNOWN_S:
                break
            chosen.append(test)
        return chosen

    def _is_clean(self, test):
        if test not in self._clean:
            self._clean[test] = self._run([test])[0]
        return self._clean[test]

    def _tests_of_today(self):
        collect = [sys.executable, "-m", "pytest", "--collect-only", "-q"]
        said = subprocess.run(collect, cwd=self.tree, env=self._environment(), capture_output=True, text=True).stdout
        return {line for line in said.splitlines() if "::" in line}

    def _environment(self):
        return os.environ | {"PYTHONPATH": str(self.tree), "PYTHONDONTWRITEBYTECODE": "1"}

    def _run(self, tests):
        """Return whether the tests pass, else the one that did not, and a word."""
        said = self.tree / "said.jsonl"
        said.unlink(missing_ok=True)
        if (pid := os.fork()) == 0:  # torch is loaded already, which would take 3 s each time
            self._test_in_child(tests, said)
        end_s, status = time.monotonic() + LIMIT_S, None
        while status is None and time.monotonic() < end_s:
            time.sleep(0.05)
            done, code = os.waitpid(pid, os.WNOHANG)
            status = os.waitstatus_to_exitcode(code) if done else None
        if status is None:
            _end(pid)
        said_so = [json.loads(line) for line in said.read_text().splitlines()] if said.exists() else []
        for test, word in said_so:
            if word:
                return False, test, word
        if status is None and sum(self._map.seconds(test) for test in tests) > LIMIT_S / 3:
            return True, "", "time is up"
        if status is None:
            return False, said_so[-1][0] if said_so else "", "hangs"
        return status == 0, "", "" if status == 0 else f"pytest ended with {status}"

    def _test_in_child(self, tests, said):
        os.setsid()
        os.chdir(self.tree)
        os.environ.update(self._environment())
        sys.dont_write_bytecode = True
        with (self.tree / "output.txt").open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]
        sys.modules["__main__"] = types.ModuleType("__main__")
        sys.path[:] = [str(self.tree), *(path for path in sys.path if path not in ("", str(ROOT)))]
        options = ["-x", "-q", "-p", "no:cacheprovider", "--rootdir", str(self.tree)]
        os._exit(pytest.main([*options, *tests], plugins=[_Says(said)]))


def _lines(row, path, number):
    """Return the lines of a file that show a fault: its own; outside of functions those that name what it assigns, or
    all.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    if row["function"] and not row["before"].startswith(("def ", "@")):
        return [number]
    name = re.match(r"(\w+)\b[^(]*=", row["before"])
    named = [at for at, line in enumerate(lines, start=1) if name and re.search(rf"\b{name[1]}\b", line)]
    return named if len(named) > 1 else [*range(1, len(lines) + 1)]


def _end(pid):
    """End a process that leads its group, and all that it has started."""
    started = psutil.Process(pid).children(recursive=True)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    for process in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _last_line(report):
    """Return the last line of what went wrong, without folders of this machine."""
    return re.sub(r"/\S*/", "", (report.longreprtext.splitlines() or ["failed"])[-1])[:150]


class _Says:
    """Plugin of pytest that writes which test has begun, and which has failed with what."""

    def __init__(self, path):
        self._path = path

    def _write(self, test, word):
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([test, word]) + "\n")

    def pytest_runtest_logstart(self, nodeid):
        self._write(nodeid, "")

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self._write(report.nodeid, _last_line(report))

    def pytest_collectreport(self, report):
        if report.failed:
            self._write(report.nodeid, _last_line(report))


def write(path, rows):
    """Write a log, a row a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read(path):
    """Return the rows of a log, [] if it is not there."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def key(row):
    """Return what tells a fault from all others."""
    return row["path"], str(row["line"]), row["before"], row["after"]


def judge(rows, done, share):
    """Judge this process's share of the rows, one after the other, and append each to `done`."""
    import torch._dynamo  # what the tests import, and this process's children have

    assert torch
    with tempfile.TemporaryDirectory(prefix="megamix-faults-") as folder:
        judged = Judge(Path(folder), LineMap(STATE / "map"))
        for row in rows[share::WORKERS]:
            began_s = time.monotonic()
            today = judged.verdict(row, row.get("test", ""))
            told = {**{name: row[name] for name in FAULT}, **today}
            with done.open("a", encoding="utf-8") as file:
                file.write(json.dumps(told) + "\n")
            where = f"{row['path']}:{row['line']}"
            print(f"{today['verdict']:9} {time.monotonic() - began_s:3.0f} s  {where}  {today['word']}", flush=True)


def compared(before, after):
    """Print how each folder's faults fared, and those that live now. Return the exit status of --again."""
    now = {key(row): row for row in after}
    status = 0
    print(f"{'folder':20} killed survived   now: killed survived gone  newly alive")
    for folder in sorted({row["folder"] for row in before}):
        rows = [row for row in before if row["folder"] == folder and key(row) in now]
        then, today = (Counter(row["verdict"] for row in side) for side in (rows, [now[key(row)] for row in rows]))
        alive = [row for row in rows if (row["verdict"], now[key(row)]["verdict"]) == ("killed", "survived")]
        status |= len(alive) > 1
        counts = [then["killed"], then["survived"], today["killed"], today["survived"], today["gone"], len(alive)]
        print("{:20} {:6} {:8} {:13} {:8} {:4} {:12}".format(folder, *counts))
        for row in alive:
            print(f"    {row['path']}:{row['line']}\n    - {row['before']}\n    + {row['after']}\n    {row['test']}")
    return int(status)


def main():
    parser = argparse.ArgumentParser(description="seeded one-line faults of every folder, judged by its quickest tests")
    parser.add_argument("--map", action="store_true", help="make the map of tests and lines")
    parser.add_argument("--draw", type=int, metavar="SEED", help="write tests/faults.jsonl anew")
    parser.add_argument("--again", action="store_true", help="judge the log's faults in today's source")
    parser.add_argument("--folder", action="append", help="given once or more; all, unless given")
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)  # of one of the processes that judge
    options = parser.parse_args()
    if options.map:
        make(STATE / "map")
        return 0
    if options.draw is not None:
        write(LOG, draw(options.draw))
        return 0
    log = read(LOG)
    done = STATE / ("again.jsonl" if options.again else "first.jsonl")
    chosen = [row for row in log if not options.folder or row["folder"] in options.folder]
    judged = {key(row) for row in read(done)} | (
        set() if options.again else {key(row) for row in log if "verdict" in row}
    )
    waiting = [row for row in chosen if key(row) not in judged]
    if options.share is not None:
        judge(waiting, done, options.share)
        return 0
    again = ["--again"] * options.again + [word for folder in options.folder or [] for word in ("--folder", folder)]
    command = [sys.executable, "-m", "tests.mutate", *again, "--share"]
    workers = [subprocess.Popen([*command, str(share)], cwd=ROOT) for share in range(WORKERS)] if waiting else []
    statuses = [worker.wait() for worker in workers]
    if any(statuses):
        return 2
    if options.again:
        return compared(chosen, read(done))
    verdicts = {key(row): row for row in read(done)}
    write(LOG, [verdicts.get(key(row), row) for row in log])
    return 0


if __name__ == "__main__":
    sys.exit(main())
