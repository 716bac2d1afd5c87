"""What can be wrong with a job besides its configuration, found before any time is spent. No torch here."""

import importlib.util
import os
from pathlib import Path

from megamix.checkpoint.folder import MANIFEST, checkpoints
from megamix.config import Config, ConfigError, check_world_size
from megamix.data.tokenizer import open_tokenizer
from megamix.train.build_data import data_problems
from megamix.train.run_folder import checkpoint_folder, folder_problems


def check(config: Config) -> None:
    """Refuse what cannot be trained; write nothing.

    Raises: ConfigError with everything that is wrong with ranks (WORLD_SIZE), files and folder.
    """
    if problems := job_problems(config, int(os.environ.get("WORLD_SIZE", "1"))):
        raise ConfigError(problems, "job")


def job_problems(config: Config, world_size: int) -> list[str]:
    """Every problem of ranks, files and folder, one line each: field, value, fix."""
    problems = check_world_size(config, world_size)
    problems += data_problems(config)
    if config.data.tokenizer is not None:
        problems += _tokenizer_problems(config.data.tokenizer, config.model.vocab_size)
    if config.metrics.tensorboard and importlib.util.find_spec("tensorboard") is None:
        problems.append(
            "metrics.tensorboard: is true, but the package tensorboard is not installed; run "
            "pip install 'megamix[tensorboard]' or write tensorboard = false"
        )
    return [*problems, *_resume_problems(config), *folder_problems(config)]


def _tokenizer_problems(path: str, vocab_size: int) -> list[str]:
    # Needed only for the sample at the end: a run must not train for days to fail there.
    try:
        known = open_tokenizer(Path(path)).vocab_size
    except ValueError as error:
        return [f"data.tokenizer: {error}; or leave the key out"]
    if known > vocab_size:
        return [
            f"data.tokenizer: {path} knows {known} tokens, more than model.vocab_size {vocab_size}; write "
            f"vocab_size = {known}, or the tokenizer that the tokens were made with"
        ]
    return []


def _resume_problems(config: Config) -> list[str]:
    resume, own = config.checkpoint.resume, checkpoint_folder(config)
    if resume in ("auto", "never"):
        return []
    if Path(resume).resolve().parent == own.resolve():
        return [
            f"checkpoint.resume: {resume} is this run's own; write auto, and to go back to it move the newer ones in "
            f"{own} away"
        ]
    # A run that has saved goes on from its own, whatever has become of the one that it began from.
    if not checkpoints(own) and not (Path(resume) / MANIFEST).is_file():
        return [
            f"checkpoint.resume: {resume} is no checkpoint; write auto, never or a path such as "
            "runs/my-run/checkpoints/step_00001000"
        ]
    return []
