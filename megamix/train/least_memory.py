"""The least memory that a rank holds, by arithmetic on sections of the configuration. Each start first compares it with
the memory of this machine.

torch is imported only for a family that is a plugin's. `megamix plan` counts exactly.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megamix.checkpoint.slots import number_of_slots
from megamix.config import (
    ConfigError,
    DecoderConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelismConfig,
    PrecisionConfig,
    ranks_along,
)
from megamix.config.sections import CheckpointConfig
from megamix.model import sizes

GIB = 2**30
OWNED = ("FP32 masters", "FP32 average of the weights", "optimizer states")  # what a checkpoint has of a rank
STATES = {"adamw": 2, "nag": 1, "muon": 1}  # fewest states of a parameter; 0 for a plugin's optimizer


def amount(size: float) -> str:
    """Return a number of bytes in the unit that leaves it readable."""
    return f"{size / GIB:,.2f} GiB" if abs(size) >= GIB else f"{size / 2**20:,.2f} MiB"


def mirrored(held: Mapping[str, float], section: CheckpointConfig) -> float:
    """Return the most bytes that checkpoint.mirror takes of shared memory for a rank that holds so much, by category.
    With several machines and one replica the next machine takes as much again.
    """
    # A restart keeps the slot that it has loaded until two newer ones are whole.
    return (number_of_slots(async_save=section.async_save) + 1) * sum(held[name] for name in OWNED)


@dataclass
class LeastHeld:
    """Counts a job's parameters, and the bytes that a rank holds between steps; never more than the true numbers.

    `averages`: whether the job keeps an average of its weights. `params`: the number of the model's parameters; of the
    built-in family those in matrices and tables of tokens. Raises: ConfigError for a model of another family that
    cannot be built.
    """

    model: DecoderConfig
    optimizer: OptimizerConfig
    precision: PrecisionConfig
    parallelism: ParallelismConfig
    averages: bool

    @cached_property
    def params(self) -> int:
        if isinstance(self.model, ModelConfig):
            return sizes.fewest_params(self.model)
        from megamix.model.family import parameter_count

        try:
            return parameter_count(self.model)
        except ValueError as error:
            raise ConfigError([str(error)], "job") from None

    def by_category(self, world_size: int, *, grads_stay: bool = False) -> dict[str, float]:
        """Return the bytes by category as in `MemoryPlan.held`. If ranks hold different amounts, they are the mean.
        `grads_stay`: gradients count with any `shard`, as a step keeps them from micro-batch to micro-batch.
        """
        section, optimizer, params = self.parallelism, self.optimizer.name, self.params
        own: Any = getattr(self.optimizer, optimizer)
        divided = ranks_along(section, "tp") * ranks_along(section, "pp")
        built_in = self.model if isinstance(self.model, ModelConfig) else None
        part = sizes.rank_params(built_in, divided, ranks_along(section, "ep")) if built_in else params / divided
        owned = params * section.replicas / world_size
        half = 4 if self.precision.dtype == "fp32" else 2
        grad = 4 if self.precision.grad_dtype == "fp32" else half
        state = 2 if getattr(own, "state_dtype", "fp32") == "bf16" else 4
        states: float = STATES.get(optimizer, 0)
        if optimizer == "muon" and built_in and not own.matrix:
            states += sizes.table_params(built_in) / params  # AdamW's second moments
        return {
            "half parameters": 0 if section.shard == "parameters" else part * half,
            "half gradients": part * grad * (grads_stay or section.shard == "states"),
            "FP32 masters": owned * 4,
            "FP32 average of the weights": owned * 4 if self.averages else 0,
            "optimizer states": owned * state * states,
        }
