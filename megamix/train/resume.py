"""From which checkpoint a run goes on, and whether it may: what has changed since is refused or told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megamix.checkpoint.folder import checkpoints
from megamix.checkpoint.load import load, load_or_older, newest_checkpoint, read_together
from megamix.checkpoint.manifest import DamagedCheckpoint, RunRecord
from megamix.checkpoint.together import Together
from megamix.checkpoint.verify import Checkpoint
from megamix.config import Config, ConfigError, config_to_toml, data_source, whole_weights
from megamix.config.toml_text import value_text
from megamix.mixed_precision.engine import ShardedEngine
from megamix.model.family import family_of, section_of
from megamix.train.run_folder import BEGIN_ANEW, checkpoint_folder
from megamix.train.same_job import flat
from megamix.train.saved_run import Progress, check_run

RNG_RULE = (
    "training.seed and the number of the sample and of its source, the parameter's name and the element's place for "
    "initial weights, the number of the try for dropout, and for that of the first block of the pipeline's stage"
)
# Whatever the shapes, with another value these make another model, other states, or another order of the data.
_REFUSED = ("model.", "optimizer.name", "training.seed", "data.split", "data.packing")
# Of these: how a step is computed, and weights that are no longer initial.
_PASS = ("model.dropout", "model.compile", "model.recompute", "model.init_std", "model.scaled_init")


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run takes up; the same on every rank."""

    checkpoint: Checkpoint | None  # None: it begins anew
    progress: Progress
    record: RunRecord  # what every checkpoint of this run says, without its progress
    changes: list[str]  # of the configuration since the checkpoint
    together: Together


def find_start(config: Config, fingerprints: dict[str, str], together: Together) -> Start:
    """Find the checkpoint to go on from and compare it with the configuration. Its tensors' bytes are verified by
    `load_start`. Every rank must call it. `fingerprints`: of the data, by the key that names it.

    Raises: ConfigError on every rank, if the run must not go on; the run's folder holds what it held.
    """
    # Each start may validate on other data.
    trained_on = {field: digest for field, digest in fingerprints.items() if not field.startswith("data.valid")}
    own = RunRecord(config=config_to_toml(config), fingerprints=trained_on, rng_rule=RNG_RULE)
    record = RunRecord.model_validate(together.first(lambda: own.model_dump(mode="json")))
    checkpoint = find_checkpoint(config, together)
    if checkpoint is None:
        return Start(None, Progress(), record, [], together)
    return _start_from(checkpoint, config, record, together)


def _start_from(checkpoint: Checkpoint, config: Config, record: RunRecord, together: Together) -> Start:
    progress = Progress.read(checkpoint.manifest.run.progress)
    if progress.applied > config.training.steps:
        problem = (
            f"training.steps: got {config.training.steps}, but {checkpoint.path} is after update {progress.applied}; "
            f"write steps = {progress.applied} or more, or another checkpoint.folder to begin a new run"
        )
        raise ConfigError([problem], "job")
    if checkpoint.path.parent != checkpoint_folder(config):
        progress = progress.model_copy(update={"log_sizes": {}})  # another run's logs
    return Start(checkpoint, progress, record, changes(checkpoint, record, progress.cursor), together)


def load_start(start: Start, config: Config, engine: ShardedEngine) -> Start:
    """Load what the run goes on from; where that is damaged, the newest good one before it in the run's folder. Returns
    the start as it has become. Every rank must call it.

    Raises: ConfigError on every rank if there is none that is good, or that may be loaded. The run ends with that, so
    no engine trains on after a load that failed.
    """
    found = start.checkpoint
    if found is None:
        return start
    try:
        if found.path.parent == checkpoint_folder(config):
            found = load_or_older(found, engine, start.together, check=check_run)
        else:
            load(found, engine, start.together)
    except DamagedCheckpoint as error:
        raise _path_is_damaged(error) from None
    except ValueError as error:
        problem = f"checkpoint.resume: {error}; bring the configuration back, or write another checkpoint.folder"
        raise ConfigError([problem], "job") from None
    if found is None:
        raise _none_is_whole(config)
    return start if found is start.checkpoint else _start_from(found, config, start.record, start.together)


def find_checkpoint(config: Config, together: Together) -> Checkpoint | None:
    """Return the one that `checkpoint.resume` asks for; those in the run's folder whose manifest or headers are damaged
    are set aside. None for a run that begins anew. Every rank must call it.

    Raises: ConfigError on every rank if there are only damaged ones.
    """
    resume, folder = config.checkpoint.resume, checkpoint_folder(config)
    if resume == "never":
        return None
    there_are_some = together.first(lambda: bool(checkpoints(folder)))
    if there_are_some:  # also with a path: a run that began from there and was restarted goes on from its own
        found = newest_checkpoint(folder, together, check=check_run)
        if found is None:
            raise _none_is_whole(config)
        return found
    if resume == "auto":
        return None
    try:
        return read_together(Path(resume), together, check_run)
    except DamagedCheckpoint as error:
        raise _path_is_damaged(error) from None


