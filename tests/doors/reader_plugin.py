"""Files that hold documents between lines of three dashes."""

from pathlib import Path

from megamix.plugins import register_reader


def read_dashed(path):
    yield from Path(path).read_text(encoding="utf-8").split("\n---\n")


register_reader(".dashed", read_dashed)
