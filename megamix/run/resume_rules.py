"""The rules of resuming: whether a run may go on from a checkpoint, and the changes since.

`--check` and a start apply the same rules. torch is imported only if model, optimizer or code have changed, so that
`--check` is fast.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from megamix.builders.data import data_fingerprints
from megamix.checkpoint.folder import MANIFEST, applied_updates, checkpoints
from megamix.checkpoint.manifest import Manifest, RunRecord, check_size, read_manifest
from megamix.config import (
    Config,
    ConfigError,
    DecoderConfig,
    ExpertsConfig,
    data_source,
    effective_tables,
    first_weights,
    tokens_of,
    whole_weights,
)
from megamix.config.toml_text import value_text
from megamix.run.own_code import own_code
from megamix.run.run_folder import BEGIN_ANEW, RESUME_WORDS, checkpoint_folder, checkpoint_words
from megamix.supervise.run_lock import refuse_held
from megamix.supervise.status import read_status

# This text only identifies the rule: a checkpoint keeps it, and a resumed run reports a change.
RNG_RULE = (
    "training.seed and the number of the sample and of its source, the parameter's name and the element's place for "
    "initial weights, the number of the try for dropout, and for that of the first block of the pipeline's stage"
)
# A different value of one of these keys makes another model, other states, or another order of the data.
_REFUSED = ("model.", "optimizer.name", "training.seed", "data.split", "data.packing")
# Exceptions among these keys: how a step is computed, and initial weights that a checkpoint replaces.
_PASS = (
    "model.dropout", "model.compile", "model.recompute", "model.init_std", "model.scaled_init", "model.folder",
    "model.init",
)  # fmt: skip

# Keys of [model.experts] that say how a training balances the loads from now on.
_BALANCE = ("balance_loss", "z_loss", "bias_rate")


def outlook(config: Config) -> str:
    """Return in words what a start would do with the run's folder, and which checkpoints would stay. Write nothing.

    Checkpoints are judged by their manifests and the sizes of their files.
    Raises: ConfigError if the start would be refused.
    """
    return "\n  ".join(filter(None, (_start_words(config), checkpoint_words(config))))


def _start_words(config: Config) -> str:
    folder, resume, steps = Path(config.checkpoint.folder), config.checkpoint.resume, config.training.steps
    try:
        refuse_held(folder)
    except OSError as error:
        raise ConfigError([f"checkpoint.folder: {error}; write another folder"], "job") from error
    own = [] if resume == "never" else checkpoints(checkpoint_folder(config))
    found = own or ([] if resume in RESUME_WORDS else [Path(resume)])
    record = record_of(config, data_fingerprints(config) if found else {})
    damaged = list[str]()
    for path in found:
        try:
            manifest = _manifest_of(path, config, record)
            lines = judge(path, manifest, config, record, int(os.environ.get("WORLD_SIZE", "1")))
        except ConfigError:
            raise
        except (OSError, ValueError, LookupError, TypeError) as error:  # a manifest that no run has written
            damaged.append(f"{path}: {error}")
            continue
        goes_on = f"would go on from step {manifest.applied_updates} of {folder} to step {steps}"
        if manifest.applied_updates == steps:
            goes_on = f"{folder} {no_step_left(config)}"
        first = goes_on if own else f"would start a new run in {folder} from {resume}"
        told = [f"damaged: {line}" for line in damaged]
        return "\n  ".join([first, *told, *lines])
    if damaged:
        raise none_is_whole(config) if own else path_is_damaged(damaged[0])
    lost = f"\n  {_nothing_saved(config)}" if resume != "never" and read_status(folder).update else ""
    return f"would start a new run in {folder}{_with_weights(config)}{lost}"


def _with_weights(config: Config) -> str:
    try:
        told = first_weights(config.model)
    except ValueError as error:
        raise ConfigError([str(error)], "job") from None
    return f", with {told}" if told else ""


def what_is_kept(config: Config) -> str:
    """Return in words what a failed start has saved and lost, and what the same command does now."""
    if not (own := checkpoints(checkpoint_folder(config))):
        return f"{_nothing_saved(config)}; the same command starts anew"
    saved = applied_updates(own[0])
    lost = max(0, read_status(Path(config.checkpoint.folder)).update - saved)
    return f"{own[0]} is saved, {lost} later updates are lost; the same command goes on with the run"


def _nothing_saved(config: Config) -> str:
    lost = read_status(Path(config.checkpoint.folder)).update
    interval = config.checkpoint.save_interval
    return f"nothing was saved yet (checkpoint.save_interval is {interval}): {lost} updates are lost"


def _manifest_of(path: Path, config: Config, now: RunRecord) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises: ValueError, OSError for a damaged manifest; ConfigError for a manifest that the present code refuses.
    """
    manifest = read_manifest(path / MANIFEST)
    for file in manifest.files:
        check_size(path / file.name, file)
    if _other_code(manifest, config, now):
        from megamix.checkpoint.verify import read_checkpoint
        from megamix.run.run_record import check_run

        if refusal := read_checkpoint(path, check_run).refusal:
            raise ConfigError([refusal], "job")
    return manifest