def _none_is_whole(config: Config) -> ConfigError:
    problem = f"checkpoint.folder: no checkpoint in {checkpoint_folder(config)} is whole; {BEGIN_ANEW}"
    return ConfigError([problem], "job")


def _path_is_damaged(error: DamagedCheckpoint) -> ConfigError:
    return ConfigError([f"checkpoint.resume: {error}; write the path of a whole checkpoint"], "job")


def changes(checkpoint: Checkpoint, now: RunRecord, cursor: int) -> list[str]:
    """Return a line for every key that has another value since the checkpoint. `cursor`: the first sample never read.

    Raises: ConfigError naming each change that would make it another run.
    """
    saved = checkpoint.manifest.run
    old, new = flat(saved.config), flat(now.config)
    if checkpoint.manifest.weights_only:
        return _changes_of_model(old, new)
    refused = _refused(old, new, _PASS)
    began = _mixtures(old, cursor)
    if _mixtures(new, cursor) != began:
        refused.append(
            f"data.train: the {cursor} samples that were read are another mixture than the configuration's; write "
            f"train and stages as they were, and what is to change as a stage with from_sample = {cursor} or more"
        )
    refused += [
        f"{key}: holds other data than when {checkpoint.path} was saved; bring that back, or write another "
        "checkpoint.folder to begin a new run"
        for key, fingerprint in saved.fingerprints.items()
        if now.fingerprints.get(key, fingerprint) != fingerprint and _is_read(key, len(began) - 1)
    ]
    if refused:
        raise ConfigError(refused, "job")
    rules = {"rng_rule": saved.rng_rule}, {"rng_rule": now.rng_rule}  # another order of the data, other initial weights
    return _told(old | rules[0], new | rules[1])


def _changes_of_model(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """`changes` of a checkpoint that no run has saved: the model alone must be the same, and its sequences may have any
    length. Where positions are learned the length is a parameter's shape, and loading refuses another one.
    """
    old, new = ({key: value for key, value in flat.items() if key.startswith("model.")} for flat in (old, new))
    if refused := _refused(old, new, (*_PASS, "model.seq_len")):
        raise ConfigError(refused, "job")
    return _told(old, new)


def _differing(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    return [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]


def _refused(old: dict[str, Any], new: dict[str, Any], may_change: tuple[str, ...]) -> list[str]:
    other = _differing(_meaning(old), _meaning(new))
    return [
        f"{key}: the checkpoint has {_text(old.get(key))}, the configuration {_text(new.get(key))}; write the "
        f"former, or another checkpoint.folder to begin a new run"
        for key in _differing(old, new)
        if key in other and key.startswith(_REFUSED) and key not in may_change
    ]


def _meaning(keys: dict[str, Any]) -> dict[str, Any]:
    """What is not set as what it stands for, and shares on one scale: written otherwise it is the same run."""
    model = {key.removeprefix("model."): value for key, value in keys.items() if key.startswith("model.")}
    section = section_of(model)
    config = section.model_validate({name: model[name] for name in section.model_fields if name in model})
    meant = family_of(config).effective(config)
    split = keys.get("data.split")
    return keys | {f"model.{name}": value for name, value in meant.items()} | {
        "data.split": split and split[0] / sum(split)
    }  # fmt: skip


def _told(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    return [f"{key}: {_text(old.get(key))} -> {_text(new.get(key))}" for key in _differing(old, new)]


def _mixtures(keys: dict[str, Any], cursor: int) -> list[tuple[int, list[Any]]]:
    """What the samples before the cursor are taken from, stage by stage: which sources, by the order in which they
    first come, whatever their paths are now; and their shares.
    """
    stages = [{"from_sample": 0, "train": keys["data.train"]}, *keys.get("data.stages", [])]
    begun = [stage for stage in stages if stage["from_sample"] < max(cursor, 1)]
    numbers: dict[Any, int] = {}
    return [(stage["from_sample"], _shares(stage["train"], numbers)) for stage in begun]


def _shares(train: Any, numbers: dict[Any, int]) -> list[Any]:
    if isinstance(train, str):
        train = [{"path": train}]
    weights = [source.get("weight") for source in train]
    whole = weights if None in weights and len(train) > 1 else whole_weights([weight or 1.0 for weight in weights])
    known = [numbers.setdefault(data_source(source).name, len(numbers)) for source in train]
    made_up = [{key: source[key] for key in source.keys() - {"path", "weight"} if source[key]} for source in train]
    return [*zip(made_up, known, whole, strict=True)]


def _is_read(field: str, stages: int) -> bool:
    """Whether a fingerprint is of data that a run has come to, `stages` of data.stages having begun."""
    return not field.startswith("data.stages") or any(field.startswith(f"data.stages[{n}]") for n in range(stages))


def _text(value: Any) -> str:
    return "not set" if value is None else value_text(value)
