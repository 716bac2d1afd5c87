"""Modules that moved, for who imports one by a name of before: the error says the present name."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1]
# What has another name now: rooms, and a few modules. All others are found by theirs.
_RENAMED = {"beside": "base", "builders": "train", "hub": "hf", "inspect": "log", "report": "log", "run": "train"}
_RENAMED |= {"supervise": "launch", "builders.data": "corpus", "builders.objects": "build", "arguments": "parser"}
_RENAMED |= {"hub.hugging_face": "folder", "mixed_precision.optimizers": "optimizer", "comm.starters": "start_ranks"}
_RENAMED |= {"tuned": "constants"}


class MovedModules:
    """The last finder of modules, which is asked for a name that no other one has found."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> None:
        """Raise, if a module of ours has another place now, ModuleNotFoundError with its name."""
        package, _, module = name.partition(".")
        if package != "megamix":
            return
        now = _RENAMED.get(module, module.rpartition(".")[2])
        if found := [*PACKAGE.glob(now)] or sorted(PACKAGE.rglob(f"{now}.py")):
            names = (".".join((package, *file.relative_to(PACKAGE).with_suffix("").parts)) for file in found)
            raise ModuleNotFoundError(
                f"{name} has moved to {' or '.join(names)}; CHANGELOG.md has all moves", name=name
            )
