"""Settings of the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import nn

from megamix.comm.collectives import MakeCollectives, make_collectives
from megamix.comm.topology import Axis, Topology
from megamix.mixed_precision.loss_scale import LossScale

# What travels to an owner, and what the owner keeps of the sum: half and its sum in half, half and its sum in FP32, or
# FP32 and its sum in FP32.
ReduceDtype = Literal["half", "half_fp32_sum", "fp32"]

# What of a parameter a rank holds a share of: masters and states; the gradients, too, from their sum on; the half
# parameters, too, outside of their unit's forward and backward. The field's ZeRO-1, 2 and 3.
Shard = Literal["states", "gradients", "parameters"]


@dataclass(frozen=True, slots=True)
class Precision:
    """Says what is half and what is scaled."""

    dtype: torch.dtype = torch.bfloat16  # of parameters, activations and gradients: FP16, BF16, or FP32 as a reference
    grad_dtype: torch.dtype | None = None  # in which micro-batches are summed; None: `dtype`
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
    """The place of a parameter of this rank's module in the model that all ranks train together."""

    full_shape: tuple[int, ...]
    offset: tuple[int, ...]  # of this rank's block in it
    owners: Axis  # the ranks that hold this same block
    counts: bool = True  # False: another owner's gradient is this same one, and is taken alone; True: they add up


@dataclass(frozen=True, slots=True)
class Sharding:
    """How the FP32 truth is spread over ranks, and how its traffic hides behind compute."""

    # Submodules (blocks) whose parameters are awaited, or come and go, one by one; none: all at the root.
    units: Sequence[nn.Module] = ()
    topology: Topology | None = None  # None: every rank holds the whole model; or this process is alone
    bucket_size: int | None = None  # elements; None: by the model's size
    overlap: bool = True  # False: every collective is awaited at once (slower, same result)
    # By name of the parameters that are trained; what is not named is whole on every data-parallel rank.
    placements: Mapping[str, Placement] = field(default_factory=dict)
    # For the owners of parameters: who adds an axis says how their sums travel over it.
    collectives: MakeCollectives = make_collectives
    shard: Shard = "states"
    # Who adds up a step's micro-batches: each rank its own, before they are reduced once; or the owner, in FP32, each
    # one's sum over the ranks, so that no rank keeps gradients from one to the next.
    accumulate: Literal["local", "owner"] = "local"

    def __post_init__(self) -> None:
        if self.shard not in get_args(Shard):
            raise ValueError(f"sharding.shard must be one of {', '.join(get_args(Shard))}, got {self.shard!r}")
        if self.accumulate not in ("local", "owner"):
            raise ValueError(f"sharding.accumulate must be one of local, owner, got {self.accumulate!r}")
        if not isinstance(self.overlap, bool):
            raise TypeError(f"sharding.overlap must be True or False, got {self.overlap!r}")
        if not isinstance(self.bucket_size, int | None):
            raise TypeError(f"sharding.bucket_size must be a number of elements or None, got {self.bucket_size!r}")
        if self.shard == "parameters" and not self.units:
            raise ValueError(
                'sharding.shard "parameters" gathers a unit at a time, but units is empty: all of the model would be '
                "one; pass e.g. units=[*model.blocks]"
            )

    def owner_adds(self, micro_batches: int) -> bool:
        """Return whether owners add up a step's micro-batches. One alone is a sum already."""
        return self.accumulate == "owner" and micro_batches > 1
