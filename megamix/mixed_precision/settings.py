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

# Formats of what travels to an owner and of the sum that it keeps: half and its sum in half, half and its sum in FP32,
# or FP32 and its sum in FP32.
ReduceDtype = Literal["half", "half_fp32_sum", "fp32"]

# State of a parameter that ranks share out: masters and states; the gradients, too, from their sum on; the half
# parameters, too, outside of their unit's forward and backward. The field's ZeRO-1, 2 and 3.
Shard = Literal["states", "gradients", "parameters"]


@dataclass(frozen=True, slots=True)
class Precision:
    """Says what is half and what is scaled."""

    dtype: torch.dtype = torch.bfloat16  # parameters, activations and gradients: FP16, BF16, or FP32 as a reference
    grad_dtype: torch.dtype | None = None  # sums over micro-batches; None: `dtype`
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
        """Return in which dtype each rank's micro-batches are summed."""
        return self.grad_dtype or self.dtype

    def sum_dtype(self, num_owners: int) -> torch.dtype:
        """Return what holds a sum over the ranks until the update reads it. A rank alone has nothing to sum."""
        wide = self.reduce_dtype == "half_fp32_sum" and num_owners > 1
        return torch.float32 if wide else self.own_grad_dtype


@dataclass(frozen=True, slots=True)
class Placement:
    """Gives the place of a parameter of this rank's module in the model that all ranks train together."""

    full_shape: tuple[int, ...]
    offset: tuple[int, ...]  # place in it at which this rank's block begins
    owners: Axis  # the ranks that hold this same block
    counts: bool = True  # False: another owner's gradient is this same one, and is taken alone; True: they add up


@dataclass(frozen=True, slots=True)
class Sharding:
    """Spreads the FP32 truth over ranks, and hides its traffic behind compute."""

    # Submodules (blocks) whose parameters are awaited, or come and go, one by one; none: all at the root.
    units: Sequence[nn.Module] = ()
    topology: Topology | None = None  # None: every rank holds the whole model; or this process is alone
    bucket_size: int | None = None  # elements; None: by the model's size
    overlap: bool = True  # False: every collective is awaited at once (slower, same result)
    # Keys: names of parameters that are trained. A parameter that is not named is whole on every data-parallel rank.
    placements: Mapping[str, Placement] = field(default_factory=dict)
    # Makes the owners' collectives: a program that adds an axis says how their sums travel over it.
    collectives: MakeCollectives = make_collectives
    shard: Shard = "states"
    # A step's micro-batches are added up by each rank, before they are reduced once; or by the owner, in FP32, each
    # one's sum over the ranks, so that no rank keeps gradients from one to the next.
    accumulate: Literal["local", "owner"] = "local"

    def __post_init__(self) -> None:
        check(self)
        if isinstance(self.units, Iterator):  # it would be at its end when they are read again
            raise TypeError(f"sharding.units takes a sequence of submodules, got {self.units!r}; write [*model.blocks]")
        if self.shard == "parameters" and not self.units:
            raise ValueError(
                'sharding.shard "parameters" gathers a unit at a time, but units is empty: all of the model would be '
                "one; pass e.g. units=[*model.blocks]"
            )

    def owner_adds(self, micro_batches: int) -> bool:
        """Return whether owners add up a step's micro-batches. One alone is a sum already."""
        return self.accumulate == "owner" and micro_batches > 1
