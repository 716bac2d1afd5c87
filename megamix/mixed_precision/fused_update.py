"""The one write of a step: unscale, average, clip, the optimizer's equation and the cast to half, in one pass over a
span.

With Adam and half sums of gradients it moves 28 bytes per element: gradient 2, master 8, two states 16, half parameter
2.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from threading import Timer
from typing import Any, Literal

import torch
from torch import Tensor

from megamix.base import constants
from megamix.comm.collectives import Collectives
from megamix.mixed_precision.bucket import Bucket
from megamix.mixed_precision.flat_layout import ROW
from megamix.mixed_precision.optim.optimizer import GroupScalars, Optimizer
from megamix.mixed_precision.row_stats import RowStats, chunked_row_stats, row_stats, sum_at_once, sum_in_chunks
from megamix.mixed_precision.update_slice import (
    Kernel,
    States,
    StepScalars,
    UpdateGroup,
    UpdateScalars,
    UpdateSlice,
    as_rows,
)

log = logging.getLogger("megamix")
_SILENT_S = 4.0  # seconds of compiling without a word


class CompiledUpdate:
    """One compiled loop, made from the optimizer's own equation: Triton on a GPU, vectorised C++ on a CPU.

    It is compiled once for each set of states, for any length (a compile per length would hit the recompile limit of
    8). Values that change between steps or groups are device tensors, since a Python number would be baked into the
    code.
    """

    def __init__(self, optimizer: Optimizer, groups: Sequence[UpdateGroup], device: torch.device):
        self._groups, self.scalars = groups, GroupScalars(optimizer, groups, device)
        by_states = {group.states: _compile(gated_update(optimizer)) for group in groups}
        self._updates_ = [by_states[group.states] for group in groups]

    def __call__(self, part: UpdateSlice, step: StepScalars) -> None:
        rows = part.rows
        update_ = self._updates_[part.group]
        at = self.scalars.of(step)[part.group]
        held = step.holds(part.group)
        update_(rows.grad, rows.master, rows.states, rows.half, step.multiplier, held, at)
        limit_(part, self._groups[part.group], held)


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    # With 512-bit vectors torch loads and stores 16 halves as a masked half vector, which is slow: the update takes
    # 0.70 ns per parameter. With 256-bit vectors it takes 0.62 ns (BF16) or 0.54 ns (FP16), and waits only for memory.
    wide = {"cpp.simdlen": 256} if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else {}
    # On a GPU no kernel is chosen by timing. So all processes of a run, also after a restart, add up a row in one
    # order, and the update gets the one block size in which every access has 128 bits.
    options: dict[str, Any] = {"deterministic": True, "triton.autotune_pointwise": False, **wide}
    return torch.compile(function, dynamic=True, fullgraph=True, options=options)


def gated_update(optimizer: Optimizer) -> Callable[..., None]:
    """Return the update of a span as plain tensor operations for the compiler to fuse. Uncompiled, it is right and
    slow.
    """

    def update_(
        grad: Tensor,
        master: Tensor,
        states: States,
        half: Tensor | None,
        multiplier: Tensor,
        found_inf: Tensor,
        at: UpdateScalars,
    ) -> None:
        gated_update_(optimizer.equation, grad.float() * multiplier, master, states, at, found_inf)
        if half is not None:
            half.copy_(master)

    # Each engine gets a new code object: torch keeps compiled code by code object, for at most 8 sets of constants and
    # dtypes, and all engines of the process would share these 8.
    return types.FunctionType(update_.__code__.replace(), update_.__globals__, closure=update_.__closure__)


class LibraryUpdate:
    """The update by torch's own kernels, in chunks that stay in cache: for machines where nothing can be compiled.

    The gradient is multiplied in FP32 first. The fused kernels' `grad_scale` would divide, which rounds differently.
    """

    def __init__(self, optimizer: Optimizer, groups: Sequence[UpdateGroup], device: torch.device):
        self._optimizer, self._groups = optimizer, groups
        self._scalars = GroupScalars(optimizer, groups, device)

    def __call__(self, part: UpdateSlice, step: StepScalars) -> None:
        group = self._groups[part.group]
        at = self._scalars.of(step)[part.group]
        step = step._replace(found_inf=step.holds(part.group))
        size = constants.chunk(constants.UPDATE_CHUNK, part.grad.numel(), on_gpu=not part.grad.is_cpu)
        buffer = torch.empty(size, dtype=torch.float32, device=part.grad.device)
        chunks = zip(*(torch.split(one, size) for one in (part.grad, part.master, *part.states.values())), strict=True)
        halves = repeat(None) if part.half is None else torch.split(part.half, size)
        for (grad, master, *states), half in zip(chunks, halves, strict=False):
            unscaled = buffer[: len(grad)].copy_(grad).mul_(step.multiplier)
            wide = [state.float() for state in states]  # an FP32 state is not copied
            chunk = UpdateSlice(part.group, unscaled, master, dict(zip(part.states, wide, strict=True)), half=None)
            # These kernels take a group's settings as the host's numbers, which nobody knows under a schedule.
            if group.is_scheduled or not self._optimizer.library_update_(chunk, group, at, step):
                self._by_operations(chunk, at, step)
            for state, new in zip(states, wide, strict=True):
                if new is not state:
                    state.copy_(new)
            if half is not None:
                half.copy_(master)
        limit_(part, group, step.found_inf)

    def _by_operations(self, part: UpdateSlice, at: UpdateScalars, step: StepScalars) -> None:
        """Run the equation operation by operation, with torch's own kernels."""
        tensors = (part.grad, part.master, *part.states.values())
        size = constants.chunk(constants.EQUATION_CHUNK, part.grad.numel(), on_gpu=not part.grad.is_cpu)
        for grad, master, *rest in zip(*(torch.split(tensor, size) for tensor in tensors), strict=True):
            states = dict(zip(part.states, rest, strict=True))
            gated_update_(self._optimizer.equation, grad, master, states, at, step.found_inf)


