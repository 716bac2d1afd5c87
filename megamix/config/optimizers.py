"""The sections of the update: what every optimizer has, and the keys of each.

The text under a field is the description that `megamix config --schema` prints.
"""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megamix.config.choices import ChosenTable, OneOf, left_out
from megamix.config.model_and_data import Text
from megamix.plugins import OPTIMIZERS, Section
from megamix.settings.limits import Finite
from megamix.settings.optimizers import AdamWSettings, GroupSettings, MuonSettings, NAGSettings


class OptimizerGroup(Section, GroupSettings):  # type: ignore[misc]  # as frozen as its settings, by pydantic
    """Parameters whose names match a pattern, with settings of their own."""

    pattern: Annotated[Text, Field(examples=["*.bias"])]


class AdamWConfig(Section, AdamWSettings):  # type: ignore[misc]  # likewise
    """Adam with decoupled weight decay."""

    state_dtype: Literal["fp32", "bf16"] = "fp32"
    """Format of both moments. In BF16 the update moves 20 bytes a parameter, not 28; moments with decay rates over
    0.984 are rounded stochastically."""


class NAGConfig(Section, NAGSettings):  # type: ignore[misc]  # likewise
    """SGD with momentum, Nesterov's or the classical one."""

    state_dtype: Literal["fp32", "bf16"] = "fp32"
    """Format of the momentum. In BF16 the update moves 16 bytes a parameter, not 20; momentum is at most 0.984."""


class MuonConfig(AdamWConfig, MuonSettings):  # type: ignore[misc]  # likewise
    """Muon for matrices; for tables, norms and biases AdamW, whose keys this table has, too."""

    ns_dtype: Literal["bf16", "fp32"] = "bf16"
    """Format of the iteration's products, and of matrices between ranks."""
    matrix: Annotated[tuple[Text, ...], Field(strict=False, examples=[["head.weight"]])] = ()
    """Patterns of parameters that count as matrices, though the model calls them tables."""
    adamw: Annotated[tuple[Text, ...], Field(strict=False, examples=[["*.router.weight"]])] = ()
    """Patterns of matrices that AdamW moves."""


class SettingSchedule(Section):
    """A setting as a function of applied updates: from start to its own value, then to end."""

    start: Finite | None = None
    """Value at the first update. Not set: its own."""
    warmup_steps: NonNegativeInt = 0
    """Updates from start to its own value."""
    end: Finite | None = None
    """Value behind the last update. Not set: its own."""
    decay_steps: PositiveInt | None = None
    """The run's last updates, in which it moves to end. Not set: all after the warm-up."""
    curve: Literal["linear", "cosine"] = "linear"
    """Shape of both ways."""


class OptimizerSchedules(Section):
    """Settings of the optimizer that follow the updates, each a table as below. A group's own weight decay follows in
    proportion; its other settings stay."""

    weight_decay: SettingSchedule | None = None
    """Schedule of optimizer.weight_decay."""
    momentum: SettingSchedule | None = None
    """Schedule of nag's or muon's momentum."""
    beta1: SettingSchedule | None = None
    """Schedule of the first of adamw's or muon's betas."""
    beta2: SettingSchedule | None = None
    """Schedule of the second of the betas."""


SHARES = ("momentum", "beta1", "beta2")  # those that are less than 1


OPTIMIZERS.sections |= {"adamw": AdamWConfig, "nag": NAGConfig, "muon": MuonConfig}


class OptimizerConfig(Section):
    """The update of the FP32 master weights."""

    name: Annotated[str, OneOf(OPTIMIZERS)] = "adamw"
    """nag is SGD with Nesterov momentum, muon moves matrices by orthogonalised momentum, the rest by AdamW. Its own
    keys are in the table of that name."""
    lr: Annotated[PositiveFloat, Field(examples=[3e-4])]
    """Peak learning rate."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the decay; at most lr."""
    weight_decay: NonNegativeFloat = 0.1
    """Weight decay of parameters with two dimensions or more."""
    clip_grad: NonNegativeFloat = 1.0
    """Largest global gradient norm; larger gradients are scaled down. 0: no clipping."""
    groups: Annotated[
        tuple[OptimizerGroup, ...], Field(strict=False, examples=[[{"pattern": "*.bias", "weight_decay": 0.0}]])
    ] = ()
    """Exceptions by parameter name."""
    schedules: OptimizerSchedules = left_out()
    """Settings that follow the updates."""
    compile: bool = True
    """Whether torch.compile fuses the update; else, and without a working compiler, torch's kernels run."""


OPTIMIZERS.reserved = OptimizerConfig.model_fields
OPTIMIZER = ChosenTable(OPTIMIZERS, OptimizerConfig, "name", beneath=True)
