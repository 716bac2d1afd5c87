"""Tables in JSON files, as Hugging Face folders have them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megamix.base.durable import write_text
from megamix.base.git_lfs import refuse_pointer


def read_table(path: Path) -> dict[str, Any]:
    """Return the table of a JSON file; none if there is no file. Raises: ValueError if it holds something else."""
    if not path.is_file():
        return {}
    refuse_pointer(path)
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(table, dict):
            raise TypeError(f"it holds a {type(table).__name__}")
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is no JSON table ({error}); copy it again") from error
    return table


def write_table(path: Path, table: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(table, indent=2, ensure_ascii=False) + "\n")
