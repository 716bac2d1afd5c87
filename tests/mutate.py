"""Planted faults: seeded one-line mutations of the package, each run against the tests of its room.

    python -m tests.mutate --seed 0 --count 40                # a row and a diff for each, and how many were caught
    python -m tests.mutate --room checkpoint --count 5
    python -m tests.mutate --equivalent 7,19                  # draws that a reader found to be no fault: redrawn
    python -m tests.mutate --again LOG                        # what an earlier run has judged, in today's source

Comparisons, constants, + and -, `and` and `or`, `not`, conditions and whole statements are changed, in a copy of the
tree. Draws that only change words or waiting times are left out and listed. A mutant that makes a test hang is caught;
one that passes every test that fits into the time has survived. Exit status: 0 if all were caught, else 1.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import coverage

ROOT = Path(__file__).parents[1]
COPIED = ["megamix", "tests", "docs", "configs", "launch", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"]
# Each room of the package, and the folders of the tests that must notice.
ROOMS = {
    "mixed_precision": ["mixed_precision", "distributed", "inspect"],
    "checkpoint": ["checkpoint"],
    "train": ["train"],
    "run": ["run", "train"],
    "report": ["report"],
    "builders": ["builders", "train"],
    "supervise": ["supervise", "train", "run"],
    "inspect": ["inspect", "train"],
}
LIMIT_S = 180.0  # of one mutant's tests
HANGS_S = 60.0  # no test of these rooms takes as long

SWAPS: dict[type[ast.AST], str] = {
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
    left_out: str  # why this is no fault that a test could see, or ""

    def apply(self, source: str) -> str:
        lines = source.splitlines(keepends=True)
        line = lines[self.line - 1].encode()
        lines[self.line - 1] = (line[: self.start] + self.text.encode() + line[self.end :]).decode()
        return "".join(lines)


def _between(left: ast.expr, right: ast.expr, operator: ast.AST, kind: str) -> Iterator[tuple[str, int, int, int, str]]:
    """The operator's place, spaces and brackets included: only where it stands bare on one line."""
    if left.end_lineno == right.lineno and left.end_col_offset is not None and type(operator) in SWAPS:
        yield kind, right.lineno, left.end_col_offset, right.col_offset, f" {SWAPS[type(operator)]} "


def _changes(node: ast.AST) -> Iterator[tuple[str, int, int, int, str]]:
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


def _called(node: ast.AST) -> str:
    function = node.func if isinstance(node, ast.Call) else None
    return getattr(function, "attr", getattr(function, "id", ""))


def _left_out(node: ast.AST, above: list[ast.AST]) -> str:
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


