"""The mutation script: the seed decides its draws, words are left out, and what a room's tests see is caught."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import mutate

SOURCE = '''
"""A room of one file."""

WAIT_S = 3.0


def less(a: int, b: int) -> bool:
    if a < 0:
        raise ValueError(f"a must not be below {0}, got {a + 0}")
    return a < b


def unseen(a: int) -> int:
    return a + 1
'''
TEST = """
from megamix.checkpoint.small import less


def test_less() -> None:
    assert less(1, 2)
    assert not less(2, 2)
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "megamix/checkpoint").mkdir(parents=True)
    for package in ("megamix", "megamix/checkpoint"):  # else a folder, which the installed package comes before
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "megamix/checkpoint/small.py").write_text(SOURCE)
    (tmp_path / "tests/checkpoint").mkdir(parents=True)
    (tmp_path / "tests/checkpoint/test_small.py").write_text(TEST)
    (tmp_path / "pyproject.toml").touch()
    return tmp_path


def test_every_change_is_of_one_line_and_words_and_waits_are_left_out(tree: Path) -> None:
    found = [
        (one.line, one.kind, one.left_out, one.apply(SOURCE).splitlines()[one.line - 1].strip())
        for one in mutate.mutants(tree, ["checkpoint"])
    ]
    assert found == [
        (4, "constant", "a waiting time", "WAIT_S = 6.0"),
        (8, "not", "", "if not a < 0:"),
        (8, "compare", "", "if a <= 0:"),
        (8, "constant", "", "if a < 1:"),
        (9, "removed statement", "", "pass"),
        (9, "constant", "words of an error", 'raise ValueError(f"a must not be below {1}, got {a + 0}")'),
        (9, "plus or minus", "words of an error", 'raise ValueError(f"a must not be below {0}, got {a - 0}")'),
        (9, "constant", "words of an error", 'raise ValueError(f"a must not be below {0}, got {a + 1}")'),
        (10, "compare", "", "return a <= b"),
        (14, "plus or minus", "", "return a - 1"),
        (14, "constant", "", "return a + 2"),
    ]


def test_the_seed_decides_the_draws(tree: Path) -> None:
    every = mutate.mutants(tree, ["checkpoint"])
    first, again, other = ([*mutate.draws(every, seed)] for seed in (1, 1, 2))
    assert first == again != other
    assert sorted(first, key=str) == sorted(every, key=str)


@pytest.mark.parametrize(("line", "kind", "lives"), [(10, "compare", False), (14, "plus or minus", True)])
def test_what_the_room_s_tests_see_is_caught(tree: Path, line: int, kind: str, lives: bool) -> None:
    (mutant,) = [one for one in mutate.mutants(tree, ["checkpoint"]) if (one.line, one.kind) == (line, kind)]
    survived, word = mutate.survives(mutant, tree, 60.0)
    assert survived == lives, word
    assert (tree / mutant.path).read_text() == SOURCE


def test_what_was_judged_is_found_again_where_its_line_is_now(tree: Path) -> None:
    log = """caught    3. megamix/train/small.py:7 compare (1 s)
@@ -7 +7 @@
-        return a < b
+        return a <= b
redrawn   4. megamix/train/small.py:14 constant (words)
@@ -14 +14 @@
-    return a + 1
+    return a + 2
"""
    (mutant,) = mutate.repeated(tree, ["checkpoint"], log)
    assert (mutant.path, mutant.line) == (Path("megamix/checkpoint/small.py"), 10)
    assert mutant.apply(SOURCE) == SOURCE.replace("return a < b", "return a <= b")
