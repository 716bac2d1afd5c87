"""Code that a process runs: versions, and hashes of the sources of the package and of plugins. Imports no torch."""

import hashlib
import importlib.metadata
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from megamix.data import DISTRIBUTION

PACKAGE = Path(__file__).parents[1]
DIGITS = 16  # hexadecimal digits of a hash: enough against chance


def own_code(plugins: Sequence[str]) -> dict[str, str]:
    """Return versions and source hashes of the code that this process runs, by their names in messages."""
    versions = {"version of megamix": version(DISTRIBUTION), "version of torch": version("torch")}
    sources = {"megamix": PACKAGE} | {name: _home(name) for name in plugins}
    return versions | {f"source code of {name} (SHA-256)": _sources(home) for name, home in sources.items()}


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
        return "not installed"


@cache  # a process does not change the code that it has loaded, and asking git takes a tenth of a second
def source() -> str:
    """Return megamix's commit, with `-dirty` if files differ from it, or its version where there is no checkout."""
    told = ""
    if (PACKAGE.parent / ".git").exists():
        describe = ["git", "--no-optional-locks", "-C", str(PACKAGE.parent), "describe", "--always", "--dirty"]
        with suppress(OSError):  # there is no git
            told = subprocess.run(describe, capture_output=True, text=True, check=False).stdout.strip()
    return told or version(DISTRIBUTION)


def _home(plugin: str) -> Path:
    """Return the plugin's file, or its folder if it has several files."""
    path = Path(str(sys.modules[plugin].__file__))
    return path.parent if path.name == "__init__.py" else path


def _sources(home: Path) -> str:
    """Return a hash of all sources, because two nodes may have the same version but different code."""
    digest = hashlib.sha256()
    for path in sorted(home.rglob("*.py")) if home.is_dir() else [home]:
        content = path.read_bytes() if path.is_file() else b""  # no file: the plugin lies within a zip
        digest.update(f"{path.relative_to(home).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:DIGITS]
