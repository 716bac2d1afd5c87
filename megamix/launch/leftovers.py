"""Says what of that which runs have left in this node's shared memory may go. This module imports no torch."""

import shutil
from pathlib import Path

from megamix.checkpoint.slots import SHARED, Kept, all_kept, home_of, kept_in, remove_home
from megamix.launch.run_folder import newest_update


def remove_stale(own: Path) -> None:
    """Remove what other runs have left, if their folder is gone or a checkpoint is as new."""
    for kept in all_kept():
        if kept.home != own and _is_stale(kept):
            remove_home(kept.home)


def room_for(folder: Path) -> int:
    """Return the bytes that the run in `folder` may take of this node's shared memory: those that are free, that it has
    there, and that its start frees. 0 without such memory.
    """
    if not SHARED.is_dir():
        return 0
    own = home_of(folder)
    return shutil.disk_usage(SHARED).free + sum(it.size for it in all_kept() if it.home == own or _is_stale(it))


def clear(folder: Path) -> str:
    """Remove what the run in `folder` keeps in this node's shared memory. Return a line that says so. Raises:
    ValueError if the run lives.
    """
    kept = kept_in(home_of(folder))
    if kept is None:
        return f"{folder}: keeps nothing in {SHARED} of this machine"
    if kept.lives:
        raise ValueError(f"RUN: {folder} lives, and writes to {kept.home}; end it, then write --clear")
    remove_home(kept.home)
    return f"{folder}: removed {kept.size / 2**20:,.1f} MiB, the state after update {kept.update:,}"


def _is_stale(kept: Kept) -> bool:
    return not kept.lives and (not kept.folder.is_dir() or newest_update(kept.folder) >= kept.update)
