"""An engine's checkpoints as one object, with which a user's own program saves its run and continues it."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from weakref import WeakValueDictionary

from pydantic import JsonValue

from megamix.base.console import when_finished
from megamix.checkpoint.all_or_none import AllOrNone
from megamix.checkpoint.folder import applied_updates, checkpoints
from megamix.checkpoint.load import load_or_older, newest_checkpoint
from megamix.checkpoint.manifest import DamagedCheckpoint, RunRecord
from megamix.checkpoint.save import Saver
from megamix.mixed_precision.engine import ShardedEngine

_BY_ALL = "in Checkpoints.{}(): every rank must call it, so take it out of any `if rank == 0:`"
_last_to_save: WeakValueDictionary[Path, Checkpoints] = WeakValueDictionary()  # by folder: savers wait for each other


class Checkpoints:
    """Saves an engine's states into a folder, and loads the newest one. Every rank must make every call, in the same
    order.

        checkpoints = Checkpoints(engine, "runs/mine")
        progress = checkpoints.load() or {"step": 0}
        ...
        checkpoints.save({"step": 100})

    A checkpoint holds the whole model: it loads on any number of ranks. A save removes all checkpoints but the `keep`
    newest; `keep` is at least 2. A checkpoint holds the model's frozen parameters as its buffers; without `frozen` it
    does not, and a load leaves them as the model has them. Units: `timeout_s` bounds the wait for the slowest rank.
    """

    def __init__(
        self, engine: ShardedEngine, folder: str | Path, keep: int = 2, timeout_s: float = 600.0, frozen: bool = True
    ):
        if not isinstance(engine, ShardedEngine):
            raise TypeError(f"engine is a {type(engine).__name__}; pass the ShardedEngine that trains it")
        self._engine, self._folder = engine, Path(folder).absolute()
        self._all_or_none = AllOrNone.apart(engine.topology.world, timeout_s)
        self._saver = Saver(self._folder, keep, self._all_or_none, lambda path: None, self._failed, frozen=frozen)
        self._error: Exception | None = None
        self._goes_on = False  # True: a save may follow the folder's checkpoints, which are loaded or older
        if self._all_or_none.first(self._folder.is_file):
            raise ValueError(f"folder: {self._folder} is a file; give the path of a folder, which need not exist yet")
        if self._all_or_none.first((self._folder / "checkpoints").is_dir):
            raise ValueError(
                f"folder: {self._folder} belongs to a job; its checkpoints lie in {self._folder}/checkpoints"
            )
        self._all_or_none.first(lambda: self._folder.parent.mkdir(parents=True, exist_ok=True))

    def load(self) -> dict[str, JsonValue] | None:
        """Load the newest good checkpoint. Return the `progress` that `save` got; None if the folder has no checkpoint.
        Damaged checkpoints are set aside, with one line each in the log.

        Raises: ValueError, before anything is changed, naming everything that does not fit the engine;
        DamagedCheckpoint if there are checkpoints but no good one.
        """
        self._engine.progress.require_empty("Checkpoints.load()", "right after step()")
        self.wait()
        self._all_or_none.what = _BY_ALL.format("load")
        begun = self._all_or_none.first(lambda: bool(checkpoints(self._folder)))
        found = newest_checkpoint(self._folder, self._all_or_none)
        if found is not None:
            found = load_or_older(found, self._engine, self._all_or_none)
        if begun and found is None:
            raise DamagedCheckpoint([f"{self._folder} has no good checkpoint left; give another folder to begin anew"])
        self._goes_on = True
        return found.manifest.run.progress if found is not None else None

    def save(self, progress: Mapping[str, JsonValue], beside: bool = False) -> None:
        """Save the state between two steps, with the caller's own `progress`, which must be equal on every rank.

        `progress`: built of None, bool, int of up to 4,300 digits, finite float, str without lone surrogates, list,
        and dict with keys of str; nested up to 190 deep.
        `beside`: return as soon as the state is copied, and write it while training goes on.
        Raises, on every rank and before anything is written: ValueError if `progress` changes when JSON writes and
        reads it, or if it differs between ranks; also if nothing was loaded although the folder has a checkpoint of
        more updates.
        Raises: OSError on every rank if this save fails, or if an earlier one still under way fails. The older
        checkpoints stay.
        """
        self._engine.progress.require_empty("Checkpoints.save()", "right after step()")
        self.wait()
        self._all_or_none.what = _BY_ALL.format("save")
        if not self._goes_on:
            newest = self._all_or_none.first(lambda: max(map(applied_updates, checkpoints(self._folder)), default=0))
            if newest > (own := int(self._engine.applied_updates)):
                more = f"{self._folder} has a checkpoint of {newest} updates, this engine has made {own}"
                raise ValueError(f"{more}; call load() first, or give another folder")
        answers = self._all_or_none.every(lambda: _judge(progress))
        if problems := dict.fromkeys(answer for answer in answers if isinstance(answer, str)):
            raise ValueError("; ".join(problems))
        if len(set(answers)) > 1:
            raise ValueError("progress is not the same on every rank; give every rank the same, for one copy is saved")
        self._goes_on = True
        _last_to_save[self._folder] = self
        _wait_at_end()
        write = self._saver.start if beside else self._saver.save
        write(self._engine, RunRecord(progress=dict(progress)))
        if not beside:
            self.wait()

    def wait(self) -> None:
        """Wait until no save into this folder is under way, by this object or by another one. Raises: as `save`."""
        _last_to_save.get(self._folder, self)._saver.finish()
        self._saver.finish()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _failed(self, error: Exception) -> None:
        self._error = error


@cache  # once
def _wait_at_end() -> None:
    """Let a finished program wait for its saves: their threads would abort it, and the last one would be lost."""
    when_finished(lambda: [end(one) for end in (_finish, Checkpoints.wait) for one in [*_last_to_save.values()]])


def _finish(checkpoints: Checkpoints) -> None:
    """Wait for a save; unlike `wait` without its error, which must not end the saves of others."""
    checkpoints._saver.finish()


def _judge(progress: Mapping[str, JsonValue]) -> int | str:
    """Return a checksum of `progress`, or a line about the first value that would change in JSON."""
    if not isinstance(progress, Mapping):
        return f"progress is a {type(progress).__name__}; give a dict of plain JSON, such as {{}}"
    for key, value in progress.items():
        with suppress(ValueError):
            # The key "run" stands for the manifest around it: JSON readers limit the depth, so every level counts.
            record = RunRecord(progress={"run": {key: value}})
            if RunRecord.from_json(record.model_dump_json()).progress == {"run": {key: value}}:
                continue
        return f"progress.{key}: JSON does not give {value!r:.80} back; write plain JSON, and None for inf and nan"
    return zlib.crc32(json.dumps(dict(progress), sort_keys=True).encode())
