"""A run's folder, in which no other run is overwritten, and other problems of a job, found before any time is spent.
This module imports no torch.
"""

import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from megamix.axes import OWN_AXES
from megamix.builders.data import data_problems, data_warnings
from megamix.checkpoint.folder import CHECKPOINTS, MANIFEST, checkpoints, set_aside
from megamix.config import Config, ConfigError, axis_sizes, check_world_size, load_config
from megamix.config.problems import short
from megamix.data import installing
from megamix.data.tokenizer import open_tokenizer
from megamix.durable import remove_asides, unwritable, write_text
from megamix.machine import WORKSPACES
from megamix.supervise.status import STATUS

CONFIG, WEIGHTS, SAMPLE, GAVE_UP = "config.toml", "weights.safetensors", "sample.txt", "gave_up.txt"
AVERAGED = "weights_average.safetensors"
METRICS, SET_ASIDE, RANKS = LOGS = ("metrics.jsonl", "set_aside.jsonl", "ranks.jsonl")
EVENTS, HEARTBEAT = "events.jsonl", "heartbeat.json"
RESUME_WORDS = ("auto", "never")  # words in place of a path
BEGIN_ANEW = "write another checkpoint.folder to begin a new run, or put an undamaged checkpoint there"
_MARKS = (CONFIG, WEIGHTS, METRICS)  # a folder that holds one of these files belongs to a run
_WRITTEN_ASIDE = (CONFIG, STATUS, WEIGHTS, AVERAGED, SAMPLE, GAVE_UP, "trace_rank*.json")


def checkpoint_folder(config: Config) -> Path:
    return Path(config.checkpoint.folder) / CHECKPOINTS


def checkpoint_words(config: Config) -> str:
    """Return a line on the checkpoints that stay and that are copied; empty if a run only keeps the newest."""
    section, steps = config.checkpoint, config.training.steps
    told = []
    if section.keep_every:
        told.append(
            f"one after every {section.keep_every} updates stays, {steps // section.keep_every} by update {steps}, "
            f"beside the newest {section.keep}"
        )
    if section.copy_to is not None:
        told.append(f"copied to {section.copy_to}")
    if section.copy_command:
        told.append(f"taken elsewhere by {section.copy_command[0]}")
    return f"checkpoints: {'; '.join(told)}" if told else ""


def copy_problems(config: Config) -> Iterator[str]:
    """Yield why checkpoints may not be copied to checkpoint.copy_to. A disk that is away now is no reason."""
    target, own = config.checkpoint.copy_to, Path(config.checkpoint.folder)
    if target is None:
        return
    if Path(target).absolute() == own.absolute():
        yield f"checkpoint.copy_to: {target} is checkpoint.folder itself; write another folder"
    yield from _other_copies("checkpoint.copy_to", Path(target), own)


def _other_copies(key: str, target: Path, own: Path) -> Iterator[str]:
    """Yield that a folder has copies of another run than the one in `own`."""
    held = _held(target)
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
    own = None if run is None else _held(run)
    if own is None:  # of a user's own script, or its folder is lost
        return
    for problem in _other_copies("FOLDER", target, Path(own.checkpoint.folder)):
        raise ValueError(problem)
    write_text(target / CONFIG, own.text)


def folder_problems(config: Config) -> list[str]:
    """Return the reasons why a run cannot write to its folder, one line each."""
    folder, path = config.checkpoint.folder, Path(config.checkpoint.folder)
    if config.checkpoint.resume != "never":
        if checkpoints(path / CHECKPOINTS):
            return []
        if set_aside(path / CHECKPOINTS):
            back = f"megamix checkpoint ls {folder} says which of them are whole nevertheless"
            return [f"checkpoint.folder: all checkpoints in {folder} are damaged and set aside; {back}; {BEGIN_ANEW}"]
        if _ended_before_its_first_save(path, config):
            return []
    held = [name for name in _MARKS if (path / name).exists()]
    if held:
        return [
            f"checkpoint.folder: {folder} holds another run ({', '.join(held)}); write another folder, or move that run"
        ]
    if reason := unwritable(path):
        return [f"checkpoint.folder: {folder} cannot be made, {reason}; write another folder"]
    return []


