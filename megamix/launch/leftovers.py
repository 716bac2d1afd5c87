"""What runs have left in this node's shared memory: which of it may go. This module imports no torch."""

from pathlib import Path

from megamix.checkpoint.folder import CHECKPOINTS, applied_updates, checkpoints
from megamix.checkpoint.slots import Kept, all_kept, remove_home
from megamix.launch.run_status import read_status


def remove_stale(own: Path) -> None:
    """Remove what other runs have left, if their folder is gone, they are done, or a checkpoint is as new."""
    for kept in all_kept():
        if kept.home != own and not kept.lives and _is_stale(kept):
            remove_home(kept.home)


def _is_stale(kept: Kept) -> bool:
    saved = max(map(applied_updates, checkpoints(kept.folder / CHECKPOINTS)), default=-1)
    is_done = read_status(kept.folder).state in ("finished", "gave_up")
    return not kept.folder.is_dir() or is_done or saved >= kept.update