def gated_update_(
    equation: Callable[[Tensor, Tensor, States, UpdateScalars], tuple[Tensor, States]],
    grad: Tensor,
    master: Tensor,
    states: States,
    at: UpdateScalars,
    found_inf: Tensor,
) -> None:
    """Write the equation's results into master and states, unless `found_inf` is set. States stay in their
    own dtypes.
    """
    wide = {name: state.float() for name, state in states.items()}
    new_master, new_states = equation(grad, master, wide, at)
    # The gate selects. Multiplying by zero would fail: 0 * inf is NaN, and would poison the states for ever.
    master.copy_(torch.where(found_inf, master, new_master))
    for name, state in states.items():
        state.copy_(torch.where(found_inf, wide[name], new_states[name]))


def limit_(part: UpdateSlice, group: UpdateGroup, held: Tensor) -> None:
    """Bring masters, and their half parameters, between the limits of their group, if it has any."""
    if group.limits is not None:
        part.master.copy_(torch.where(held, part.master, part.master.clamp(*group.limits)))
        if part.half is not None:
            part.half.copy_(part.master)


@dataclass(frozen=True, slots=True)
class Kernels:
    """Holds the functions with which this machine computes an update."""

    update: Kernel
    row_stats: RowStats
    path: Literal["compiled", "library"]  # "library": torch's own kernels


def choose_kernels(
    optimizer: Optimizer,
    groups: Sequence[UpdateGroup],
    buckets: Sequence[Bucket],
    world: Collectives,
    try_compiler: bool,
) -> Kernels:
    """Return this machine's kernels: compiled if the real functions compile on every rank, else torch's own.

    Each combination of a bucket's dtypes and a set of states is compiled here, because a first compilation within a
    step could fail there. All ranks use the same path, because the two paths round differently (fused multiply-adds).
    The first rank logs if compiling takes long. Each rank logs if nothing could be compiled.
    """
    groups = optimizer.kernel_groups(groups)
    stats = RowStats(chunked_row_stats, partial(sum_in_chunks, chunked_row_stats))
    device = buckets[0].master.device
    library = Kernels(LibraryUpdate(optimizer, groups, device), stats, "library")
    if not try_compiler:
        return library
    compiled = Kernels(CompiledUpdate(optimizer, groups, device), _compiled_stats(device), "compiled")
    alike = {(one.grads.dtype, one.grad_sum.dtype, one.owners.axis.size): one for one in buckets}
    compiles = True
    reason = "another rank has no compiler"
    told = "compiling the optimizer's update: up to a minute unless it is cached (a job: optimizer.compile = false)"
    late = Timer(_SILENT_S, log.warning, [told])
    if world.axis.rank == 0:
        late.start()
    try:
        # Without this, dynamic=True would turn the optimizer's constants (betas, eps) into variables, too, and load
        # them in every iteration.
        with torch._dynamo.config.patch(specialize_float=True):
            for bucket in alike.values():
                _try_out(compiled, optimizer, groups, bucket)
    except Exception as error:  # a missing g++, Python.h and Triton each raise another error
        compiles = False
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    finally:
        late.cancel()
    if world.agree(compiles):
        return compiled
    log.warning("the update cannot be compiled here (%s): using torch's own kernels", reason)
    return library


def _compiled_stats(device: torch.device) -> RowStats:
    # Autograd is always off, as in the hooks of backward that call these functions: a compiled graph holds for one grad
    # mode only.
    of_shard = torch.no_grad()(_compile(row_stats))
    in_chunks = partial(sum_in_chunks, of_shard)
    if device.type == "cpu":
        return RowStats(of_shard, in_chunks)
    at_once: Callable[[Tensor, Tensor], Tensor] = torch.no_grad()(_compile(sum_at_once))

    def of_sum(parts: Tensor, grad_shard: Tensor) -> Tensor:
        if grad_shard.numel() == ROW:  # a single row would be compiled separately
            return in_chunks(parts, grad_shard)
        return at_once(as_rows(parts, ROW), as_rows(grad_shard, ROW))

    return RowStats(of_shard, of_sum)


def _try_out(kernels: Kernels, optimizer: Optimizer, groups: Sequence[UpdateGroup], bucket: Bucket) -> None:
    """Compile everything that a step will call for this bucket."""
    device = bucket.master.device
    grad = torch.zeros(constants.TRIAL, dtype=bucket.grad_sum.dtype, device=device)
    one = torch.ones((), device=device)
    step = StepScalars(one, one.bool(), one, one)
    kernels.row_stats.of_shard(grad)
    for number in {group.states: number for number, group in enumerate(groups)}.values():
        states = groups[number].new_states(grad.numel(), grad.device)
        half_dtype, grad_dtype = optimizer.dtypes(groups[number].states, bucket.updated_dtype, grad.dtype)
        master = torch.zeros_like(grad, dtype=torch.float32)
        half_part = None if half_dtype is None else torch.zeros_like(grad, dtype=half_dtype)
        kernels.update(UpdateSlice(number, grad.to(grad_dtype), master, states, half_part), step)
    if bucket.grad_sum.dtype != bucket.grads.dtype and device.type != "cpu":
        owners = bucket.owners.axis.size
        size = constants.TRIAL // owners // ROW * ROW
        kernels.row_stats.of_sum(grad.new_zeros(owners, size, dtype=bucket.grads.dtype), grad[:size])
