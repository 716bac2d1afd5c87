"""The check of a checkpoint: it finds the checkpoint good or lists the problems, file by file. No content is executed,
and every value is checked before it is used. A checkpoint's states are read box by box, so memory never holds a whole
parameter.
"""

from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megamix.checkpoint.boxes import Box, tiling_problem
from megamix.checkpoint.folder import MANIFEST, checkpoints
from megamix.checkpoint.manifest import DamagedCheckpoint, Manifest, check_size, naming, read_manifest
from megamix.checkpoint.snapshot import DTYPES
from megamix.checkpoint.tensor_file import Stored, read_header, verified_chunks
from megamix.config import ConfigError


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose files fit its manifest and cover every state of every parameter exactly once."""

    path: Path
    manifest: Manifest
    stored: dict[tuple[str, str], list[Stored]]  # by parameter and state
    is_checked: bool = False  # True: every byte has been verified, in the nodes' memory, where each has its own files

    def read(self, stored: Stored, box: Box) -> Tensor:
        """Read a box that lies within a stored box. Return a view of the mapped file, in the stored dtype.

        Shapes: (*box.size).
        Raises: ValueError naming the file; OSError.
        """
        path = self.path / stored.file
        with naming(path):
            mapped = np.memmap(path, np.uint8, "c", stored.start, stored.end - stored.start)
        whole = torch.from_numpy(mapped).view(DTYPES[stored.dtype]).view(stored.box.size)
        return whole[box.slices_in(stored.box)]

    def gather(self, param: str, state: str, box: Box) -> Tensor:
        """Return a box of a parameter, put together from its saved boxes, in their dtype. Shapes: (*box.size)."""
        boxes = self.stored[param, state]
        out = torch.empty(box.size, dtype=DTYPES[boxes[0].dtype])
        for stored in boxes:
            if common := stored.box.intersection(box):
                out[common.slices_in(box)] = self.read(stored, common)
        return out


Check = Callable[[Manifest], None]  # a caller's own check of a manifest; it raises ConfigError to refuse one


def verify_checkpoint(path: Path, check: Check | None = None) -> Checkpoint:
    """Check every byte of a checkpoint. Raises: as `read_checkpoint`."""
    checkpoint = read_checkpoint(path, check)
    problems = []
    for record in checkpoint.manifest.files:
        try:
            for _ in verified_chunks(path / record.name, record):
                pass
        except (ValueError, OSError) as error:
            problems.append(str(error))
    if problems:
        raise DamagedCheckpoint(problems)
    return checkpoint


def verify_named(path: Path, check: Check | None = None) -> Checkpoint:
    """Check every byte of a checkpoint that a user has named. Raises: DamagedCheckpoint, which also names the newest
    good checkpoint of the same folder.
    """
    try:
        return verify_checkpoint(path, check)
    except DamagedCheckpoint as error:
        problems = error.problems
    for other in checkpoints(path.parent):
        with suppress(DamagedCheckpoint, ConfigError):
            verify_checkpoint(other, check)
            problems.append(f"{other} is good: name this one")
            break
    raise DamagedCheckpoint(problems)


def read_checkpoint(path: Path, check: Check | None = None) -> Checkpoint:
    """Check everything but the tensors' bytes, which are verified by the code that reads them.

    Raises: DamagedCheckpoint; ConfigError for a checkpoint of another version, or one that `check` refuses.
    """
    try:
        manifest = read_manifest(path / MANIFEST)
    except ConfigError:
        raise
    except (ValueError, OSError) as error:
        raise DamagedCheckpoint([str(error)]) from None
    wanted = {(name, state): (shape, dtype) for name, state, shape, dtype in manifest.tensors()}
    stored = defaultdict(list)
    problems = []
    for record in manifest.files:
        try:
            check_size(path / record.name, record)
            with naming(path / record.name):
                for param, state, place in read_header(path / record.name):
                    _, dtype = wanted.get((param, state), ((), "no such state"))
                    if place.dtype != dtype:
                        raise ValueError(f"{place.key!r} is {place.dtype}, the manifest has {dtype}")
                    stored[param, state].append(place)
        except (ValueError, OSError) as error:
            problems.append(str(error))
    if not problems:  # if a file is bad, its boxes would also be reported as missing
        for (param, state), (shape, _) in wanted.items():
            if problem := tiling_problem([place.box for place in stored[param, state]], shape):
                problems.append(f"{path}: {state} of {param}: {problem}")
    if problems:
        raise DamagedCheckpoint(problems)
    if check is not None:
        try:
            check(manifest)
        except ConfigError as error:
            raise ConfigError([f"{path}: {'; '.join(error.problems)}"], "job") from error
    return Checkpoint(path, manifest, dict(stored))
