"""Whether a job may go on from a checkpoint, and what a start would do. torch is imported only if model, optimizer or
code have changed, so that `--check` is fast.
"""

import os
from functools import partial
from pathlib import Path

from megamix.checkpoint.folder import CHECKPOINTS, MANIFEST, checkpoints
from megamix.checkpoint.manifest import Manifest, RunRecord, check_size, read_manifest
from megamix.checkpoint.slots import home_of
from megamix.config import Config, ConfigError, DecoderConfig, Pace, first_weights
from megamix.launch.run_folder import RESUME_WORDS, checkpoint_words, nothing_saved
from megamix.launch.run_lock import refuse_held
from megamix.launch.run_status import read_status
from megamix.train.corpus import JobCorpus
from megamix.train.own_code import own_code
from megamix.train.resume_rules import RNG_RULE, changes, no_step_left, none_is_whole, path_is_damaged, trained_on
from megamix.train.second_phase import Continuation, second_phase


class Judge:
    """Says what has changed since a checkpoint, and refuses one from which the job must not go on."""

    def __init__(self, config: Config, record: RunRecord, ranks: int):
        """`record`: that of the job's own checkpoints. `ranks`: the present number of ranks."""
        self._config, self._record, self._ranks = config, record, ranks
        self._folder = Path(config.checkpoint.folder, CHECKPOINTS)

    def continuation(self, path: Path, manifest: Manifest) -> Continuation:
        """Return how a run goes on from this checkpoint.

        Raises: ConfigError if the run must not go on from there.
        """
        section, pace, applied = self._config.checkpoint, self._config.pace, manifest.applied_updates
        if applied > pace.steps:
            raise ConfigError([self._shorter(path, applied)], "job")
        own = path.parent == self._folder or path == home_of(self._folder.parent)
        since = changes(path, manifest, self._record, own=own, surgery=bool(section.begin_anew))
        lines = since.told
        optimizer_changed = any(line.startswith("optimizer.") for line in lines)
        if own and not manifest.weights_only and (optimizer_changed or self._other_code(manifest)):
            self._check_states(path, manifest)
        counted = pace.tokens(applied)
        if pace.in_tokens and (had := manifest.run.progress.get("tokens", counted)) != counted:
            words = f"training.tokens: the rate counts {counted} tokens for the updates so far, which had {had}"
            lines.append(f"{words}; write batch_ramp with their sizes" if section.resume in RESUME_WORDS else words)
        then, now = manifest.run.code, self._record.code
        if then and (other := [it for it in sorted({*then, *now}) if then.get(it) != now.get(it)]):
            lines.append("; ".join(f"{it}: {then.get(it, 'none')} -> {now.get(it, 'none')}" for it in other))
        if (saved_on := len(manifest.files)) != self._ranks and not manifest.weights_only:
            lines.append(f"ranks: {saved_on} -> {self._ranks}")
        told = [f"changed since: {line}" for line in lines]
        if section.resume not in RESUME_WORDS and own:
            why = f"because {section.folder} has checkpoints of its own"
            words = f"checkpoint.resume: {section.resume} is not read{', nor begin_anew' * bool(section.begin_anew)}"
            told.append(f"{words}, {why}")
        if own:
            return Continuation(told)
        found = second_phase(path, manifest, self._config.model, section.begin_anew, since)
        return found._replace(lines=told + found.lines)

    def continuation_of_start(self, path: Path, manifest: Manifest) -> Continuation:
        """Return `continuation`, with a line if the next update's learning rate has changed."""
        from megamix.train.objects import lr_rule
        from megamix.train.run_record import saved_tables

        continuation, config, applied = self.continuation(path, manifest), self._config, manifest.applied_updates
        if 0 < applied < config.pace.steps:
            then = saved_tables(manifest)
            old = lr_rule(then.lr_schedule, then.optimizer, Pace(then.training, then.model.seq_len))(applied)
            new = lr_rule(config.lr_schedule, config.optimizer, config.pace)(applied)
            if old != new:
                continuation.lines.append(f"learning rate of update {applied + 1}: {old:.3g} -> {new:.3g}")
        return continuation

    def manifest_of(self, path: Path) -> Manifest:
        """Return the manifest of a checkpoint.

        Raises: ValueError, OSError for a damaged manifest; ConfigError for a manifest that the present code refuses.
        """
        manifest = read_manifest(path / MANIFEST)
        for file in manifest.files:
            check_size(path / file.name, file)
        if self._other_code(manifest):
            from megamix.checkpoint.verify import read_checkpoint
            from megamix.train.run_record import check_run

            read_checkpoint(path, check_run)
        return manifest

    def _shorter(self, path: Path, applied: int) -> str:
        training, pace = self._config.training, self._config.pace
        name, got, least = "steps", f"{pace.steps}", applied
        if pace.in_tokens:
            name, got, least = "tokens", f"{training.tokens}, {pace.steps} updates", pace.tokens(applied)
        fix = f"{least} or more, or another checkpoint.folder to begin a new run"
        if path == home_of(self._folder.parent):
            fix = f"{least} or more, or go back to a checkpoint: megamix status {self._folder.parent} --clear"
        elif path.parent != self._folder:
            fix = f"{least + 1} or more"
        return f"training.{name}: got {got}, but {path} is after update {applied}; write {name} = {fix}"

    def _other_code(self, manifest: Manifest) -> bool:
        """Return whether the present code may refuse the checkpoint.

        With plugins the answer is always True, since modules that a plugin imports may have changed.
        """
        return manifest.run.code != self._record.code or bool(self._config.plugins)

    def _check_states(self, path: Path, manifest: Manifest) -> None:
        from megamix.train.objects import build_optimizer
        from megamix.train.run_record import check_states

        check_states(path, manifest, self._config.optimizer.name, partial(build_optimizer, self._config))


