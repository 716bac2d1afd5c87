"""A tracker that appends to a file in the run's folder."""

import json

from megamix.plugins import Section, register_tracker


class NotebookConfig(Section):
    """A file with everything."""

    file: str = "notebook.jsonl"
    """Its name in the run's folder."""
    fails_at: int = -1
    """A step at which it raises."""


class Notebook:
    def __init__(self, file, fails_at, folder, config):
        self._file, self._fails_at = (folder / file).open("a"), fails_at
        self._write(["config", config["training"]["steps"]])

    def log(self, step, values):
        if step == self._fails_at:
            raise ConnectionError("no network")
        self._write([step, dict(values)])

    def text(self, name, text):
        self._write([name, text])

    def close(self):
        self._write(["closed"])
        self._file.close()

    def _write(self, row):
        self._file.write(json.dumps(row) + "\n")


register_tracker("notebook", NotebookConfig, Notebook)