def mutants(tree: Path, rooms: list[str]) -> list[Mutant]:
    """Return every mutant of the rooms' files under `tree`, in order of files and lines."""
    found = []
    report = coverage.Coverage(data_file=None, config_file=str(tree / "pyproject.toml"))
    for path in sorted(path for room in rooms for path in (tree / "megamix" / room).rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        code = compile(source, "mutant", "exec", dont_inherit=True)
        not_here = set(report.analysis2(str(path))[2])  # what only a GPU runs
        waiting: list[tuple[ast.AST, list[ast.AST]]] = [(ast.parse(source), [])]
        while waiting:
            node, above = waiting.pop()
            waiting += [(child, [*above, node]) for child in ast.iter_child_nodes(node)]
            for kind, line, start, end, text in _changes(node):
                reason = "runs on a GPU alone" if line in not_here else _left_out(node, above)
                mutant = Mutant(path.relative_to(tree), kind, line, start, end, text, reason)
                try:
                    changed = compile(mutant.apply(source), "mutant", "exec", dont_inherit=True)
                except SyntaxError:  # a bracket stood between operator and operand
                    continue
                if changed != code:
                    found.append(mutant)
    return sorted(found, key=lambda one: (one.path, one.line, one.start, one.kind))


def draws(every: list[Mutant], seed: int) -> Iterator[Mutant]:
    """Yield all mutants in an order that the seed decides, the kinds alike often."""
    dice = random.Random(seed)
    kinds: dict[str, list[Mutant]] = {}
    for mutant in dice.sample(every, len(every)):
        kinds.setdefault(mutant.kind, []).append(mutant)
    while kinds:
        kind = dice.choice(sorted(kinds))
        yield kinds[kind].pop()
        if not kinds[kind]:
            del kinds[kind]


def repeated(tree: Path, rooms: list[str], log: str) -> Iterator[Mutant]:
    """Yield the mutants that `log`, an earlier run's output, has judged, wherever their lines are today."""
    files = [path for room in rooms for path in sorted((tree / "megamix" / room).rglob("*.py"))]
    for stem, before, after in re.findall(
        r"^(?:caught|SURVIVED) .*/(\w+)\.py:.*\n@@.*\n-(.*)\n\+(.*)$", log, re.MULTILINE
    ):
        places = [
            (path.stem != stem, path, number, line)
            for path in files
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
            if line.strip() == before.strip()
        ]
        if places:
            _, path, number, line = min(places)
            indent = len(line) - len(line.lstrip())
            yield Mutant(path.relative_to(tree), "again", number, indent, len(line.encode()), after.strip(), "")
        else:
            print(f"gone      {stem}.py\n-{before}\n+{after}", flush=True)


def tests_of(mutant: Mutant, tree: Path) -> list[str]:
    """Return the test files of the mutant's room, those that name its module first, short ones before long ones."""
    module, room = mutant.path.stem, mutant.path.parts[1]
    files = [file for folder in ROOMS[room] for file in (tree / "tests" / folder).glob("test_*.py")]

    def rank(file: Path) -> tuple[bool, bool, int]:
        text = file.read_text(encoding="utf-8")
        return module not in file.stem, f"{room}.{module} import" not in text and f" {module}" not in text, len(text)

    return [str(file.relative_to(tree)) for file in sorted(files, key=rank)]


def survives(mutant: Mutant, tree: Path, limit_s: float) -> tuple[bool, str]:
    """Run the tests of the mutant's room in `tree`, with its line changed. Return whether all passed, and a word."""
    path, said = tree / mutant.path, tree / "said.txt"
    source = path.read_text(encoding="utf-8")
    path.write_text(mutant.apply(source), encoding="utf-8")
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-v", "-p", "no:cacheprovider", *tests_of(mutant, tree)]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONUNBUFFERED": "1"}
    began_s = time.monotonic()
    with said.open("w") as out:
        run = subprocess.Popen(command, cwd=tree, env=environment, stdout=out, stderr=out, start_new_session=True)
    try:
        status = run.wait(limit_s)
    except subprocess.TimeoutExpired:
        hangs = time.time() - said.stat().st_mtime > HANGS_S
        return not hangs, "a test hangs" if hangs else "time is up"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)  # what it has started, too
        run.wait()
        path.write_text(source, encoding="utf-8")
    lines = said.read_text(errors="replace").splitlines()
    word = next((line[:150] for line in lines if line.startswith(("FAILED", "ERROR"))), f"pytest ended with {status}")
    return status == 0, f"{time.monotonic() - began_s:.0f} s: {word}"


def _diff(mutant: Mutant, source: str) -> str:
    before, after = source.splitlines(), mutant.apply(source).splitlines()
    return "\n".join([*difflib.unified_diff(before, after, str(mutant.path), "mutant", lineterm="", n=0)][2:])


def main() -> int:
    parser = argparse.ArgumentParser(description="seeded one-line mutations, run against the tests of their rooms")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--room", choices=ROOMS, action="append", help="given once or more; all, unless given")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout that is copied")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="of one mutant's tests")
    parser.add_argument("--equivalent", default="", help="numbers of draws that are no fault, with commas between")
    parser.add_argument("--again", type=Path, help="what an earlier run has printed: the same mutants once more")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the tests under way end, too
    rooms = options.room or [*ROOMS]
    equivalent = {int(number) for number in options.equivalent.split(",") if number}
    caught = survived = 0
    with tempfile.TemporaryDirectory(prefix="megamix-mutants-") as folder:
        tree = Path(folder)
        for name in COPIED:
            there = options.tree / name
            (shutil.copytree if there.is_dir() else shutil.copy)(there, tree / name)
        if options.again:
            drawn = repeated(tree, rooms, options.again.read_text(encoding="utf-8"))
        else:
            drawn = draws(mutants(tree, rooms), options.seed)
        for number, mutant in enumerate(drawn, start=1):
            if caught + survived == options.count:
                break
            where = f"{number}. {mutant.path}:{mutant.line} {mutant.kind}"
            diff = _diff(mutant, (tree / mutant.path).read_text(encoding="utf-8"))
            reason = mutant.left_out or ("no fault, by a reader" if number in equivalent else "")
            if reason:
                print(f"redrawn   {where} ({reason})\n{diff}", flush=True)
                continue
            lives, word = survives(mutant, tree, options.limit_s)
            survived, caught = survived + lives, caught + (not lives)
            print(f"{'SURVIVED' if lives else 'caught  '}  {where} ({word})\n{diff}", flush=True)
    print(f"caught {caught} of {caught + survived}, seed {options.seed}")
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
