"""The optimizer's step alone, in one process: ours and torch's on the same flat tensors, and a plain copy."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megamix.comm.collectives import Collectives
from megamix.comm.topology import Axis, Topology
from megamix.config import ModelConfig
from megamix.mixed_precision.flat_layout import build_layout
from megamix.mixed_precision.fused_update import CompiledUpdate, StepScalars, Update, choose_update
from megamix.mixed_precision.grad_stats import PieceStats
from megamix.mixed_precision.half_params import describe_params
from megamix.mixed_precision.master_shard import MasterShard
from megamix.mixed_precision.optimizers import AdamW
from megamix.model.transformer import Transformer

COMPILED, LIBRARY, CASTS = "update, compiled", "update, no compiler", "cast + AdamW(fused) + cast"
STATS, LIBRARY_STATS, COPY = "statistics, compiled", "statistics, no compiler", "copy"

BYTES_PER_PARAM = 28  # half gradient 2, master 8, two states 16, half parameter 2


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateWork:
    """What is updated: the parameters of this model in the engine's default buckets, on one rank."""

    model: ModelConfig
    dtype: torch.dtype
    calls: int = 5  # timed calls of each variant in a round
    try_compiler: bool = True


class UpdateRank:
    """Holds the tensors of a step and every variant that works on them."""

    def __init__(self, work: UpdateWork):
        self._work = work
        self._optimizer = AdamW(lr=1e-4)
        with torch.device("meta"):
            model = Transformer(work.model)
        specs, self._groups, _, _ = describe_params(model, self._optimizer, Topology(), {})
        self.layout = build_layout(specs, [1])
        cpu = torch.device("cpu")
        self._shard = MasterShard(self.layout, [Collectives(Axis())] * len(self.layout.buckets), 2, cpu)
        self._half = [torch.zeros(bucket.padded_numel, dtype=work.dtype) for bucket in self.layout.buckets]
        self._grads = [self._draw(bucket.padded_numel) for bucket in self.layout.buckets]
        self._scalars = self._make_scalars()

        def choose(try_compiler: bool) -> tuple[Update, Callable[[Tensor], Tensor]]:
            alone = Collectives(Axis())
            return choose_update(self._optimizer, self._groups, self._half[0], [work.dtype], alone, try_compiler)

        compiled, stats = choose(work.try_compiler)
        library, library_stats = choose(False)
        pieces = PieceStats(self.layout, [0] * len(self.layout.buckets), cpu)
        self.variants: dict[str, Callable[[], object]] = {}
        if isinstance(compiled, CompiledUpdate):
            self.variants[COMPILED] = lambda: self._update(compiled)
            self.variants[STATS] = lambda: pieces([stats(grad) for grad in self._grads])
        self.variants[LIBRARY] = lambda: self._update(library)
        self.variants[LIBRARY_STATS] = lambda: pieces([library_stats(grad) for grad in self._grads])
        self.variants[CASTS] = self._make_casts()
        self.variants[COPY] = self._make_copy()

    def seconds(self, first: int) -> dict[str, float]:
        """Of one call of every variant, the mean of `calls`. They run in turn, the `first`th before the others."""
        names = [*self.variants]
        names = names[first % len(names) :] + names[: first % len(names)]
        return {name: self._time(self.variants[name]) for name in names}

    def num_params(self) -> int:
        return self.layout.padded_numel

    def _time(self, variant: Callable[[], object]) -> float:
        variant()  # not timed: brings in what the other variants have driven out of the caches
        start_s = time.perf_counter()
        for _ in range(self._work.calls):
            variant()
        return (time.perf_counter() - start_s) / self._work.calls

    def _draw(self, numel: int) -> Tensor:
        # Far from the subnormal numbers, which take a CPU many times as long.
        return (torch.randn(numel, generator=torch.Generator().manual_seed(0)) * 1e-2).to(self._work.dtype)

    def _make_scalars(self) -> StepScalars:
        update = torch.tensor(10.0)
        coefficients = self._optimizer.coefficients(update.double())
        return StepScalars(torch.tensor(0.5), torch.tensor(False), torch.tensor(1e-4), update, coefficients)

    def _update(self, update: Update) -> None:
        """As engine.step() does it: bucket by bucket, run by run."""
        for bucket, half in enumerate(self._half):
            master, states = self._shard.master[bucket], self._shard.states[bucket]
            for run in self._shard.runs[bucket]:
                part = slice(run.start, run.end)
                run_states = tuple(state[part] for state in states)
                update(self._grads[bucket][part], master[part], run_states, half[part], run.group, self._scalars)

    def _make_casts(self) -> Callable[[], None]:
        """Cast the gradients to FP32, torch's fused AdamW, cast the masters to half. It neither unscales nor clips."""
        grads32 = [grad.float() for grad in self._grads]
        params: list[list[Tensor]] = [[] for _ in self._groups]
        for master, grad32, runs in zip(self._shard.master, grads32, self._shard.runs, strict=True):
            for run in runs:
                param = master[run.start : run.end]
                param.grad = grad32[run.start : run.end]
                params[run.group].append(param)
        optimizer = torch.optim.AdamW(
            [
                {"params": members, "weight_decay": group.weight_decay}
                for members, group in zip(params, self._groups, strict=True)
            ],
            lr=1e-4, betas=self._optimizer.betas, eps=self._optimizer.eps, fused=True,
        )  # fmt: skip

        def casts() -> None:
            for grad32, grad in zip(grads32, self._grads, strict=True):
                grad32.copy_(grad)
            optimizer.step()
            for half, master in zip(self._half, self._shard.master, strict=True):
                half.copy_(master)

        return casts

    def _make_copy(self) -> Callable[[], Tensor]:
        """An FP32 copy that reads and writes as many bytes as the update."""
        source = torch.ones(BYTES_PER_PARAM * self.num_params() // 8)
        target = torch.zeros_like(source)
        return lambda: target.copy_(source)