def _other_code(manifest: Manifest, config: Config, now: RunRecord) -> bool:
    """Return whether the present code may refuse the checkpoint.

    With plugins the answer is always True, since modules that a plugin imports may have changed.
    """
    return manifest.run.code != now.code or bool(config.plugins)


def no_step_left(config: Config) -> str:
    steps, tokens = config.training.steps, config.training.tokens
    more = f"training.tokens = {tokens_of(config, steps) + 1}" if tokens else f"training.steps = {steps + 1}"
    return f"is after step {steps} already, so no step is left; {more} or more has some"


def none_is_whole(config: Config) -> ConfigError:
    problem = f"checkpoint.folder: no checkpoint in {checkpoint_folder(config)} is whole; {BEGIN_ANEW}"
    return ConfigError([problem], "job")


def path_is_damaged(error: object) -> ConfigError:
    return ConfigError([f"checkpoint.resume: {error}; write the path of a whole checkpoint"], "job")


def record_of(config: Config, fingerprints: dict[str, str]) -> RunRecord:
    """Return the record that every checkpoint of a run holds, without its progress.

    `fingerprints`: digests of the data, by the key that names the data. Those of validation data are left out, because
    each start may validate on other data.
    """
    trained_on = {field: digest for field, digest in fingerprints.items() if not field.startswith("data.valid")}
    code = own_code(config.plugins)
    return RunRecord(config=config.text, fingerprints=trained_on, rng_rule=RNG_RULE, code=code)


def judge(path: Path, manifest: Manifest, config: Config, now: RunRecord, ranks: int) -> list[str]:
    """Return the lines that a run logs when it goes on from this checkpoint. `ranks`: the present number of ranks.

    Raises: ConfigError if the run must not go on from there.
    """
    applied = manifest.applied_updates
    if applied > config.training.steps:
        name, got, least = "steps", f"{config.training.steps}", applied
        if tokens := config.training.tokens:
            got = f"{tokens}, {config.training.steps} updates"
            name, least = "tokens", tokens_of(config, applied)
        problem = (
            f"training.{name}: got {got}, but {path} is after update {applied}; "
            f"write {name} = {least} or more, or another checkpoint.folder to begin a new run"
        )
        raise ConfigError([problem], "job")
    own = path.parent == checkpoint_folder(config)
    lines = changes(path, manifest, now, cast(int, manifest.run.progress.get("cursor", 0)), own=own)
    optimizer_changed = any(line.startswith("optimizer.") for line in lines)
    if own and not manifest.weights_only and (optimizer_changed or _other_code(manifest, config, now)):
        from megamix.run.run_record import check_states

        check_states(path, manifest, config)
    counted = tokens_of(config, applied)
    if config.training.tokens and own and (had := manifest.run.progress.get("tokens", counted)) != counted:
        words = f"training.tokens: the rate counts {counted} tokens for the updates so far, which had {had}"
        lines.append(f"{words}; write batch_ramp with their sizes")
    saved_by = manifest.run.code
    if saved_by and (other := _differing(saved_by, now.code)):
        lines.append("; ".join(f"{it}: {saved_by.get(it, 'none')} -> {now.code.get(it, 'none')}" for it in other))
    if (saved_on := len(manifest.files)) != ranks and not manifest.weights_only:
        lines.append(f"ranks: {saved_on} -> {ranks}")
    told = [f"changed since: {line}" for line in lines]
    folder, resume = config.checkpoint.folder, config.checkpoint.resume
    if resume not in RESUME_WORDS and own:
        told.append(f"checkpoint.resume: {resume} is not read, because {folder} has checkpoints of its own")
    return told


def changes(path: Path, manifest: Manifest, now: RunRecord, cursor: int, *, own: bool) -> list[str]:
    """Return a line for every key whose value has changed since the checkpoint.

    `cursor`: the first sample that was never read. `own`: whether the checkpoint lies in the run's own folder; with
    another run's checkpoint, the optimizer may be another one.
    Raises: ConfigError naming each change that would make it another run.
    """
    saved = manifest.run
    old, new = flat(saved.config), flat(now.config)
    if manifest.weights_only:
        return _changes_of_model(old, new)
    refused = _refused(old, new, _PASS if own else (*_PASS, "optimizer.name"))
    began = _mixtures(old, cursor)
    if _mixtures(new, cursor) != began:
        refused.append(
            f"data.train: the {cursor} samples that were read came from another mixture than the configuration's; "
            f"write train and stages as they were, and a change as a stage with from_sample = {cursor} or more"
        )
    refused += [
        f"{key}: holds other data than when {path} was saved; bring the old data back, or write another "
        "checkpoint.folder to begin a new run"
        for key, fingerprint in saved.fingerprints.items()
        if now.fingerprints.get(key, fingerprint) != fingerprint and _is_read(key, len(began) - 1)
    ]
    if refused:
        raise ConfigError(refused, "job")
    if old.get("optimizer.name") != new.get("optimizer.name"):  # keys of two optimizers are not comparable
        settings = tuple(f"optimizer.{keys.get('optimizer.name')}." for keys in (old, new))
        old, new = ({key: value for key, value in keys.items() if not key.startswith(settings)} for keys in (old, new))
    rules = {"rng_rule": saved.rng_rule}, {"rng_rule": now.rng_rule}  # another order of the data, other initial weights
    return _told(old | rules[0], new | rules[1])


