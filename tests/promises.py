"""The table of promises in docs/testing.md, from the tests: `python -m tests.promises` writes it.

A test file's promise is the first paragraph of its docstring.
"""

import ast
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "testing.md"
HEADER = "| promise | test file |\n|---|---|\n"


def promise(path):
    """Return the first paragraph of the docstring of the test file at `path`, in one line.

    Raises: ValueError if there is none.
    """
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    if not docstring:
        raise ValueError(f"{path}: has no docstring; its first paragraph must say what the tests prove")
    return " ".join(docstring.partition("\n\n")[0].split()).removesuffix(".").replace("|", "\\|")


def table():
    """Return the table's text: a row for each test file, in the order of their paths."""
    paths = sorted(TESTS.rglob("test_*.py"))
    return HEADER + "".join(f"| {promise(path)} | `{path.relative_to(TESTS.parent).as_posix()}` |\n" for path in paths)


def with_table(page):
    """Return the text `page` with its table replaced by today's."""
    before, header, after = page.partition(HEADER)
    assert header, f"no table of promises: it begins with {HEADER!r}"
    rest = after.partition("\n\n")[2]
    return f"{before}{table()}\n{rest}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
