"""A run's folder: the names of its files, its owner, its checkpoints in words. This module imports no torch."""

from collections.abc import Iterator
from pathlib import Path

from megamix.base.durable import remove_asides, write_text
from megamix.checkpoint.folder import CHECKPOINTS, applied_updates, checkpoints
from megamix.checkpoint.slots import home_of, kept_in
from megamix.config import config_of_run
from megamix.config.sections import CheckpointConfig
from megamix.launch.journal import JOURNAL
from megamix.launch.run_status import read_status

CONFIG, WEIGHTS, SAMPLE, GAVE_UP = "config.toml", "weights.safetensors", "sample.txt", "gave_up.txt"
AVERAGED = "weights_average.safetensors"
METRICS, SET_ASIDE, RANKS = LOGS = ("metrics.jsonl", "set_aside.jsonl", "ranks.jsonl")
RESUME_WORDS = ("auto", "never")  # words in place of a path
BEGIN_ANEW = "write another checkpoint.folder to begin a new run, or put an undamaged checkpoint there"
MARKS = (CONFIG, WEIGHTS, METRICS)  # a folder that holds one of these files belongs to a run
_WRITTEN_ASIDE = (CONFIG, JOURNAL, WEIGHTS, AVERAGED, SAMPLE, GAVE_UP, "trace_rank*.json")


def checkpoint_words(section: CheckpointConfig, steps: int) -> str:
    """Return a line on the checkpoints that stay and that are copied; empty if a run only keeps the newest."""
    told = []
    if section.keep_every:
        told.append(
            f"one after every {section.keep_every} updates stays, {steps // section.keep_every} by update {steps}, "
            f"beside the newest {section.keep}"
        )
    if section.copies is not None:
        told.append(f"copied to {section.copies.folder}")
    if section.copy_command:
        told.append(f"taken elsewhere by {section.copy_command[0]}")
    return f"checkpoints: {'; '.join(told)}" if told else ""


def describe_failure(section: CheckpointConfig) -> str:
    """Return in words what a failed start has saved and lost, and what the same command does now."""
    if not (own := checkpoints(Path(section.folder, CHECKPOINTS))):
        return f"{nothing_saved(section)}; the same command starts anew"
    lost = max(0, read_status(Path(section.folder)).update - applied_updates(own[0]))
    return f"{own[0]} is saved, {lost} later updates are lost; the same command goes on with the run"


def nothing_saved(section: CheckpointConfig) -> str:
    lost = read_status(Path(section.folder)).update
    return f"nothing was saved yet (checkpoint.save_interval is {section.save_interval}): {lost} updates are lost"


def newest_update(folder: Path) -> int:
    """Return the update of the newest checkpoint of the run in `folder`; -1 without one."""
    return max(map(applied_updates, checkpoints(folder / CHECKPOINTS)), default=-1)


def in_memory(section: CheckpointConfig) -> str:
    """Return the beginning of words on the next start: of the state in this node's memory, if it is newer than the
    disk's; else nothing.
    """
    kept = kept_in(home_of(Path(section.folder)))
    if kept is None or kept.update <= newest_update(kept.folder):
        return ""
    return f"memory has the state after update {kept.update}, which a start takes if it is whole; else "


def copy_problems(section: CheckpointConfig) -> Iterator[str]:
    """Yield why checkpoints may not be copied to checkpoint.copies.folder. A disk that is away now is no reason."""
    if section.copies is None:
        return
    target, own = section.copies.folder, Path(section.folder)
    if Path(target).absolute() == own.absolute():
        yield f"checkpoint.copies.folder: {target} is checkpoint.folder itself; write another folder"
    yield from _other_copies("checkpoint.copies.folder", Path(target), own)


def _other_copies(key: str, target: Path, own: Path) -> Iterator[str]:
    """Yield that a folder has copies of another run than the one in `own`."""
    held = config_of_run(target / CONFIG)
    if held and (other := Path(held.checkpoint.folder).absolute()) != own.absolute():
        yield (
            f"{key}: {target} has copies of another run, {other}; write another folder, or remove its {CONFIG} if it "
            "is the same run"
        )


def take_for_copies(target: Path, source: Path) -> None:
    """Write the configuration of a run, `source` or the one that has this checkpoint, into a folder for its copies.
    Raises: ValueError if that has copies of another run.
    """
    places = (source, *source.absolute().parents[:2])
    run = next((path for path in places if (path / CHECKPOINTS).is_dir() and (path / CONFIG).is_file()), None)
    own = None if run is None else config_of_run(run / CONFIG)
    if own is None:  # of a user's own script, or its folder is lost
        return
    for problem in _other_copies("FOLDER", target, Path(own.checkpoint.folder)):
        raise ValueError(problem)
    write_text(target / CONFIG, own.text)


def claim(folder: Path, text: str) -> None:
    """Make the run's folder and write the effective configuration into it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in _WRITTEN_ASIDE:
        remove_asides(folder, name)
    write_text(folder / CONFIG, text)
