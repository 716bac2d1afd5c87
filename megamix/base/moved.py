"""Modules that moved, for who imports one by a name of before: the error says the present name."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1]
# By former room, the rooms that have its modules now under the same names. "" stands for loose files.
_ROOMS = {"": ["base"], "beside": ["base"], "builders": ["train"], "hub": ["hf"], "inspect": ["log"], "run": ["train"]}
_ROOMS |= {"report": ["log", "log.report"], "supervise": ["launch", "base"]}
_ROOMS |= {"mixed_precision": ["mixed_precision.optim", "mixed_precision.guards"]}
_MOVED = """
    arguments=cli.parser pretrain=cli.pretrain starter=comm.starter comm.starters=comm.start_ranks
    tuned=base.constants schedules=mixed_precision.optim.schedules hub.hugging_face=hf.folder
    supervise.launch=launch.torchrun supervise.status=launch.exit_status run.run_folder=launch.run_folder
    inspect.records=log.recorded inspect.replicas=train.replicas
    builders.data=train.corpus builders.objects=train.objects
    mixed_precision.optimizers=mixed_precision.optim.optimizer
    mixed_precision.group_scalars=mixed_precision.optim.optimizer
    mixed_precision.links=mixed_precision.census
    mixed_precision.tallies=mixed_precision.module_state
    mixed_precision.moving_buffers=mixed_precision.module_state
"""
_MODULES = dict(pair.split("=") for pair in _MOVED.split())


class MovedModules:
    """The last finder of modules, which is asked for a name that no other one has found."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> None:
        """Raise, if a module of ours has another place now, ModuleNotFoundError with its name."""
        package, _, module = name.partition(".")
        if package != "megamix":
            return
        room, _, last = module.rpartition(".")
        now = _MODULES.get(module)
        for place in _ROOMS.get(room, []) if now is None else []:
            if (PACKAGE / f"{place.replace('.', '/')}/{last}.py").is_file():
                now = f"{place}.{last}"
        if now is None and module != "mixed_precision" and module in _ROOMS:
            now = _ROOMS[module][0]
        if now:
            raise ModuleNotFoundError(f"{name} has moved to megamix.{now}; CHANGELOG.md has all moves", name=name)