def describe_start(config: Config) -> tuple[str, int]:
    """Return in words what a start would do with the run's folder, and which checkpoints would stay; and the number of
    updates before its first sample, which another run has made. Write nothing.

    Checkpoints are judged by their manifests and the sizes of their files.
    Raises: ConfigError if the start would be refused.
    """
    section, steps = config.checkpoint, config.pace.steps
    folder, own_folder, resume = Path(section.folder), Path(section.folder, CHECKPOINTS), section.resume
    kept = filter(None, [checkpoint_words(section, steps)])
    try:
        refuse_held(folder)
    except OSError as error:
        raise ConfigError([f"checkpoint.folder: {error}; write another folder"], "job") from error
    own = [] if resume == "never" else checkpoints(own_folder)
    found = own or ([] if resume in RESUME_WORDS else [Path(resume)])
    corpus = JobCorpus(config.data, config.model)
    data = trained_on(corpus.fingerprints()) if found else {}
    record = RunRecord(config=config.text, fingerprints=data, rng_rule=RNG_RULE, code=own_code(config.plugins))
    judge, damaged = Judge(config, record, int(os.environ.get("WORLD_SIZE", "1"))), list[str]()
    for path in found:
        try:
            manifest = judge.manifest_of(path)
            taken = judge.continuation(path, manifest) if own else judge.continuation_of_start(path, manifest)
        except ConfigError:
            raise
        except (OSError, ValueError, LookupError, TypeError) as error:  # a manifest that no run has written
            damaged.append(f"{path}: {error}")
            continue
        goes_on = f"would go on from step {manifest.applied_updates} of {folder} to step {steps}"
        if manifest.applied_updates == steps:
            goes_on = f"{folder} {no_step_left(config.pace)}"
        first = goes_on if own else f"would start a new run in {folder} from {resume}"
        if not own and 0 < manifest.applied_updates == steps:
            first += f", which {no_step_left(config.pace)}"
        told = [f"damaged: {line}" for line in damaged]
        before = 0 if taken.data_go_on else manifest.applied_updates
        return "\n  ".join([first, *told, *taken.lines, *kept]), before
    if damaged:
        raise none_is_whole(own_folder) if own else path_is_damaged(damaged[0])
    lost = f"\n  {nothing_saved(section)}" if resume != "never" and read_status(folder).update else ""
    return "\n  ".join([f"would start a new run in {folder}{_with_weights(config.model)}{lost}", *kept]), 0


def _with_weights(model: DecoderConfig) -> str:
    try:
        told = first_weights(model)
    except ValueError as error:
        raise ConfigError([str(error)], "job") from None
    return f", with {told}" if told else ""