def _ended_before_its_first_save(path: Path, config: Config) -> bool:
    """Return whether the folder holds this run, and nothing that a new start would overwrite."""
    held = _held(path)
    sections = ("model", "data", "optimizer", "training")
    same = all(getattr(held, name, None) == getattr(config, name) for name in sections)
    return same and not (path / WEIGHTS).exists()


def _held(path: Path) -> Config | None:
    """Return the configuration of the run that the folder holds, or None if it cannot be read."""
    try:
        return load_config(path / CONFIG, imports=False)
    except ConfigError:
        return None


def claim(config: Config) -> None:
    """Make the run's folder and write the effective configuration into it."""
    folder = Path(config.checkpoint.folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name in _WRITTEN_ASIDE:
        remove_asides(folder, name)
    write_text(folder / CONFIG, config.text)


def check(config: Config, tell: Callable[[str], None] = lambda line: None, *, starts: bool = False) -> str:
    """Refuse a job that cannot be trained; write nothing. Return the message that there are no problems.

    `tell` gets a line for each setting that is allowed but probably a mistake. `starts`: this process is a rank that is
    about to meet the others.
    Raises: ConfigError with everything that is wrong with the ranks (WORLD_SIZE, RANK, LOCAL_WORLD_SIZE, LOCAL_RANK),
    the files and the folder.
    """
    what = "a number of ranks, 1 or more"
    world_size = _told("WORLD_SIZE", 1, range(1, 10**9), what)
    local_size = _told("LOCAL_WORLD_SIZE", world_size, range(1, 10**9), what)  # ranks that share this machine's cores
    for variable, size in (("RANK", world_size), ("LOCAL_RANK", local_size)):
        _told(variable, 0, range(size), f"from 0 to {size - 1}, as there are {size} rank(s)")
    if problems := job_problems(config, world_size):
        raise ConfigError(problems, "job")
    unset = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if starts and name not in os.environ]
    if unset and world_size > 1:
        fix = "start the ranks by launch/pretrain.sh or torchrun, which set it, or unset WORLD_SIZE for one rank"
        raise ConfigError([f"{', '.join(unset)}: not set, though WORLD_SIZE is {world_size}; {fix}"], "environment")
    doubts = () if starts else _optimizer_doubts(config)  # a start logs these lines later
    for line in (*data_warnings(config, world_size), *_loss_doubts(config), *doubts):
        tell(f"note: {line}")
    return f"no problems; {world_size} rank{'s' if world_size > 1 else ''}"


def _told(variable: str, default: int, numbers: range, what: str) -> int:
    """Return the number in an environment variable, or its default."""
    text = os.environ.get(variable, str(default))
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) not in numbers:
        fix = "start the ranks by launch/pretrain.sh, which sets it, or unset it for one rank"
        raise ConfigError([f"{variable}: got {short(text)}, must be {what}; {fix}"], "environment")
    return int(text)


def job_problems(config: Config, world_size: int) -> list[str]:
    """Return every problem of ranks, files and folder, one line each: field, value, fix."""
    problems = [*check_world_size(config, world_size), *file_problems(config)]
    for package, without in (("tensorboard", "write tensorboard = false"), ("wandb", "leave [metrics.wandb] out")):
        if getattr(config.metrics, package) and importlib.util.find_spec(package) is None:
            fix = f"{installing(package)}, or {without}"
            problems.append(f"metrics.{package}: is set, but the package {package} is not installed; {fix}")
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG", WORKSPACES[0])
    if config.training.deterministic and workspace not in WORKSPACES:
        problems.append(
            f"training.deterministic: is true, but CUBLAS_WORKSPACE_CONFIG is {short(workspace)}, with which cuBLAS "
            f"adds in any order; set it to {' or '.join(WORKSPACES)}, unset it, or write deterministic = false"
        )
    return [
        *problems,
        *_division_problems(config),
        *_resume_problems(config),
        *folder_problems(config),
        *copy_problems(config),
    ]


