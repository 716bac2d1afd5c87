"""The rules of resuming: whether a checkpoint's configuration and data may go on as others, and the changes since.

`--check` and a start apply the same rules. torch is imported only if a model's keys have changed, so that `--check` is
fast.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megamix.checkpoint.manifest import Manifest, RunRecord
from megamix.config import (
    ConfigError,
    DecoderConfig,
    ExpertsConfig,
    Pace,
    values_of,
    whole_weights,
)
from megamix.config.diff import Change, diff, may, without_paths
from megamix.launch.run_folder import BEGIN_ANEW
from megamix.plugins import Section

# This text only identifies the rule: a checkpoint keeps it, and a resumed run reports a change.
RNG_RULE = (
    "training.seed and the number of the sample and of its source, the parameter's name and the element's place for "
    "initial weights, the number of the try for dropout, and for that of the first block of the pipeline's stage"
)
# Keys of [model.experts] that say how a training balances the loads from now on.
_BALANCE = ("balance_loss", "z_loss", "bias_rate")
# Keys of another order of the data, and all that a new run may have otherwise than the checkpoint that it begins from.
_ORDER = ("model.seq_len", "training.seed", "data.split", "data.packing")
_OF_PHASES = (*_ORDER, "model.rope", "model.window", "model.vocab_size", "optimizer.name")


def trained_on(fingerprints: Mapping[str, str]) -> dict[str, str]:
    """Return the fingerprints that a checkpoint keeps: each start may validate on other data."""
    return {key: digest for key, digest in fingerprints.items() if not key.startswith("data.valid")}


def no_step_left(pace: Pace) -> str:
    """Return why a run that has all its updates does not go on, and how it would."""
    steps = pace.steps
    more = f"training.tokens = {pace.tokens(steps) + 1}" if pace.in_tokens else f"training.steps = {steps + 1}"
    return f"is after step {steps} already, so no step is left; {more} or more has some"


def none_is_whole(folder: Path) -> ConfigError:
    problem = f"checkpoint.folder: no checkpoint in {folder} is whole; {BEGIN_ANEW}"
    return ConfigError([problem], "job")


def path_is_damaged(error: object) -> ConfigError:
    return ConfigError([f"checkpoint.resume: {error}; write the path of a whole checkpoint"], "job")


class Changes(NamedTuple):
    """Says what has changed since a checkpoint."""

    told: list[str]  # a line for every key whose value has changed
    of_data: list[str]  # keys by which the data begin anew; empty: they go on


def changes(path: Path, manifest: Manifest, now: RunRecord, *, own: bool, surgery: bool = False) -> Changes:
    """Return what has changed since the checkpoint.

    `own`: whether the checkpoint lies in the run's own folder. Another run's may begin one with other lengths,
    positions, vocabulary, optimizer or data; with `surgery` any key of the model may be another one.
    Raises: ConfigError naming each change that is refused.
    """
    old, new = values_of(manifest.run.config), values_of(now.config)
    if manifest.weights_only:  # nothing but the model counts
        old, new = ({key: it for key, it in values.items() if key.startswith("model.")} for values in (old, new))
        other_data = list[tuple[str, str]]()
    else:
        other_data = [*_other_data(path, manifest, old, now, new)]
        old |= {"rng_rule": manifest.run.rng_rule}  # another order of the data, other initial weights
        new |= {"rng_rule": now.rng_rule}
    differing = [*_differing(old, new)]
    free = (*_OF_PHASES, *["model."] * surgery) if not own else ("model.seq_len",) * manifest.weights_only
    refused = [it for it in differing if not it.key.startswith(free)]
    if problems := [*_refusals(refused, old, new, own), *(f"{key}: {why}" for key, why in other_data if own)]:
        raise ConfigError(problems, "job")
    reasons = [it.key for it in differing if it.key in _ORDER]
    reasons += [key for key, _ in other_data if key not in ("data.tokenizer", *reasons)]
    told = [f"{key}: {before} -> {after}" for key, before, after in diff(old, new)]
    return Changes(told, reasons if manifest.run.progress.get("cursor") else [])


def _differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Change]:
    """Yield each key whose change makes another model, other states, or another order of the data."""
    if differing := [it for it in diff(old, new) if not may(it.key).resume]:
        other = {it.key for it in diff(_meaning(old), _meaning(new))}
        # Dropped biases of experts are another model, though their rate is none.
        other |= {"model.experts"} if _has_biases(old) and not _has_biases(new) else set()
        yield from (it for it in differing if it.key in other)


def _refusals(changed: Iterable[Change], old: Mapping[str, Any], new: Mapping[str, Any], own: bool) -> Iterator[str]:
    """Yield why a run must not go on with these keys changed, a line each. `own`: as in `changes`."""
    for key, before, after in changed:
        hint = "another checkpoint.folder to begin a new run"
        if not own:
            hint = "name in checkpoint.begin_anew the parameters to draw anew, which lets any key of [model] change"
        elif key in _OF_PHASES:
            hint += " (with these weights, if checkpoint.resume is this checkpoint's path)"
        if key == "model.experts" and _has_biases(old) and not _has_biases(new):
            hint += " (bias_rate = 1e-30 keeps the biases as they are)"
        yield f"{key}: the checkpoint has {before}, the configuration {after}; write the former, or {hint}"


def _other_data(
    path: Path, manifest: Manifest, old: Mapping[str, Any], now: RunRecord, new: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield the keys by which data that the run has read, or reads now, are not the checkpoint's, each with why."""
    cursor: Any = manifest.run.progress.get("cursor", 0)  # the first sample that was never read
    began = _mixtures(old, cursor)
    if _mixtures(new, cursor) != began:
        key = "data.train" if _mixtures(new, 0) != began[:1] else "data.stages"
        why = f"the {cursor} samples that were read came from another mixture than the configuration's"
        fix = f"write train and stages as they were, and a change as a stage with from_sample = {cursor} or more"
        yield key, f"{why}; {fix}"
    for key, fingerprint in manifest.run.fingerprints.items():
        if now.fingerprints.get(key, fingerprint) != fingerprint and _is_read(key, len(began) - 1):
            fix = "bring the old data back, or write another checkpoint.folder to begin a new run"
            yield key, f"holds other data than when {path} was saved; {fix}"


