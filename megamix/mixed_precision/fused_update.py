"""The one write: unscale, average, clip, the optimizer's equation and the cast to half, in one pass over a run.

28 bytes per element with Adam and half sums of gradients: gradient 2, master 8, two states 16, half parameter 2.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megamix import tuned
from megamix.comm.collectives import Collectives
from megamix.mixed_precision.flat_layout import ROW, Run
from megamix.mixed_precision.grad_reduce import RowStats
from megamix.mixed_precision.grad_stats import chunked_row_stats, row_stats, sum_at_once, sum_in_pieces
from megamix.mixed_precision.master_shard import MasterShard
from megamix.mixed_precision.optimizers import Optimizer, States, Tensors, UpdateGroup, UpdateScalars

log = logging.getLogger("megamix")


class StepScalars(NamedTuple):
    """What a step decides once for all buckets: device scalars, never read by the host."""

    multiplier: Tensor  # FP32 (): clip coefficient / (loss_scale * sum of weights)
    found_inf: Tensor  # bool (): nothing may change
    lr: Tensor  # FP32 (), before a group's factor
    update: Tensor  # FP32 (): the number of this update, 1 for the first
    coefficients: Tensors  # FP32 (): the optimizer's, e.g. its bias corrections


# Updates a run of one group in place, from (grad, master, states, half, group, step). Shapes: half in half precision,
# grad too or FP32, master FP32, states in their dtypes, all (n,) with n a multiple of 64.
Update = Callable[[Tensor, Tensor, States, Tensor, int, StepScalars], None]
Cut = tuple[Run, Update]


def update_shard(
    cuts: Iterable[Cut], grad: Tensor, shard: MasterShard, bucket: int, half: Tensor, step: StepScalars
) -> None:
    """Update this rank's part of a bucket in place, cut by cut.

    Shapes: grad half or FP32, half in half precision, both (shard_numel,).
    """
    for run, update in cuts:
        part, states = slice(run.start, run.end), shard.states_of(bucket, run.start, run.end)
        update(grad[part], shard.master[bucket][part], states, half[part], run.group, step)


class CompiledUpdate:
    """One compiled loop, from the optimizer's own equation: Triton on a GPU, vectorised C++ on a CPU.

    Compiled once for each set of states, for any length (a compile per length would hit the recompile limit of 8);
    everything that changes from step to step or group to group is a device tensor, since a Python number would be baked
    into the code.
    """

    def __init__(self, optimizer: Optimizer, groups: Sequence[UpdateGroup], device: torch.device):
        self._lr_factors = [torch.tensor(group.lr_factor, device=device) for group in groups]
        self._weight_decays = [torch.tensor(group.weight_decay, device=device) for group in groups]
        by_states = {group.states: _compile(gated_update(optimizer)) for group in groups}
        self._updates_ = [by_states[group.states] for group in groups]

    def __call__(
        self, grad: Tensor, master: Tensor, states: States, half: Tensor, group: int, step: StepScalars
    ) -> None:
        at = UpdateScalars(step.lr * self._lr_factors[group], self._weight_decays[group], step.coefficients)
        rows = {name: _rows(state) for name, state in states.items()}
        self._updates_[group](_rows(grad), _rows(master), rows, _rows(half), step.multiplier, step.found_inf, at)


def _rows(run: Tensor, size: int = ROW // 2) -> Tensor:
    """View a run, or several of one length, as rows. Of a flat run the compiler knows no factor of its length, and
    loads and stores element by element on a GPU: 24 + 8 accesses where 7 + 7 of 128 bits move the same 8 elements. Two
    rows for each of the statistics, as a run of a single one would be compiled apart. Detached, for a view's base has a
    size of its own: runs of buckets of other sizes would be compiled again.
    Shapes: ([runs,] n) -> ([runs,] n / size, size).
    """
    rows = run.view(*run.shape[:-1], -1, size).detach()
    torch._dynamo.mark_static(rows, [*range(run.dim() - 1), run.dim()])
    return rows


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    # With 512-bit vectors torch loads and stores 16 halves as the masked half of a vector, slowly: the update takes
    # 0.70 ns per parameter against 0.62 (BF16) and 0.54 (FP16) with 256-bit ones, where it waits for memory alone.
    wide = {"cpp.simdlen": 256} if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else {}
    # On a GPU nothing is chosen by timing: each process of a run, and of its next start, adds up a row in one order,
    # and the update has the one block in which every access is of 128 bits.
    options: dict[str, Any] = {"deterministic": True, "triton.autotune_pointwise": False, **wide}
    return torch.compile(function, dynamic=True, fullgraph=True, options=options)


def gated_update(optimizer: Optimizer) -> Callable[..., None]:
    """Return the update of a run as plain tensor operations, for the compiler to fuse (uncompiled right, and slow)."""

    def update_(
        grad: Tensor, master: Tensor, states: States, half: Tensor,
        multiplier: Tensor, found_inf: Tensor, at: UpdateScalars,
    ) -> None:  # fmt: skip
        optimizer.gated_update_(grad.float() * multiplier, master, states, at, found_inf)
        half.copy_(master)

    # A code object of its own: what is compiled is kept by code object, for at most 8 sets of constants and dtypes, and
    # every engine of the process would share this one.
    return types.FunctionType(update_.__code__.replace(), update_.__globals__, closure=update_.__closure__)


class LibraryUpdate:
    """torch's own kernels, in pieces that stay in cache: for machines where nothing can be compiled.

    The gradient is multiplied in FP32 first: the fused kernels' `grad_scale` divides, and so rounds otherwise.
    """

    def __init__(self, optimizer: Optimizer, groups: Sequence[UpdateGroup]):
        self._optimizer, self._groups = optimizer, groups

    def __call__(
        self, grad: Tensor, master: Tensor, states: States, half: Tensor, group: int, step: StepScalars
    ) -> None:
        shared = self._groups[group]
        at = UpdateScalars(step.lr * shared.lr_factor, shared.weight_decay, step.coefficients)
        size = tuned.piece(tuned.UPDATE_PIECE, grad.numel(), on_gpu=not grad.is_cpu)
        unscaled = torch.empty(size, dtype=torch.float32, device=grad.device)
        for start in range(0, grad.numel(), size):
            piece = slice(start, min(start + size, grad.numel()))
            piece_grad = unscaled[: piece.stop - start].copy_(grad[piece]).mul_(step.multiplier)
            piece_states = {name: state[piece] for name, state in states.items()}
            wide = {name: state.float() for name, state in piece_states.items()}  # FP32 ones themselves
            self._optimizer.library_update_(piece_grad, master[piece], wide, at, step.update, step.found_inf)
            for name, state in piece_states.items():
                if wide[name] is not state:
                    state.copy_(wide[name])
            half[piece].copy_(master[piece])


def choose_update(
    optimizer: Optimizer,
    groups: Sequence[UpdateGroup],
    half_params: Sequence[Tensor],
    half_grads: Sequence[Tensor],
    grad_shards: Sequence[Tensor],
    collectives: Collectives,
    try_compiler: bool,
) -> tuple[Update, RowStats]:
    """Return the update and the statistics for this machine: compiled if the real functions compile on every rank, else
    torch's kernels.

    Of every bucket `half_params` and `half_grads`, and `grad_shards`, where its sums will lie: what there is of dtypes
    is tried with each set of states, since what is first compiled amid a step may fail there. One answer for all ranks:
    the two paths round differently (fused multiply-adds), and the choice is logged.
    """
    library = LibraryUpdate(optimizer, groups), RowStats(chunked_row_stats, partial(sum_in_pieces, chunked_row_stats))
    if not try_compiler:
        return library
    half = half_params[0]
    stats = _compiled_stats(half.device)
    compiled = CompiledUpdate(optimizer, groups, half.device), stats
    both = zip(half_grads, grad_shards, strict=True)
    kinds = dict.fromkeys((flat.dtype, shard.dtype, flat.numel() // shard.numel()) for flat, shard in both)
    compiles, reason = True, "another rank has no compiler"
    try:
        # dynamic=True would take the optimizer's constants (betas, eps) for variables too, and load them in every turn.
        with torch._dynamo.config.patch(specialize_float=True):
            for grad_dtype, sum_dtype, owners in kinds:
                grad = half.new_zeros(tuned.TRIAL, dtype=sum_dtype)
                stats.of_shard(grad)
                for group in {group.states: number for number, group in enumerate(groups)}.values():
                    _try_out(optimizer, compiled[0], groups, group, half.new_zeros(tuned.TRIAL), grad)
                if sum_dtype != grad_dtype and not half.is_cpu:
                    size = tuned.TRIAL // owners // ROW * ROW
                    stats.of_sum(half.new_zeros(owners, size, dtype=grad_dtype), grad[:size])
    except Exception as error:  # a missing g++, Python.h or Triton each raise something else
        compiles, reason = False, f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    if collectives.agree(compiles):
        return compiled
    log.warning("the update cannot be compiled here (%s): using torch's own kernels", reason)
    return library


def _compiled_stats(device: torch.device) -> RowStats:
    # Always without autograd, as where hooks of backward call them: its state is part of what a graph is compiled for.
    of_shard = torch.no_grad()(_compile(row_stats))
    in_pieces = partial(sum_in_pieces, of_shard)
    if device.type == "cpu":
        return RowStats(of_shard, in_pieces)
    at_once: Callable[[Tensor, Tensor], Tensor] = torch.no_grad()(_compile(sum_at_once))

    def of_sum(parts: Tensor, grad_shard: Tensor) -> Tensor:
        if grad_shard.numel() == ROW:  # which would be compiled apart
            return in_pieces(parts, grad_shard)
        return at_once(_rows(parts, ROW), _rows(grad_shard, ROW))

    return RowStats(of_shard, of_sum)


def _try_out(
    optimizer: Optimizer, update: Update, groups: Sequence[UpdateGroup], group: int, half: Tensor, grad: Tensor
) -> None:
    states = groups[group].new_states(grad.numel(), grad.device)
    half_dtype, grad_dtype = optimizer.dtypes(groups[group].states, half.dtype, grad.dtype)
    master, one = torch.zeros_like(grad, dtype=torch.float32), torch.ones((), device=grad.device)
    step = StepScalars(one, one.bool(), one, one, optimizer.coefficients(one.double()))
    update(grad.to(grad_dtype), master, states, half.to(half_dtype), group, step)
