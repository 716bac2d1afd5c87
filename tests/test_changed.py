"""Whoever works on the code: a change runs the tests that import what it touched, the nearest first."""

import subprocess
import sys

import pytest

from tests.changed import LOOK_AT_ALL, ROOT, changed_files, reached


def test_a_change_reaches_the_tests_that_import_it_the_nearest_first(tmp_path):
    files = {
        "megamix/rooms/__init__.py": "",
        "megamix/rooms/inner.py": "",
        "megamix/outer.py": "def f():\n    from megamix.rooms.inner import x",
        "tests/test_far.py": "import megamix.outer",
        "tests/test_near.py": "from megamix.rooms import inner",
        "tests/test_page.py": '"docs/page.md"',
        "tests/test_itself.py": "from tests.gone import helper",
        "tests/rooms/test_same_room.py": "from megamix.rooms import inner",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    near, far = ["tests/rooms/test_same_room.py", "tests/test_near.py"], "tests/test_far.py"
    for changed, want in {
        "megamix/rooms/inner.py": [*near, far],
        "megamix/rooms/__init__.py": [*near, far],
        "tests/gone.py": ["tests/test_itself.py"],
        "tests/rooms/conftest.py": near[:1],
        "docs/page.md": ["tests/test_page.py"],
        "tests/test_itself.py": ["tests/test_itself.py"],
    }.items():
        assert reached({changed}, tmp_path) == want, changed


def test_tests_that_look_at_all_files_of_a_kind_are_reached_by_each():
    for changed, want in {"megamix/model/ops.py": "layers", "docs/numerics.md": "docs"}.items():
        assert reached({changed})[0] == f"tests/test_{want}.py"
    assert all((ROOT / path).exists() for paths in LOOK_AT_ALL.values() for path in paths)


def test_what_changed_is_what_differs_from_main_and_what_git_does_not_know(tmp_path):
    def git(*arguments):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a", *arguments], cwd=tmp_path, check=True)

    git("init", "-qb", "trunk")
    for name in ("kept", "changed", "moved"):
        (tmp_path / name).write_text("old")
    git("add", ".")
    git("commit", "-qm", "a")
    with pytest.raises(SystemExit, match="git fetch origin main:main"):
        changed_files(tmp_path)
    git("branch", "main")
    git("mv", "moved", "to here")
    git("commit", "-qm", "b")
    (tmp_path / "changed").write_text("new")
    (tmp_path / "not known").write_text("new")
    assert changed_files(tmp_path) == {"changed", "moved", "to here", "not known"}
    git("update-ref", "refs/remotes/origin/main", "HEAD")
    assert changed_files(tmp_path) == {"changed", "not known"}


def test_no_test_begins_after_its_seconds():
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--seconds",
        "0",
        "tests/base/test_clock.py",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert " skipped in " in done.stdout
    assert " passed" not in done.stdout
