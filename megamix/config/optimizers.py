"""The sections of the update: what every optimizer has, and the keys of each.

The text under a field is the description that `megamix config --schema` prints.
"""

from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, NonNegativeFloat, PositiveFloat, PositiveInt

from megamix.config.choices import ChosenTable, OneOf
from megamix.config.model_and_data import Share, Text
from megamix.plugins import OPTIMIZERS, Section


class OptimizerGroup(Section):
    """Parameters whose names match a pattern, with a learning rate and weight decay of their own."""

    pattern: Annotated[Text, Field(examples=["*.bias"])]
    """Shell-style pattern (fnmatch) on the parameter's full name; the first group that matches wins."""
    lr_factor: NonNegativeFloat = 1.0
    """Multiplies the scheduled learning rate."""
    weight_decay: NonNegativeFloat | None = None
    """Weight decay of the group. Not set: optimizer.weight_decay, and 0 for one-dimensional parameters."""


class AdamWConfig(Section):
    """Adam with decoupled weight decay."""

    betas: Annotated[tuple[Share, Share], Field(strict=False)] = (0.9, 0.95)
    """Decay rates of the first and second moment, each in [0, 1)."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    state_dtype: Literal["fp32", "bf16"] = "fp32"
    """Of both moments. In BF16 the update moves 20 bytes a parameter for 28; a moment whose decay rate is over 0.984 is
    rounded by chance, right on average."""


class NAGConfig(Section):
    """SGD with Nesterov momentum."""

    momentum: Share = 0.9
    """In [0, 1). 0: plain SGD."""
    momentum_form: Literal["gradient", "velocity"] = "gradient"
    """What the momentum adds up. gradient: gradients, as torch's SGD. velocity: steps, as MXNet's. They differ when the
    learning rate changes."""
    decoupled_weight_decay: bool = False
    """Whether weight decay shrinks the weights, as in AdamW, instead of entering the gradient."""
    state_dtype: Literal["fp32", "bf16"] = "fp32"
    """Of the momentum. In BF16 the update moves 16 bytes a parameter for 20; momentum is at most 0.984 then."""


class MuonConfig(AdamWConfig):
    """Muon for matrices; for tables, norms and biases AdamW, whose keys are here, too."""

    momentum: Share = 0.95
    """Of the matrices' momentum, in [0, 1)."""
    nesterov: bool = True
    """Whether a direction is taken from one step ahead of the momentum."""
    ns_steps: Annotated[PositiveInt, Field(le=100)] = 5
    """Turns of Newton and Schulz's iteration, which makes the momentum orthogonal."""
    ns_coefficients: Annotated[tuple[FiniteFloat, FiniteFloat, FiniteFloat], Field(strict=False)] = (
        3.4445, -4.7750, 2.0315,
    )  # fmt: skip
    """Of its polynomial a x + b x^3 + c x^5."""
    ns_dtype: Literal["bf16", "fp32"] = "bf16"
    """In which it multiplies, and in which matrices travel between ranks."""
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """What a matrix's direction is multiplied by, so that one lr fits every width. match_rms_adamw: 0.2 times the root
    of the longer side, for which AdamW's lr fits. original: the root of rows / columns, at least 1."""
    adamw_lr_factor: NonNegativeFloat = 1.0
    """Multiplies the learning rate of what AdamW moves."""
    batched: bool = False
    """Whether matrices of one shape are multiplied together: in fewer calls, and with other bits."""
    matrix: Annotated[tuple[Text, ...], Field(strict=False, examples=[["head.weight"]])] = ()
    """Patterns of parameters that are matrices, though the model calls them tables."""
    adamw: Annotated[tuple[Text, ...], Field(strict=False, examples=[["*.router.weight"]])] = ()
    """Patterns of parameters that AdamW moves, though they are matrices."""


OPTIMIZERS.sections |= {"adamw": AdamWConfig, "nag": NAGConfig, "muon": MuonConfig}


class OptimizerConfig(Section):
    """The update of the FP32 master weights."""

    name: Annotated[str, OneOf(OPTIMIZERS)] = "adamw"
    """adamw, nag (SGD with Nesterov momentum), or muon (matrices by orthogonalised momentum, the rest by AdamW); its
    own keys are in the table of the same name."""
    lr: Annotated[PositiveFloat, Field(examples=[3e-4])]
    """Peak learning rate."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the decay; at most lr."""
    weight_decay: NonNegativeFloat = 0.1
    """Weight decay of parameters with two or more dimensions."""
    clip_grad: NonNegativeFloat = 1.0
    """Largest global gradient norm; a longer gradient is scaled down to it. 0: no clipping."""
    groups: Annotated[
        tuple[OptimizerGroup, ...], Field(strict=False, examples=[[{"pattern": "*.bias", "weight_decay": 0.0}]])
    ] = ()
    """Exceptions by parameter name; the first match wins. Empty: all alike, but no decay on 1-d parameters."""
    compile: bool = True
    """Whether torch.compile fuses the update. With false, or without a working compiler, torch's own kernels run."""


OPTIMIZERS.reserved = OptimizerConfig.model_fields
OPTIMIZER = ChosenTable(OPTIMIZERS, OptimizerConfig, "name", beneath=True)
