"""Settings of the engine."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from megamix.comm.collectives import MakeCollectives, make_collectives
from megamix.comm.topology import Axis, Topology
from megamix.mixed_precision.loss_scale import LossScale
from megamix.settings.limits import check

# The format in which gradients travel to their owner, and the format of the owner's sum: half and half, half and FP32,
# or FP32 and FP32.
ReduceDtype = Literal["half", "half_fp32_sum", "fp32"]

# The tensors that ranks divide among them. "states": masters and optimizer states (ZeRO-1). "gradients": also the
# gradients, once they are summed (ZeRO-2). "parameters": also the half parameters, while their unit does not compute
# (ZeRO-3).
Shard = Literal["states", "gradients", "parameters"]


@dataclass(frozen=True, slots=True)
class Precision:
    """Holds the dtypes of a step and the loss scale."""

    dtype: torch.dtype = torch.bfloat16  # parameters, activations and gradients: FP16, BF16, or FP32 as a reference
    grad_dtype: torch.dtype | None = None  # dtype of the sums over micro-batches; None: `dtype`
    loss_scale: LossScale | None = None  # FP16 needs one, static or dynamic
    reduce_dtype: ReduceDtype | None = None  # None: "fp32" for FP32 gradients, else "half"

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise ValueError(f"precision.dtype must be torch.float16, bfloat16 or float32, got {self.dtype!r}")
        if self.grad_dtype not in (None, self.dtype, torch.float32):
            raise ValueError(f"precision.grad_dtype must be None, {self.dtype} or torch.float32, got {self.grad_dtype}")
        if not isinstance(self.loss_scale, LossScale | None):
            fix = "pass loss_scale=StaticLossScale(1024), or DynamicLossScale()"
            raise ValueError(f"precision.loss_scale must be None or a LossScale, got {self.loss_scale!r}; {fix}")
        grads_are_half = torch.float32 not in (self.dtype, self.grad_dtype)
        if self.reduce_dtype not in ((None, "half", "half_fp32_sum") if grads_are_half else (None, "fp32")):
            must_be = (
                "None, 'half' or 'half_fp32_sum' with half gradients ('fp32' needs grad_dtype=torch.float32)"
                if grads_are_half
                else "None or 'fp32' with FP32 gradients (the others need a half dtype and grad_dtype=None)"
            )
            raise ValueError(f"precision.reduce_dtype must be {must_be}, got {self.reduce_dtype!r}")

    @property
    def own_grad_dtype(self) -> torch.dtype:
        """Return the dtype in which each rank sums the gradients of its micro-batches."""
        return self.grad_dtype or self.dtype

    def sum_dtype(self, num_owners: int) -> torch.dtype:
        """Return the dtype of the sum over the owners, which the update reads. A single owner has nothing to sum, and
        keeps the gradients' dtype.
        """
        wide = self.reduce_dtype == "half_fp32_sum" and num_owners > 1
        return torch.float32 if wide else self.own_grad_dtype


@dataclass(frozen=True, slots=True)
class Placement:
    """Gives the place of a parameter of this rank's module in the model that all ranks train together."""

    full_shape: tuple[int, ...]
    offset: tuple[int, ...]  # place in the full parameter at which this rank's block begins
    owners: Axis  # the ranks that hold this same block
    counts: bool = True  # True: this rank's gradient is added; False: another owner adds the very same gradient
    along: str = "tp"  # the axis whose ranks hold all blocks, in order, or "ep"


@dataclass(frozen=True, slots=True)
class Sharding:
    """Says how the ranks divide masters, states, gradients and parameters, and how their transfers overlap."""

    # Submodules, such as blocks, whose parameters are awaited one unit at a time; with shard="parameters" they also
    # have memory one unit at a time. Empty: all parameters are awaited together.
    units: Sequence[nn.Module] = ()
    topology: Topology | None = None  # None: every rank holds the whole model, or this process is alone
    bucket_size: int | None = None  # elements; None: chosen by the model's size
    overlap: bool = True  # False: every collective is awaited at once (slower, the same result)
    # Keys: names of parameters that are trained. A parameter that is not named is whole on every data-parallel rank.
    placements: Mapping[str, Placement] = field(default_factory=dict)
    # Makes the owners' collectives. A program that adds an axis may pass its own function, with its own sums.
    collectives: MakeCollectives = make_collectives
    shard: Shard = "states"
    # "local": each rank adds up the gradients of a step's micro-batches, which are then reduced once. "owner": each
    # micro-batch is reduced by itself, and the owner adds up the sums in FP32. Then no rank keeps gradients from one
    # micro-batch to the next.
    accumulate: Literal["local", "owner"] = "local"

    def __post_init__(self) -> None:
        check(self)
        if isinstance(self.units, Iterator):  # an iterator could be read only once
            raise TypeError(f"sharding.units takes a sequence of submodules, got {self.units!r}; write [*model.blocks]")
        if self.shard == "parameters" and not self.units:
            raise ValueError(
                'sharding.shard "parameters" gathers one unit at a time, but units is empty, so the whole model would '
                "be one unit; pass e.g. units=[*model.blocks]"
            )

    def owner_adds(self, micro_batches: int) -> bool:
        """Return whether owners add up a step's micro-batches. A single micro-batch needs no addition."""
        return self.accumulate == "owner" and micro_batches > 1
