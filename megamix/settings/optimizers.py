"""Settings of the optimizers, except the formats, which a job names and of which a program gives torch's dtype."""

from dataclasses import dataclass, fields
from typing import Annotated, Literal

from megamix.settings.limits import Finite, Limits, NotNegative, NotNegativeByUpdate, Share, ShareByUpdate

Betas = Annotated[tuple[ShareByUpdate, ShareByUpdate], Limits()]
Eps = Annotated[float, Limits(ge=2.0**-126)]


@dataclass(frozen=True, kw_only=True)
class GroupSettings:
    """Declares the settings of a group of parameters."""

    pattern: str
    """Shell-style pattern (fnmatch) on the parameter's full name; the first match wins."""
    lr_factor: NotNegativeByUpdate = 1.0
    """Multiplies the scheduled learning rate. 0: frozen; weights and states stay, and the gradient counts nowhere."""
    weight_decay: NotNegativeByUpdate | None = None
    """Weight decay. Not set: the optimizer's, and 0 for one-dimensional parameters."""
    betas: Betas | None = None
    """Decay rates of the moments, if the optimizer has them. Not set: the optimizer's."""
    eps: Eps | None = None
    """The eps, if the optimizer has it. Not set: the optimizer's."""
    momentum: ShareByUpdate | None = None
    """Momentum, if the optimizer has it. Not set: the optimizer's."""


# Settings of a group that only some optimizers have.
OF_SOME_OPTIMIZERS = sorted({one.name for one in fields(GroupSettings)} - {"pattern", "lr_factor", "weight_decay"})


@dataclass(frozen=True, kw_only=True)
class AdamWSettings:
    """Declares the settings of AdamW."""

    betas: Betas = (0.9, 0.95)
    """Decay rates of the first and second moment, each in [0, 1)."""
    eps: Eps = 1e-8
    """Added to the root of the second moment. Below FP32's smallest normal number, where all gradients were zero, the
    step would be 0/0."""


@dataclass(frozen=True, kw_only=True)
class NAGSettings:
    """Declares the settings of NAG."""

    momentum: ShareByUpdate = 0.9
    """Factor of the momentum at each update, in [0, 1). 0: plain SGD, without a state."""
    nesterov: bool = True
    """Whether a step is taken from one update ahead of the momentum."""
    momentum_form: Literal["gradient", "velocity"] = "gradient"
    """What momentum adds up: gradients, as torch's SGD, or steps, as MXNet's. They differ when the learning rate
    changes."""
    decoupled_weight_decay: bool = False
    """Whether weight decay shrinks the weights, as AdamW's, instead of entering the gradient."""


Triple = Annotated[tuple[Finite, Finite, Finite], Limits()]


@dataclass(frozen=True, kw_only=True)
class MuonSettings(AdamWSettings):
    """Declares the settings of Muon."""

    momentum: ShareByUpdate = 0.95
    """Factor of the matrices' momentum at each update, in [0, 1)."""
    nesterov: bool = True
    """Whether a direction is taken from one step ahead of the momentum."""
    ns_steps: Annotated[int, Limits(ge=1, le=100)] = 5
    """Turns of Newton and Schulz's iteration, which makes the momentum orthogonal."""
    ns_coefficients: Triple = (3.4445, -4.7750, 2.0315)
    """Coefficients of its polynomial a x + b x^3 + c x^5."""  # Jordan's: they take singular values to about [0.7, 1.2]
    ns_table: Annotated[tuple[Triple, ...], Limits()] = ()
    """Such coefficients for each turn, in place of ns_coefficients; the last one repeats."""
    ns_eps: NotNegative = 0.0
    """Added to the Frobenius norm that divides a matrix before the iteration."""
    equal_rows: bool = False
    """Whether the rows of a matrix get one norm before the iteration, as in MuonEq."""
    exact_norm: bool = False
    """Whether a direction gets the Frobenius norm of an orthogonal matrix after the iteration, as in Muon+."""
    row_beta2: Share | None = None
    """Decay rate of the second moments of a direction's rows, or columns if there are more, that divide it, as in
    NorMuon. Not set: none."""
    adjust_lr: Literal["match_rms_adamw", "original", "spectral_norm"] = "match_rms_adamw"
    """Factor of a direction, so that one lr fits every width: 0.2 times the root of the longer side, for which AdamW's
    lr fits; the root of rows/columns, at least 1; or that root alone."""
    # The names are torch.optim.Muon's and Dion's, the rules Liu's, Jordan's, and Bernstein and Newhouse's.
    cautious_weight_decay: bool = False
    """Whether only elements decay that the step brings nearer to zero."""
    adamw_lr_factor: NotNegative = 1.0
    """Multiplies the learning rate of AdamW's part."""
