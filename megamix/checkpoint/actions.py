"""The actions of `megamix checkpoint`, each of which yields the lines to print. Every function raises ValueError for a
wrong path, and DamagedCheckpoint.

`check`: the caller's own check of a manifest; see `verify.Check`.
"""

import datetime
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from megamix.base.durable import sync_directory
from megamix.checkpoint.copying import copy_checkpoint
from megamix.checkpoint.folder import (
    CHECKPOINTS,
    MANIFEST,
    checkpoints,
    checkpoints_at,
    folder_of,
    restored,
    set_aside,
    unfinished,
)
from megamix.checkpoint.manifest import DamagedCheckpoint, check_size, read_manifest, states_text
from megamix.checkpoint.verify import Check, verify_checkpoint, verify_named
from megamix.config import ConfigError


def ls(path: Path, check: Check) -> Iterator[str]:
    """Yield a line for each checkpoint of a run or folder. It reads only names, manifests and sizes, so it is quick at
    any size.
    """
    folder = folder_of(path)
    rows: list[tuple[str, ...]] = [("checkpoint", "step", "written", "size", "layout", "state")]
    rows += [_row(entry, check) for entry in (*reversed(checkpoints(folder)), *set_aside(folder))]
    rows += [(entry.name, "", _written(entry), _size(entry), "", "unfinished") for entry in unfinished(folder)]
    if len(rows) == 1:
        yield f"{folder} holds no checkpoint"
        return
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:  # numbers are aligned to the right
        cells = zip(row, "<><><<", widths, strict=True)
        yield "  ".join(f"{text:{side}{width}}" for text, side, width in cells).rstrip()


def verify(path: Path, check: Check) -> Iterator[str]:
    """Check every byte. Yield a line for each good checkpoint, and one if it is refused, then raise DamagedCheckpoint
    with the problems of the damaged ones.
    """
    problems = list[str]()
    for found in checkpoints_at(path):
        try:
            manifest = verify_checkpoint(found).manifest
            counts = Counter(states_text(manifest.states[param.state_set]) for param in manifest.params)
            held = "; ".join(f"{count} parameters, each with {states}" for states, count in counts.items())
            yield f"{found.name}: good; {len(manifest.files)} files, {_size(found)}; {held}"
            check(manifest)
        except ConfigError as error:
            yield f"{found.name}: refused: {error.problems[0]}"
        except DamagedCheckpoint as error:
            problems += error.problems
    if problems:
        raise DamagedCheckpoint(problems)


def restore(path: Path) -> Iterator[str]:
    """Give a checkpoint that was set aside, or each such checkpoint of a run, its name back if every byte is good.
    Yield a line for each, then raise DamagedCheckpoint with the problems of the others. No run may use the folder
    meanwhile. Raises: also OSError.
    """
    folder = folder_of(path)
    problems = list[str]()
    entries = [path] if restored(path) != path else set_aside(folder)
    if not entries:
        raise ValueError(f"{folder} holds nothing that was set aside")
    for entry in entries:
        target = restored(entry)
        if os.path.lexists(target):
            raise ValueError(
                f"{target} is there already, so {entry.name} keeps its name; move one of the two elsewhere"
            )
        try:
            verify_checkpoint(entry)
            entry.rename(target)
            sync_directory(entry.parent)
            yield f"{entry.name}: is {target.name} again"
        except (DamagedCheckpoint, ConfigError) as error:
            problems += error.problems
    if problems:
        raise DamagedCheckpoint(problems)


def export(path: Path, output: Path) -> Iterator[str]:
    """Write a checkpoint, or a run's newest checkpoint, as a folder of torch.distributed.checkpoint. Raises: also
    OSError.
    """
    from megamix.checkpoint.export_dcp import export_dcp  # torch.distributed.checkpoint takes half a second

    checkpoint = verify_named(checkpoints_at(path)[0])
    export_dcp(checkpoint, output)
    yield f"{output}: step {checkpoint.manifest.applied_updates}, {_size(output)}"


def copy(path: Path, output: Path) -> Iterator[str]:
    """Copy a checkpoint, or all of a run, into a folder that is like a run's. Yield a line for each, then raise
    DamagedCheckpoint with the problems of the damaged ones. No run may use `output` meanwhile. Raises: also OSError.
    """
    problems = list[str]()
    (output / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
    for found in checkpoints_at(path):
        try:
            copied = copy_checkpoint(found, output / CHECKPOINTS)
            yield f"{found.name}: is {copied}, {_size(copied)}"
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise DamagedCheckpoint(problems)


def _row(path: Path, check: Check) -> tuple[str, ...]:
    aside = restored(path) != path
    state = "whole, set aside: megamix checkpoint restore brings it back" if aside else "complete"
    step, layout, dated = "", "", path / MANIFEST
    try:
        manifest = read_manifest(path / MANIFEST)
        for record in manifest.files:
            check_size(path / record.name, record)
        axes = manifest.layout.axes
        layout = " ".join(f"{axis} {size}" for axis, size in axes.items() if size > 1 or axis == "dp")
        step = str(manifest.applied_updates)
        check(manifest)
    except ConfigError as error:
        state = f"{state}; refused: {error.problems[0]}"
    except (ValueError, OSError) as error:
        state = "damaged, set aside" if aside else f"damaged: {error}"
        step, layout, dated = "", "", path
    return path.name, step, _written(dated), _size(path), layout, state


def _written(path: Path) -> str:
    return datetime.datetime.fromtimestamp(path.stat().st_mtime).isoformat(" ", "seconds")


def _size(path: Path) -> str:
    size = sum(entry.stat().st_size for entry in path.iterdir() if entry.is_file())
    return f"{size / 2**20:,.1f} MiB"
