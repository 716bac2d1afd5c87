"""Finds what a new run keeps of another run's checkpoint and what begins anew, for `--check` and a start."""

import re
from pathlib import Path
from typing import NamedTuple

from megamix.base.names import first_few
from megamix.checkpoint.manifest import BUFFER, Manifest
from megamix.checkpoint.phase import Phase, Shapes
from megamix.config import ConfigError, DecoderConfig
from megamix.train.resume_rules import Changes


class Continuation(NamedTuple):
    """Says what a run takes from a checkpoint."""

    lines: list[str]  # of the log
    phase: Phase | None = None  # what it has otherwise; None: it is the run's own checkpoint
    drawn: frozenset[str] = frozenset()  # parameters that get first values, in all rows or in some
    data_go_on: bool = True


def second_phase(
    path: Path, manifest: Manifest, model: DecoderConfig, begin_anew: tuple[str, ...], since: Changes
) -> Continuation:
    """Return what a new run of the present `model` takes from another run's checkpoint. `begin_anew`: patterns.

    Raises: ConfigError naming parameters that can neither be kept nor begin anew.
    """
    before = manifest.run.tables()
    phase = Phase(begin_anew, (before.get("model", {}).get("vocab_size", 0), model.vocab_size))
    saved = {param.name: param.shape for param in manifest.params if BUFFER not in manifest.states[param.state_set]}
    other_model = bool(begin_anew) or any(line.startswith("model.") for line in since.told)
    own = _shapes_now(path, manifest, model, phase, saved) if other_model else saved
    grown, new = phase.grown(saved, own), [name for name in own if phase.is_new(name)]
    anew = [f"rows {saved[name][0]} to {own[name][0] - 1} of {name}, drawn by training.seed" for name in grown]
    if new:
        anew.append(f"{first_few(new)}, drawn by training.seed")
    other_optimizer = any(line.startswith("optimizer.name:") for line in since.told)
    if other_optimizer:
        anew.append("at zero, states of the optimizer that the checkpoint lacks")
    if any(re.match(r"precision\.(loss_scale\.rule:|dtype:.*fp16)", line) for line in since.told):
        anew.append("the loss scale")
    if since.of_data:
        anew.append(f"the data, at sample 0, because of {', '.join(since.of_data)}")
    lines = [f"begins anew: {what}" for what in anew]
    if left := [name for name in saved if name not in own]:
        lines.append(f"left out: {first_few(left)}")
    if lines or other_model:
        states = ", their states" * (not other_optimizer)
        trained = "" if manifest.weights_only else f"{states}, update {manifest.applied_updates}"
        lines.insert(0, f"kept: {len(own) - len(new)} of {len(own)} parameters{trained}")
    return Continuation(lines, phase, frozenset((*grown, *new)), not since.of_data)


def _shapes_now(path: Path, manifest: Manifest, model: DecoderConfig, phase: Phase, saved: Shapes) -> Shapes:
    """Return the shapes of the present model, which the checkpoint fits. Raises: as `second_phase`."""
    from megamix.mixed_precision.weights import misfit_names
    from megamix.model.family import family_of

    key, own = "checkpoint.begin_anew", family_of(model).shapes(model)
    known = {*own, *(param.name for param in manifest.params)}
    problems = [
        f"{key}: got {pattern!r}, which names nothing in {path} or the model; it has {first_few([*own])}"
        for pattern in phase.begin_anew
        if not any(map(Phase((pattern,)).is_new, known))
    ]
    fits = phase.fitted(saved, own)
    if misfits := misfit_names(fits, own):
        names = [name for name in {**own, **fits} if own.get(name) != fits.get(name)]
        patterns = ", ".join(f'"{name}"' for name in [*phase.begin_anew, *names])
        what = f"{path} does not fit the model: {'; '.join(misfits)}"
        problems.append(f"{key}: {what}; bring the model back, or draw them anew: begin_anew = [{patterns}]")
    if problems:
        raise ConfigError(problems, "job")
    return own
