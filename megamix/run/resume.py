"""From which checkpoint a run goes on, and its way into the engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megamix.builders.objects import lr_rule
from megamix.checkpoint.folder import checkpoints
from megamix.checkpoint.load import load, load_or_older, newest_checkpoint, read_together
from megamix.checkpoint.manifest import DamagedCheckpoint, RunRecord
from megamix.checkpoint.together import Together
from megamix.checkpoint.verify import Checkpoint
from megamix.config import Config, ConfigError
from megamix.mixed_precision.engine import ShardedEngine
from megamix.run.resume_rules import judge, no_step_left, none_is_whole, path_is_damaged, record_of
from megamix.run.run_folder import checkpoint_folder
from megamix.run.run_record import Progress, check_run, saved_config
from megamix.supervise.console import say_phase


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run takes up; the same on every rank."""

    checkpoint: Checkpoint | None  # None: it begins anew
    progress: Progress
    record: RunRecord  # what every checkpoint of this run says, without its progress
    lines: list[str]  # what has changed since the checkpoint
    together: Together

    def told(self, steps: int) -> list[str]:
        """Return the lines that say so, of a run of that many steps."""
        if self.checkpoint is None:
            return []
        path, applied = self.checkpoint.path, self.progress.applied
        if applied == 0:  # imported
            return [f"begins with the weights of {path}", *self.lines]
        told = [f"goes on from {path} after update {applied}"]
        if applied == steps:
            told.append(f"the run {no_step_left(applied)}; its weights and sample are written again")
        return [*told, *self.lines]


def find_start(config: Config, fingerprints: dict[str, str], together: Together) -> Start:
    """Find the checkpoint to go on from and compare it with the configuration. Its tensors' bytes are verified by
    `load_start`. Every rank must call it. `fingerprints`: of the data, by the key that names it.

    Raises: ConfigError on every rank, if the run must not go on; the run's folder holds what it held.
    """
    own = record_of(config, fingerprints)
    record = RunRecord.model_validate(together.first(lambda: own.model_dump(mode="json")))
    checkpoint = find_checkpoint(config, together)
    if checkpoint is None:
        return Start(None, Progress(), record, [], together)
    return _start_from(checkpoint, config, record, together)


def _start_from(checkpoint: Checkpoint, config: Config, record: RunRecord, together: Together) -> Start:
    lines = judge(checkpoint.path, checkpoint.manifest, config, record)
    progress = Progress.read(checkpoint.manifest.run.progress)
    if 0 < progress.applied < config.training.steps:
        schedules = (
            lr_rule(it.optimizer, it.lr_schedule, it.training.steps)
            for it in (saved_config(checkpoint.manifest), config)
        )
        old, new = (rate(progress.applied) for rate in schedules)
        if old != new:
            lines.append(f"learning rate of update {progress.applied + 1}: {old:.3g} -> {new:.3g}")
    if checkpoint.path.parent != checkpoint_folder(config):
        progress = progress.model_copy(update={"log_sizes": {}})  # another run's logs
    return Start(checkpoint, progress, record, lines, together)


def load_start(start: Start, config: Config, engine: ShardedEngine) -> Start:
    """Load what the run goes on from; where that is damaged, the newest good one before it in the run's folder. Returns
    the start as it has become. Every rank must call it.

    Raises: ConfigError on every rank if there is none that is good, or that may be loaded. The run ends with that, so
    no engine trains on after a load that failed.
    """
    found = start.checkpoint
    if found is None:
        return start
    say_phase(f"loading {found.path}")
    try:
        if found.path.parent == checkpoint_folder(config):
            found = load_or_older(found, engine, start.together, check=check_run)
        else:
            load(found, engine, start.together, anew=True)
    except DamagedCheckpoint as error:
        raise path_is_damaged(error) from None
    except ConfigError:
        raise
    except ValueError as error:
        problem = f"checkpoint.resume: {error}; bring the configuration back, or write another checkpoint.folder"
        raise ConfigError([problem], "job") from None
    if found is None:
        raise none_is_whole(config)
    return start if found is start.checkpoint else _start_from(found, config, start.record, start.together)


def find_checkpoint(config: Config, together: Together) -> Checkpoint | None:
    """Return the one that `checkpoint.resume` asks for; those in the run's folder whose manifest or headers are damaged
    are set aside. None for a run that begins anew. Every rank must call it.

    Raises: ConfigError on every rank if there are only damaged ones, or the code of now does not take one.
    """
    resume, folder = config.checkpoint.resume, checkpoint_folder(config)
    if resume == "never":
        return None
    there_are_some = together.first(lambda: bool(checkpoints(folder)))
    if there_are_some:  # also with a path: a run that began from there and was restarted goes on from its own
        found = newest_checkpoint(folder, together, check=check_run)
        if found is None:
            raise none_is_whole(config)
        return found
    if resume == "auto":
        return None
    try:
        return read_together(Path(resume), together, check_run)
    except DamagedCheckpoint as error:
        raise path_is_damaged(error) from None
