"""Print the test files that a change since main can reach, the nearest first: what `launch/test.sh --changed` runs.

A file reaches those that import it, and any other file those that name it. Nearest are the changed tests themselves,
then the tests that import a changed module, then those that import a module which does, and so on.
"""

import ast
import subprocess
from pathlib import Path

import megamix

ROOT = Path(__file__).parents[1]


def changed_files(root=ROOT):
    """Return the paths of the files that differ from where this branch left main, those that git does not know too."""

    def git(*arguments):
        return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout.split()

    (base,) = git("merge-base", "main", "HEAD")
    return {*git("diff", "--name-only", base), *git("ls-files", "--others", "--exclude-standard")}


def imported(source):
    """Yield the dotted names that a module imports anywhere in its text; a public name is its home's."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "megamix":
            yield from (megamix._homes().get(alias.name, f"megamix.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))


def reached(changed, root=ROOT):
    """Return the test files that the changed files reach, by distance, then by name."""
    paths = sorted(path for room in ("megamix", "tests") for path in (root / room).rglob("*.py"))
    sources = {str(path.relative_to(root)): path.read_text(encoding="utf-8") for path in paths}
    modules = {path.removesuffix(".py").replace("/", "."): path for path in sources}
    above = {path: set() for path in {*sources, *changed}}
    for path, source in sources.items():
        for name in imported(source):
            if name in modules:
                above[modules[name]].add(path)
        for other in changed - sources.keys():
            if Path(other).name in source:
                above[other].add(path)
    order = sorted(changed)
    for path in order:
        order += sorted(above[path] - {*order})
    return [path for path in order if path in sources and Path(path).name.startswith("test_")]


if __name__ == "__main__":
    print(*reached(changed_files()), sep="\n")
