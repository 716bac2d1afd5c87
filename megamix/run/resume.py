"""The checkpoint from which a run goes on, and its way into the engine."""

from dataclasses import dataclass
from pathlib import Path

from megamix.builders.objects import lr_rule
from megamix.checkpoint.all_or_none import AllOrNone
from megamix.checkpoint.folder import checkpoints
from megamix.checkpoint.load import load, load_or_older, newest_checkpoint, read_on_all
from megamix.checkpoint.manifest import DamagedCheckpoint, RunRecord
from megamix.checkpoint.verify import Checkpoint
from megamix.config import Config, ConfigError
from megamix.mixed_precision.engine import ShardedEngine
from megamix.run.resume_rules import judge, no_step_left, none_is_whole, path_is_damaged, record_of
from megamix.run.run_folder import checkpoint_folder
from megamix.run.run_record import Progress, check_run, saved_config
from megamix.supervise.console import say_phase


@dataclass(frozen=True, slots=True)
class Start:
    """The start of a run, with or without a checkpoint. It is equal on every rank."""

    checkpoint: Checkpoint | None  # None: the run begins with new weights
    progress: Progress
    record: RunRecord  # the record that every checkpoint of this run gets, without its progress
    lines: list[str]  # lines of the log on the changes since the checkpoint

    def told(self, config: Config) -> list[str]:
        """Return the lines that say from where the run of this configuration continues."""
        if self.checkpoint is None:
            return []
        path, applied = self.checkpoint.path, self.progress.applied
        if applied == 0:  # imported weights
            return [f"begins with the weights of {path}", *self.lines]
        told = [f"goes on from {path} after update {applied}"]
        if applied == config.training.steps:
            told.append(f"the run {no_step_left(config)}; its weights and sample are written again")
        return [*told, *self.lines]


def find_start(config: Config, fingerprints: dict[str, str], all_or_none: AllOrNone) -> Start:
    """Return the start, with the checkpoint to go on from, after comparing it with the configuration. Every rank must
    call it.

    `load_start` later verifies the bytes of the checkpoint's tensors. `fingerprints`: digests of the data, by the key
    that names the data.
    Raises: ConfigError on every rank if the run must not go on; the run's folder stays as it was.
    """
    own = record_of(config, fingerprints)
    record = RunRecord.model_validate(all_or_none.first(lambda: own.model_dump(mode="json")))
    checkpoint = find_checkpoint(config, all_or_none)
    if checkpoint is None:
        return Start(None, Progress(), record, [])
    return _start_from(checkpoint, config, record, all_or_none.size)


def _start_from(checkpoint: Checkpoint, config: Config, record: RunRecord, ranks: int) -> Start:
    lines = judge(checkpoint.path, checkpoint.manifest, config, record, ranks)
    progress = Progress.read(checkpoint.manifest.run.progress)
    if 0 < progress.applied < config.training.steps:
        old, new = (lr_rule(it)(progress.applied) for it in (saved_config(checkpoint.manifest), config))
        if old != new:
            lines.append(f"learning rate of update {progress.applied + 1}: {old:.3g} -> {new:.3g}")
    if checkpoint.path.parent != checkpoint_folder(config):
        progress = progress.model_copy(update={"log_sizes": {}})  # the saved sizes are those of another run's logs
    return Start(checkpoint, progress, record, lines)


def load_start(start: Start, config: Config, engine: ShardedEngine, all_or_none: AllOrNone) -> Start:
    """Load the checkpoint that the run goes on from, and return the start with the loaded checkpoint. Every rank must
    call it.

    If the checkpoint is damaged, the newest good checkpoint before it in the run's folder is loaded.
    Raises: ConfigError on every rank if no checkpoint is good, or if the good one may not be loaded. The run ends with
    this error, so no engine trains on after a failed load.
    """
    found = start.checkpoint
    if found is None:
        return start
    say_phase(f"loading {found.path}")
    try:
        if found.path.parent == checkpoint_folder(config):
            found = load_or_older(found, engine, all_or_none, check=check_run)
        else:
            load(found, engine, all_or_none, anew=True)
    except DamagedCheckpoint as error:
        raise path_is_damaged(error) from None
    except ConfigError:
        raise
    except ValueError as error:
        problem = f"checkpoint.resume: {error}; bring the configuration back, or write another checkpoint.folder"
        raise ConfigError([problem], "job") from None
    if found is None:
        raise none_is_whole(config)
    return start if found is start.checkpoint else _start_from(found, config, start.record, all_or_none.size)


def find_checkpoint(config: Config, all_or_none: AllOrNone) -> Checkpoint | None:
    """Return the checkpoint that `checkpoint.resume` asks for. Return None for a run that begins with new weights.

    Every rank must call it.
    Checkpoints in the run's folder with a damaged manifest or damaged headers are set aside.
    Raises: ConfigError on every rank if all are damaged, or if the present code refuses the newest undamaged one.
    """
    resume, folder = config.checkpoint.resume, checkpoint_folder(config)
    if resume == "never":
        return None
    there_are_some = all_or_none.first(lambda: bool(checkpoints(folder)))
    if there_are_some:  # even if `resume` is a path: a restarted run goes on from its own checkpoints
        found = newest_checkpoint(folder, all_or_none, check=check_run)
        if found is None:
            raise none_is_whole(config)
        return found
    if resume == "auto":
        return None
    try:
        return read_on_all(Path(resume), all_or_none, check_run)
    except DamagedCheckpoint as error:
        raise path_is_damaged(error) from None
