"""The least memory that a rank holds, by arithmetic on the configuration. Each start first compares it with the memory
of this machine.

torch is imported only for a job that needs much memory or whose family is a plugin's. `megamix plan` counts exactly.
"""

import os

from megamix.config import Config, ConfigError, ModelConfig
from megamix.machine import has_gpu, memory_for_each
from megamix.model import sizes

_GIB = 2**30
_STATES = {"adamw": 2, "nag": 1, "muon": 1}  # fewest states of a parameter; 0 for a plugin's optimizer


def least_held(config: Config, world_size: int) -> dict[str, float]:
    """Return the bytes that a rank holds between steps, by category as in `MemoryPlan.held`.

    They are never more than the true bytes. If ranks hold different amounts, the result is the mean.
    Raises: ConfigError for a model of another family that cannot be built.
    """
    section, optimizer = config.parallelism, config.optimizer
    divided = section.tp_size * section.pp_size
    if isinstance(config.model, ModelConfig):
        params = sizes.fewest_params(config.model)
        part = sizes.rank_params(config.model, divided, section.ep_size)
    else:
        from megamix.model.family import parameter_count

        try:
            params = parameter_count(config.model)
            part = params / divided
        except ValueError as error:
            raise ConfigError([str(error)], "job") from None
    owned = params * section.replicas / world_size
    half = 4 if config.precision.dtype == "fp32" else 2
    state = 2 if getattr(getattr(optimizer, optimizer.name), "state_dtype", "fp32") == "bf16" else 4
    return {
        "half parameters": 0 if section.shard == "parameters" else part * half,
        "half gradients": part * (4 if config.precision.grad_dtype == "fp32" else half) * (section.shard == "states"),
        "FP32 masters": owned * 4,
        "FP32 average of the weights": owned * 4 if config.training.average else 0,
        "optimizer states": owned * state * _STATES.get(optimizer.name, 0),
    }


def memory_problem(config: Config) -> str | None:
    """Return why the ranks that this environment starts here cannot hold the job; None if they probably can.

    Raises: as `least_held`.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    held = least_held(config, world_size)
    need = sum(held.values())
    limit, what = memory_for_each(int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size))))
    if need > min(limit, _GIB) and has_gpu():
        import torch

        limit, what = float(torch.cuda.get_device_properties(0).total_memory), "its GPU"
    if need <= limit:
        return None
    table = ", ".join(f"{name} {size / _GIB:,.2f} GiB" for name, size in held.items() if size)
    return (
        f"memory: a rank holds {need / _GIB:,.2f} GiB or more between steps ({table}), and of {what} it has "
        f"{limit / _GIB:,.2f} GiB; start more ranks, set parallelism.shard, tp_size or pp_size, or make the model "
        f"smaller: megamix plan CONFIG --world {world_size} shows what a rank needs"
    )