def _has_biases(keys: Mapping[str, Any]) -> bool:
    experts = keys.get("model.experts")
    return isinstance(experts, dict) and bool(experts.get("bias_rate"))


def _meaning(keys: Mapping[str, Any]) -> dict[str, Any]:
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

    meant = {name: it for name, it in family_of(config).effective(config).items() if not may(f"model.{name}").resume}
    return {name: _plain(it) if isinstance(it, Section) else it for name, it in meant.items()}


def _plain(table: Section) -> dict[str, Any]:
    return table.model_dump(exclude={*_BALANCE} if isinstance(table, ExpertsConfig) else None)


def _mixtures(values: Mapping[str, Any], cursor: int) -> list[tuple[int, Any]]:
    """Return the mixtures from which the samples before the cursor were taken, stage by stage: shares and numbers of
    the sources. Their paths may change.
    """
    stages = [{"from_sample": 0, "train": values["data.train"]}, *values.get("data.stages", [])]
    numbers: dict[str | int, int] = {}
    begun = [stage for stage in stages if stage["from_sample"] < max(cursor, 1)]
    return [(stage["from_sample"], _with_shares(without_paths(stage["train"], numbers))) for stage in begun]


def _with_shares(sources: list[dict[str, Any]]) -> list[dict[str, Any]]:
    weights = [source.get("weight") for source in sources]
    whole = weights if None in weights and len(weights) > 1 else whole_weights([weight or 1.0 for weight in weights])
    return [source | {"weight": share} for source, share in zip(sources, whole, strict=True)]


def _is_read(field: str, stages: int) -> bool:
    """Return whether a run has reached the data of a fingerprint. `stages`: number of data.stages that have begun."""
    return not field.startswith("data.stages") or any(field.startswith(f"data.stages[{n}]") for n in range(stages))