def _changes_of_model(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return `changes` for a checkpoint of imported weights.

    Only the model must be the same, and its sequences may have another length. If positions are learned, the length is
    a size of a parameter, and loading refuses another length.
    """
    old, new = ({key: value for key, value in flat.items() if key.startswith("model.")} for flat in (old, new))
    if refused := _refused(old, new, (*_PASS, "model.seq_len")):
        raise ConfigError(refused, "job")
    return _told(old, new)


def _differing(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    return [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]


def _refused(old: dict[str, Any], new: dict[str, Any], may_change: tuple[str, ...]) -> list[str]:
    differing = [key for key in _differing(old, new) if key.startswith(_REFUSED) and key not in may_change]
    other = _differing(_meaning(old), _meaning(new)) if differing else []
    hints = {"optimizer.name": "with these weights, if checkpoint.resume is this checkpoint's path"}
    if _has_biases(old) and not _has_biases(new):
        other.append("model.experts")
        hints["model.experts"] = "bias_rate = 1e-30 keeps the biases as they are"
    values = {key: _texts(old.get(key), new.get(key)) for key in differing if key in other}
    return [
        f"{key}: the checkpoint has {before}, the configuration {now}; write the "
        "former, or another checkpoint.folder to begin a new run" + (f" ({hints[key]})" if key in hints else "")
        for key, (before, now) in values.items()
    ]


def _has_biases(keys: dict[str, Any]) -> bool:
    """Return whether routers have biases that balance their experts."""
    experts = keys.get("model.experts")
    return isinstance(experts, dict) and bool(experts.get("bias_rate"))


def _meaning(keys: dict[str, Any]) -> dict[str, Any]:
    """Return the keys, so that two spellings of one run are equal: keys that are not set get their value in effect,
    shares get one scale, and experts have no balance.
    """
    from megamix.model.family import section_of

    model = {key.removeprefix("model."): value for key, value in keys.items() if key.startswith("model.")}
    section = section_of(model)
    config = section.model_validate({name: model[name] for name in section.model_fields if name in model})
    meant = {f"model.{name}": value for name, value in meaning_of_model(config).items()}
    split = keys.get("data.split")
    return {**keys, **meant, "data.split": split and split[0] / sum(split)}


def meaning_of_model(config: DecoderConfig) -> dict[str, Any]:
    """Return the values in effect of the section [model] that decide which function the weights compute."""
    from megamix.model.family import family_of

    meant = {name: it for name, it in family_of(config).effective(config).items() if f"model.{name}" not in _PASS}
    if isinstance(experts := meant.get("experts"), ExpertsConfig):
        meant["experts"] = experts.model_dump(exclude={*_BALANCE})
    return meant


def _told(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    values = {key: _texts(old.get(key), new.get(key)) for key in _differing(old, new)}
    return [f"{key}: {before} -> {now}" for key, (before, now) in values.items()]


def _mixtures(keys: dict[str, Any], cursor: int) -> list[tuple[int, list[Any]]]:
    """Return the mixtures from which the samples before the cursor were taken, stage by stage.

    A mixture has its sources' shares and numbers. Sources are numbered in the order of first appearance, so their paths
    may change.
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
    """Return whether a run has reached the data of a fingerprint. `stages`: number of data.stages that have begun."""
    return not field.startswith("data.stages") or any(field.startswith(f"data.stages[{n}]") for n in range(stages))


def _texts(one: Any, other: Any) -> tuple[str, str]:
    """Return two values as texts; of two tables only what differs."""
    if isinstance(one, dict) and isinstance(other, dict):
        apart = _differing(one, other)
        one, other = ({key: table[key] for key in apart if key in table} for table in (one, other))
    return _text(one), _text(other)


def _text(value: Any) -> str:
    return "not set" if value is None else value_text(value)


def flat(config: str) -> dict[str, Any]:
    """Return an effective configuration as values by `section.key`, to compare it with another one.

    A key that is not read has its default. A key that is not set is left out.
    Raises: ValueError if it is no TOML.
    """
    return dict(flat_keys("", effective_tables(config)))


def flat_keys(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values below a table of that name, or of "" for the whole."""
    # a table in [model], and that of the validation sets, is compared as a whole
    if isinstance(value, dict) and not name.startswith(("model.", "data.valid")):
        for key, inner in value.items():
            yield from flat_keys(f"{name}.{key}".lstrip("."), inner)
    else:
        yield name, value
