"""What a user of the engine chooses, and what a step tells him."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from megamix.comm.topology import Axis, Topology
from megamix.mixed_precision.examination import Examination
from megamix.mixed_precision.loss_scale import StaticLossScale

# What travels to an owner, and what the owner keeps of the sum: half and its sum in half, half and its sum in FP32, or
# FP32 and its sum in FP32.
ReduceDtype = Literal["half", "half_fp32_sum", "fp32"]


@dataclass(frozen=True, slots=True)
class Precision:
    """What is half and what is scaled."""

    dtype: torch.dtype = torch.bfloat16  # of parameters, activations and gradients: FP16, BF16, or FP32 as a reference
    grad_dtype: torch.dtype | None = None  # in which micro-batches are summed; None: `dtype`
    loss_scale: StaticLossScale | None = None  # FP16 needs one, static or dynamic
    reduce_dtype: ReduceDtype | None = None  # None: "fp32" for FP32 gradients, else "half"

    @property
    def own_grad_dtype(self) -> torch.dtype:
        """In which each rank's micro-batches are summed."""
        return self.grad_dtype or self.dtype

    def sum_dtype(self, num_owners: int) -> torch.dtype:
        """What holds a sum over the ranks until the update reads it. A rank alone has nothing to sum."""
        wide = self.reduce_dtype == "half_fp32_sum" and num_owners > 1
        return torch.float32 if wide else self.own_grad_dtype


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a parameter of this rank's module stands in the model that all ranks train together."""

    full_shape: tuple[int, ...]
    offset: tuple[int, ...]  # of this rank's block in it
    owners: Axis  # the ranks that hold this same block
    counts: bool = True  # False: another owner's gradient is this same one, and is taken alone; True: they add up

    def block(self, shape: Sequence[int]) -> tuple[slice, ...]:
        """Of the full parameter, this rank's block, which has that shape."""
        return tuple(slice(start, start + size) for start, size in zip(self.offset, shape, strict=True))


@dataclass(frozen=True, slots=True)
class Sharding:
    """How the FP32 truth is spread over ranks, and how its traffic hides behind compute."""

    units: Sequence[
        nn.Module
    ] = ()  # submodules (blocks) whose parameters are awaited one by one; none: all at the root
    topology: Topology | None = None  # None: every rank holds the whole model; or this process is alone
    bucket_size: int | None = None  # elements; None: by the model's size
    overlap: bool = True  # False: every collective is awaited at once (slower, same result)
    # By name of the parameters that are trained; what is not named is whole on every data-parallel rank.
    placements: Mapping[str, Placement] = field(default_factory=dict)


class StepResult(NamedTuple):
    """Device tensors; reading one waits for the device, so keep them until the value is needed."""

    loss: Tensor  # FP32 (): the mean over ranks and micro-batches, by weight, without the scale
    found_inf: Tensor  # bool (): nothing was changed
    grad_norm: Tensor  # FP32 (): of the averaged, unscaled gradient, before clipping
    max_abs: Tensor  # FP32 (): of the summed, scaled gradient; of a half sum its distance to 65504 is the headroom
    loss_scale: Tensor  # FP32 (): the one this step's backward used
    lr: Tensor  # FP32 ()
    stop_requested: Tensor  # FP64 (): the largest of the ranks' `engine.stop_request`; 0: none asks
    by_piece: Tensor  # FP64 (2, pieces): sum of squares and max abs of each of this rank's `engine.piece_stats.pieces`
    examination: Examination | None = None  # of a step after `engine.examine_next_step()`


def check_settings(precision: Precision, clip_grad: float, grad_accum_steps: int) -> None:
    """Raises: ValueError naming the first setting that cannot be, and what it can be."""
    halves = (torch.float16, torch.bfloat16, torch.float32)
    if precision.dtype not in halves:
        raise ValueError(f"precision.dtype must be torch.float16, bfloat16 or float32, got {precision.dtype}")
    if precision.grad_dtype not in (None, precision.dtype, torch.float32):
        raise ValueError(
            f"precision.grad_dtype must be None, {precision.dtype} or torch.float32, got {precision.grad_dtype}"
        )
    half_grads = torch.float32 not in (precision.dtype, precision.grad_dtype)
    if precision.reduce_dtype not in ((None, "half", "half_fp32_sum") if half_grads else (None, "fp32")):
        must_be = (
            "None, 'half' or 'half_fp32_sum' with half gradients ('fp32' needs grad_dtype=torch.float32)"
            if half_grads
            else "None or 'fp32' with FP32 gradients (the others need a half dtype and grad_dtype=None)"
        )
        raise ValueError(f"precision.reduce_dtype must be {must_be}, got {precision.reduce_dtype!r}")
    if precision.dtype == torch.float16 and precision.loss_scale is None:
        raise ValueError(
            "precision.loss_scale is None, but FP16 gradients need one; pass loss_scale=DynamicLossScale()"
        )
    if not clip_grad >= 0:  # NaN neither
        raise ValueError(f"clip_grad must be a number of at least 0, got {clip_grad}; 0 turns clipping off")
    if grad_accum_steps < 1:
        raise ValueError(f"grad_accum_steps must be at least 1, got {grad_accum_steps}")


def check_loss(loss: Tensor, weight: float) -> None:
    """Raises: ValueError for what `backward` cannot take."""
    if isinstance(loss, Tensor) and loss.numel() != 1:
        raise ValueError(f"backward() takes a loss of one element, got shape {tuple(loss.shape)}; take its mean")
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        raise ValueError(
            f"backward() takes a loss that is computed from the module's parameters, got {type(loss).__name__} without "
            "a graph; give the tensor before .item() or .detach(), and not under torch.no_grad()"
        )
    if not 0 <= weight < math.inf:
        raise ValueError(f"backward() takes a weight of 0 or more, got {weight}; pass the share that counts")
