"""Print the test files that a change since main can reach, the nearest first: what `launch/test.sh --changed` runs.

A module reaches those that import it or a part of its package, a conftest the tests beside and below it, and any other
file those that name it. Nearest are the changed tests themselves and those that look at all files of a kind, then the
tests that import a changed module, those of the same room first, then those that import a module which does, and so on.
"""

import ast
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import megamix

ROOT = Path(__file__).parents[1]
# Tests that find what they look at by a pattern.
LOOK_AT_ALL = {
    "megamix/*.py": ["tests/test_layers.py", "tests/test_public_names.py"],
    "tests/*.py": ["tests/test_layers.py"],
    "*.md": ["tests/test_docs.py"],
    "launch/*": ["tests/test_launch_portable.py"],
    "configs/*": ["tests/train/test_recipes.py"],
    "megamix/tools/plan/hardware/*": ["tests/tools/plan/test_time_model.py"],
}


def changed_files(root=ROOT):
    """Return the paths of the files that differ from where this branch left main, those that git does not know too.

    main is the remote's default branch; without a remote, the branch of that name.
    """

    def git(*arguments):
        done = subprocess.run(["git", *arguments], cwd=root, check=False, capture_output=True, text=True)
        return done.stdout.replace("\n", "\0").split("\0")[:-1]

    mains = ("origin/HEAD", "origin/main", "main")
    if not (base := next((found[0] for main in mains if (found := git("merge-base", main, "HEAD"))), None)):
        sys.exit(f"--changed compares with {', '.join(mains)}: none is known here; write git fetch origin main:main")
    changed = git("diff", "--name-only", "--no-renames", "-z", base)
    return {*changed, *git("ls-files", "--others", "--exclude-standard", "-z")}


def imported(source):
    """Yield the dotted names that a module imports anywhere in its text; a public name is its home's."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "megamix":
            yield from (megamix._homes().get(alias.name, f"megamix.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def reached(changed, root=ROOT):
    """Return the test files that the changed files reach, by distance, room and name."""
    paths = sorted(path for room in ("megamix", "tests") for path in (root / room).rglob("*.py"))
    sources = {str(path.relative_to(root)): path.read_text(encoding="utf-8") for path in paths}
    files = {*sources, *changed}
    modules = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in files}
    above = {path: set() for path in files}
    for path, source in sources.items():
        for name in imported(source):
            while name:  # a package's code runs before that of its modules
                if name in modules:
                    above[modules[name]].add(path)
                name = name.rpartition(".")[0]
        for other in map(Path, changed):
            below = other.name == "conftest.py" and other.parent in Path(path).parents and "/test_" in path
            if below or (other.suffix != ".py" and other.name in source):
                above[str(other)].add(path)
    rooms = {Path(path).parts[1:-1] for path in changed}
    order = sorted(changed)
    for kind, tests in LOOK_AT_ALL.items():
        order += tests if any(fnmatch(path, kind) for path in changed) else []
    for path in order:
        order += sorted(above.get(path, set()) - {*order}, key=lambda name: (Path(name).parts[1:-1] not in rooms, name))
    return [path for path in dict.fromkeys(order) if path in sources and Path(path).name.startswith("test_")]


if __name__ == "__main__":
    print(*reached(changed_files()), sep="\n")
