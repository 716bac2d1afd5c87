"""Tell which code a process runs: versions, and hashes of the sources of the package and of plugins. No torch here."""

from __future__ import annotations

import hashlib
import importlib.metadata
import sys
from collections.abc import Sequence
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
DIGITS = 16  # of a hash, in hexadecimal: enough against chance


def own_code(plugins: Sequence[str]) -> dict[str, str]:
    """Return the versions and sources that this process runs, by what a message calls them."""
    versions = {f"version of {name}": _version(name) for name in ("megamix", "torch")}
    sources = {"megamix": PACKAGE} | {name: _home(name) for name in plugins}
    return versions | {f"source code of {name} (SHA-256)": _sources(home) for name, home in sources.items()}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return "not installed"


def _home(plugin: str) -> Path:
    """Its file, or folder if it has several."""
    path = Path(str(sys.modules[plugin].__file__))
    return path.parent if path.name == "__init__.py" else path


def _sources(home: Path) -> str:
    """Two nodes may have one version and other code."""
    digest = hashlib.sha256()
    for path in sorted(home.rglob("*.py")) if home.is_dir() else [home]:
        content = path.read_bytes() if path.is_file() else b""  # within a zip
        digest.update(f"{path.relative_to(home).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:DIGITS]
