"""A tracker that appends to a file in the run's folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megamix.plugins import Section, register_tracker


class NotebookConfig(Section):
    """A file with everything."""

    file: str = "notebook.jsonl"
    """Its name in the run's folder."""
    fails_at: int = -1
    """A step at which it raises."""


class Notebook:
    def __init__(self, file: str, fails_at: int, folder: Path, config: Mapping[str, Any]):
        self._file, self._fails_at = (folder / file).open("a"), fails_at
        self._write(["config", config["training"]["steps"]])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step == self._fails_at:
            raise ConnectionError("no network")
        self._write([step, dict(values)])

    def text(self, name: str, text: str) -> None:
        self._write([name, text])

    def close(self) -> None:
        self._write(["closed"])
        self._file.close()

    def _write(self, row: list[Any]) -> None:
        self._file.write(json.dumps(row) + "\n")


register_tracker("notebook", NotebookConfig, Notebook)
