"""The least memory that a rank holds, by arithmetic on the configuration. Each start first compares it with the memory
of this machine.

torch is imported only for a job that needs much memory or whose family is a plugin's. `megamix plan` counts exactly.
"""

import os
from typing import Any

from megamix.config import Config, ConfigError, ModelConfig
from megamix.machine import has_gpu, memory_for_each
from megamix.model import sizes

_GIB = 2**30
STATES = {"adamw": 2, "nag": 1, "muon": 1}  # fewest states of a parameter; 0 for a plugin's optimizer


def amount(size: float) -> str:
    """Return a number of bytes in the unit that leaves it readable."""
    return f"{size / _GIB:,.2f} GiB" if abs(size) >= _GIB else f"{size / 2**20:,.2f} MiB"


def least_params(config: Config) -> int:
    """Return the number of the model's parameters; of the built-in family those in matrices and tables of tokens."""
    if isinstance(config.model, ModelConfig):
        return sizes.fewest_params(config.model)
    from megamix.model.family import parameter_count

    try:
        return parameter_count(config.model)
    except ValueError as error:
        raise ConfigError([str(error)], "job") from None


def least_held(config: Config, world_size: int) -> dict[str, float]:
    """Return the bytes that a rank holds between steps, by category as in `MemoryPlan.held`.

    They are never more than the true bytes. If ranks hold different amounts, the result is the mean.
    Raises: ConfigError for a model of another family that cannot be built.
    """
    section, optimizer = config.parallelism, config.optimizer.name
    own: Any = getattr(config.optimizer, optimizer)
    divided, params = section.tp_size * section.pp_size, least_params(config)
    built_in = isinstance(config.model, ModelConfig)
    part = sizes.rank_params(config.model, divided, section.ep_size) if built_in else params / divided
    owned = params * section.replicas / world_size
    half = 4 if config.precision.dtype == "fp32" else 2
    state = 2 if getattr(own, "state_dtype", "fp32") == "bf16" else 4
    states: float = STATES.get(optimizer, 0)
    if optimizer == "muon" and built_in and not own.matrix:
        states += sizes.table_params(config.model) / params  # AdamW's second moments
    return {
        "half parameters": 0 if section.shard == "parameters" else part * half,
        "half gradients": part * (4 if config.precision.grad_dtype == "fp32" else half) * (section.shard == "states"),
        "FP32 masters": owned * 4,
        "FP32 average of the weights": owned * 4 if config.training.average else 0,
        "optimizer states": owned * state * states,
    }


def memory_here(config: Config) -> tuple[dict[str, float], float, str]:
    """Return what each rank that this environment starts holds at least, the bytes that it may take, and what sets
    that limit.

    Raises: as `least_held`.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    held = least_held(config, world_size)
    limit, what = memory_for_each(int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size))))
    if sum(held.values()) > min(limit, _GIB) and has_gpu():
        import torch

        limit, what = float(torch.cuda.get_device_properties(0).total_memory), "its GPU"
    return held, limit, what


def memory_problem(config: Config) -> str | None:
    """Return why the ranks that this environment starts here cannot hold the job; None if they probably can.

    Raises: as `least_held`.
    """
    held, limit, what = memory_here(config)
    need = sum(held.values())
    if need <= limit:
        return None
    table = ", ".join(f"{name} {size / _GIB:,.2f} GiB" for name, size in held.items() if size)
    return (
        f"memory: a rank holds {need / _GIB:,.2f} GiB or more between steps ({table}), and of {what} it has "
        f"{limit / _GIB:,.2f} GiB; start more ranks, set parallelism.shard, tp_size or pp_size, or make the model "
        f"smaller: megamix plan CONFIG --world {os.environ.get('WORLD_SIZE', '1')} shows what a rank needs"
    )
