"""Whoever works on the code: a change runs the tests that import what it touched, the nearest first."""

import subprocess

from tests.changed import changed_files, reached


def test_a_change_reaches_the_tests_that_import_it_the_nearest_first(tmp_path):
    files = {
        "megamix/inner.py": "",
        "megamix/outer.py": "def f():\n    from megamix.inner import x",
        "tests/test_far.py": "import megamix.outer",
        "tests/test_near.py": "from megamix import inner",
        "tests/test_page.py": '"docs/page.md"',
        "tests/test_itself.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert reached({"megamix/inner.py"}, tmp_path) == ["tests/test_near.py", "tests/test_far.py"]
    assert reached({"docs/page.md", "tests/test_itself.py"}, tmp_path) == ["tests/test_itself.py", "tests/test_page.py"]


def test_what_changed_is_what_differs_from_main_and_what_git_does_not_know(tmp_path):
    def git(*arguments):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a", *arguments], cwd=tmp_path, check=True)

    git("init", "-qb", "main")
    for name in ("kept", "changed"):
        (tmp_path / name).write_text("old")
    git("add", ".")
    git("commit", "-qm", "a")
    (tmp_path / "changed").write_text("new")
    (tmp_path / "unknown").write_text("new")
    assert changed_files(tmp_path) == {"changed", "unknown"}
