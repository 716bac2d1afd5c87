"""Problems of a job that show before any time is spent: of its ranks, files and folder. It imports no torch."""

import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megamix.base.axes import OWN_AXES
from megamix.base.durable import unwritable
from megamix.base.machine import WORKSPACES
from megamix.checkpoint.folder import CHECKPOINTS, MANIFEST, checkpoints, set_aside
from megamix.config import (
    Config,
    ConfigError,
    DecoderConfig,
    FP8Config,
    ParallelismConfig,
    axis_sizes,
    check_world_size,
    config_of_run,
    data_parallel_size,
    grad_accum_steps,
    ranks_along,
)
from megamix.config.problems import short
from megamix.config.sections import CheckpointConfig
from megamix.config.toml_text import value_text
from megamix.data import installing
from megamix.launch.run_folder import BEGIN_ANEW, CONFIG, MARKS, RESUME_WORDS, WEIGHTS, copy_problems, in_memory
from megamix.train.corpus import JobCorpus


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
    corpus = JobCorpus(config.data, config.model)
    doubts = () if starts else _optimizer_doubts(config)  # a start logs these lines later
    for line in (*_setting_doubts(config, world_size), *corpus.warnings(), *_loss_doubts(config.model), *doubts):
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
    problems = [*check_world_size(config, world_size), *JobCorpus(config.data, config.model).problems()]
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
        *_division_problems(config.model, config.parallelism, config.precision.fp8),
        *_resume_problems(config.checkpoint),
        *folder_problems(config),
        *copy_problems(config.checkpoint),
    ]


def folder_problems(config: Config) -> list[str]:
    """Return the reasons why a run cannot write to its folder, one line each."""
    folder, path = config.checkpoint.folder, Path(config.checkpoint.folder)
    if config.checkpoint.resume != "never":
        if checkpoints(path / CHECKPOINTS) or in_memory(config.checkpoint):
            return []
        if set_aside(path / CHECKPOINTS):
            back = f"megamix checkpoint ls {folder} says which of them are whole nevertheless"
            return [f"checkpoint.folder: all checkpoints in {folder} are damaged and set aside; {back}; {BEGIN_ANEW}"]
        if _ended_before_its_first_save(path, config):
            return []
    held = [name for name in MARKS if (path / name).exists()]
    if held:
        return [
            f"checkpoint.folder: {folder} holds another run ({', '.join(held)}); write another folder, or move that run"
        ]
    if reason := unwritable(path):
        return [f"checkpoint.folder: {folder} cannot be made, {reason}; write another folder"]
    return []


def _ended_before_its_first_save(path: Path, config: Config) -> bool:
    """Return whether the folder holds this run, and nothing that a new start would overwrite."""
    held = config_of_run(path / CONFIG)
    sections = ("model", "data", "optimizer", "training")
    same = all(getattr(held, name, None) == getattr(config, name) for name in sections)
    return same and not (path / WEIGHTS).exists()


def _division_problems(model: DecoderConfig, parallelism: ParallelismConfig, fp8: FP8Config | None) -> Iterator[str]:
    """Yield why ranks cannot divide a model of a plugin's family, or a model along a plugin's axis, or compute its
    products in FP8.

    Only the plugin's code and the model can tell, and these import torch.
    """
    sizes = axis_sizes(parallelism)
    shared = {name for name, size in sizes.items() if size > 1} - {"pp", "replicas", "dp"}
    if shared - {*OWN_AXES} or (shared and model.family != "transformer") or fp8:
        from megamix.comm.collectives import ShapesAlone
        from megamix.comm.topology import Topology
        from megamix.model.fp8 import use_fp8
        from megamix.parallel.build import divide_work, outline

        plain = model.model_copy(update={"compile": False})
        ep_size = ranks_along(parallelism, "ep")  # as many data-parallel ranks are enough for it
        topology = Topology.place(0, dp=ep_size, **sizes, ep_size=ep_size)
        try:
            module, _ = outline(plain, parallelism, topology)
            if fp8:
                use_fp8(module, fp8)
            divide_work(module, parallelism, topology, ShapesAlone)
        except ValueError as error:
            yield str(error)


def _setting_doubts(config: Config, world_size: int) -> Iterator[str]:
    """Yield a line for a static loss scale, or an accumulation by the owner, that trains but is rarely intended."""
    scale: Any = config.precision.loss_scale
    if config.precision.dtype == "fp16" and scale.rule == "static" and scale.init_scale > 2**16:
        yield (
            f'precision.loss_scale.init_scale: {scale.init_scale:.0f} never falls with rule = "static", and FP16 '
            'ends at 65504: every step may overflow and be skipped; write init_scale = 1024.0, or rule = "dynamic"'
        )
    if config.parallelism.accumulate == "owner":
        if grad_accum_steps(config, data_parallel_size(config.parallelism, world_size)) == 1:
            yield 'parallelism.accumulate: "owner" does nothing with one micro-batch a step; write accumulate = "local"'
        elif config.parallelism.shard == "states":
            yield (
                'parallelism.accumulate: with shard = "states" every rank keeps its gradients, and "owner" comes on '
                "top, with FP32 sums and a reduction of each micro-batch; "
                'write accumulate = "local", or shard = "gradients"'
            )


def _loss_doubts(model: DecoderConfig) -> Iterator[str]:
    """Yield a line if a config.json asks for a loss of its router, which a model of transformers adds by itself."""
    theirs = getattr(model, "theirs", None)
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
        from megamix.model.family import family_of
        from megamix.train.objects import build_optimizer

        family = family_of(config.model)
        optimizer = build_optimizer(config)
        yield from optimizer.warnings(family.sketch(config.model), family.shapes(config.model))


def _resume_problems(section: CheckpointConfig) -> Iterator[str]:
    resume, own = section.resume, Path(section.folder, CHECKPOINTS)
    if resume in RESUME_WORDS:
        if section.begin_anew:
            what = f"got {value_text(section.begin_anew)}, but resume is {value_text(resume)}, no checkpoint's path"
            yield f"checkpoint.begin_anew: {what}; write that of another run's in resume, or leave begin_anew out"
        return
    # A run that has saved goes on from its own checkpoints, even if the checkpoint that it began from is gone.
    held = config_of_run(own.parent / CONFIG) if checkpoints(own) else None
    began_there = held is not None and Path(held.checkpoint.resume).resolve() == Path(resume).resolve()
    if Path(resume).resolve().parent == own.resolve():
        yield (
            f"checkpoint.resume: {resume} is this run's own; write auto, or another checkpoint.folder to begin a new "
            f"run. To go back to it, first move the newer checkpoints out of {own}"
        )
    elif not began_there and not (Path(resume) / MANIFEST).is_file():
        named = checkpoints(Path(resume, CHECKPOINTS)) or [Path("runs/my-run/checkpoints/step_00001000")]
        yield f"checkpoint.resume: {resume} is no checkpoint; write auto, never or a path such as {named[0]}"