def file_problems(config: Config) -> list[str]:
    """Return every problem of the files that a job reads. It uses only the sections [data] and [model]."""
    tokenizer = config.data.tokenizer
    about_tokenizer = () if tokenizer is None else _tokenizer_problems(tokenizer, config.model.vocab_size)
    return [*data_problems(config), *about_tokenizer]


def _division_problems(config: Config) -> Iterator[str]:
    """Yield why ranks cannot divide a model of a plugin's family, or a model along a plugin's axis, or compute its
    products in FP8.

    Only the plugin's code and the model can tell, and these import torch.
    """
    fp8 = config.precision.fp8
    sizes = axis_sizes(config.parallelism)
    shared = {name for name, size in sizes.items() if size > 1} - {"pp", "replicas", "dp"}
    if shared - {*OWN_AXES} or (shared and config.model.family != "transformer") or fp8.recipe != "none":
        from megamix.comm.collectives import ShapesAlone
        from megamix.comm.topology import Topology
        from megamix.model.fp8 import use_fp8
        from megamix.parallel.build import divide_work, outline

        plain = config.model.model_copy(update={"compile": False})
        ep_size = config.parallelism.ep_size  # as many data-parallel ranks are enough for it
        topology = Topology.place(0, dp=ep_size, **sizes, ep_size=ep_size)
        try:
            model, _ = outline(plain, config.parallelism, topology)
            use_fp8(model, fp8)
            divide_work(model, config.parallelism, topology, ShapesAlone)
        except ValueError as error:
            yield str(error)


def _loss_doubts(config: Config) -> Iterator[str]:
    """Yield a line if a config.json asks for a loss of its router, which a model of transformers adds by itself."""
    theirs = getattr(config.model, "theirs", None)
    if getattr(theirs, "output_router_logits", False):
        yield (
            f"model.folder: config.json asks for an auxiliary loss of its router (output_router_logits = true), and a "
            f"job adds none: its router_aux_loss_coef {getattr(theirs, 'router_aux_loss_coef', 0.0)} is not read"
        )


def _optimizer_doubts(config: Config) -> Iterator[str]:
    """Yield the lines that a start would log about the optimizer's patterns.

    If there are patterns, they are compared with the names of the model's parameters, which imports torch.
    """
    section = config.optimizer
    own = getattr(section, section.name)
    if section.groups or any(getattr(own, key, ()) for key in ("matrix", "adamw")):
        from megamix.builders.objects import build_optimizer
        from megamix.model.family import family_of

        family = family_of(config.model)
        yield from build_optimizer(config).doubts(family.sketch(config.model), family.shapes(config.model))


def _tokenizer_problems(path: str, vocab_size: int) -> Iterator[str]:
    # The sample at the end needs the tokenizer. A run must not train for days and then fail there.
    try:
        if (known := open_tokenizer(Path(path)).vocab_size) > vocab_size:
            yield (
                f"data.tokenizer: {path} knows {known} tokens, more than model.vocab_size {vocab_size}; write "
                f"vocab_size = {known}, or the path of the tokenizer that made the tokens"
            )
    except ValueError as error:
        yield f"data.tokenizer: {error}; or leave the key out"


def _resume_problems(config: Config) -> Iterator[str]:
    resume, own = config.checkpoint.resume, checkpoint_folder(config)
    if resume in RESUME_WORDS:
        return
    # A run that has saved goes on from its own checkpoints, even if the checkpoint that it began from is gone.
    held = _held(own.parent) if checkpoints(own) else None
    began_there = held is not None and Path(held.checkpoint.resume).resolve() == Path(resume).resolve()
    if Path(resume).resolve().parent == own.resolve():
        yield (
            f"checkpoint.resume: {resume} is this run's own; write auto. To go back to it, first move the newer "
            f"checkpoints out of {own}"
        )
    elif not began_there and not (Path(resume) / MANIFEST).is_file():
        yield (
            f"checkpoint.resume: {resume} is no checkpoint; write auto, never or a path such as "
            "runs/my-run/checkpoints/step_00001000"
        )
