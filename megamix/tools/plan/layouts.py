"""Ways to divide a job among a number of GPUs, with the time of each. No torch is imported to find them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, get_args

from megamix.config import Config, FirstLayers, ParallelismConfig, PipelineConfig, axis_sizes, ranks_along, resized
from megamix.tools.plan.least_memory import LeastMemory
from megamix.tools.plan.time_constants import FittedConstants
from megamix.tools.plan.time_hardware import Hardware
from megamix.tools.plan.time_job import timed_job
from megamix.tools.plan.time_model import StepTime, step_time
from megamix.tools.plan.time_work import TimedJob

# Positions of a sequence on each context-parallel rank, at least: the model hides none of their traffic.
LEAST_POSITIONS = 4096
STAGES: dict[Any, tuple[int, ...]] = {
    "1f1b": (1,),
    "interleaved_1f1b": (2, 4),
    "interleaved_zero_bubble": (2,),
    "zbv_zero_bubble": (2,),
}
SCHEDULES = [(name, count) for name, counts in STAGES.items() for count in counts]
SHARDS = get_args(ParallelismConfig.model_fields["shard"].annotation)


class TimedLayout(NamedTuple):
    """One division of a job."""

    config: Config
    job: TimedJob
    time: StepTime


@dataclass(frozen=True)
class LayoutSearch:
    """Layouts of one job on one machine, for any number of GPUs."""

    config: Config
    hardware: Hardware
    constants: FittedConstants
    limit: int  # bytes that a GPU may hold

    def layouts(self, gpus: int) -> list[TimedLayout]:
        """Return those whose least memory fits, the fastest first."""
        found = (layout for mesh in self.meshes(gpus) for layout in self._fitting(mesh))
        return sorted(found, key=lambda layout: layout.time.seconds)

    def meshes(self, gpus: int) -> Iterator[dict[str, Any]]:
        """Yield the keys of [parallelism] of each mesh whose ranks can share the global batch."""
        model = self.config.model
        experts = model.experts.num_experts if model.experts else 1
        for tp in _divisors(gpus, self.hardware.node_size):
            for pp in _divisors(gpus // tp, model.num_layers):
                for cp in _divisors(gpus // tp // pp, max(1, model.seq_len // LEAST_POSITIONS)):
                    readers = gpus // tp // pp // cp
                    if self._batch % readers:
                        continue
                    in_node = max(1, self.hardware.node_size // (tp * cp))
                    for replicas in {1, readers // in_node if readers % in_node == 0 else 1}:
                        dp = readers // replicas
                        for ep in _divisors(math.gcd(experts, dp * cp), experts):
                            sizes = {"tp": tp, "cp": cp, "ep": ep, "dp": dp, "replicas": replicas}
                            keys = resized(self.config.parallelism, **sizes)
                            for pipeline in _pipelines(pp):
                                yield keys | {"pipeline": pipeline}

    @cached_property
    def _batch(self) -> int:
        """Sequences that every global batch of the job is a multiple of."""
        return math.gcd(*(size for _, size in self.config.pace.sizes))

    def _fitting(self, mesh: dict[str, Any]) -> Iterator[TimedLayout]:
        """Yield the layouts of a mesh. Larger micro-batches are tried until they cost time or memory."""
        share = self._batch // (mesh["dp_size"] * mesh["replicas"])
        best = math.inf
        for size in (2**power for power in range((share & -share).bit_length())):  # each divides the share
            config = self.config.with_keys(parallelism=mesh, training={"micro_batch_size": size})
            layouts = [*self._with_shards(config, SHARDS)]
            yield from layouts
            before, best = best, min((layout.time.seconds for layout in layouts), default=math.inf)
            if best >= before:
                break

    def _with_shards(self, config: Config, shards: Sequence[str], more: int = 0) -> Iterator[TimedLayout]:
        """Yield a layout for each setting of `shard` that saves work: those that save memory send more. `more`: bytes
        that are needed beside the least.
        """
        done = list[object]()
        for shard in shards:
            sharded = config.with_keys(parallelism={"shard": shard})
            for recompute in self._recomputes(sharded, more):
                if recompute not in done:
                    done.append(recompute)
                    layout = sharded.with_keys(model={"recompute": recompute})
                    job = timed_job(layout, config.parallelism.dp_size or 1)
                    yield TimedLayout(layout, job, step_time(job, self.hardware, self.constants.values))
            if "none" in done:
                return

    def after(self, layout: TimedLayout, peak: int) -> Iterator[TimedLayout]:
        """Yield the layouts to try instead of one whose traced `peak` does not fit: the same mesh with less memory."""
        more = peak - LeastMemory(layout.config, layout.job.dp).peak()
        yield from self._with_shards(layout.config, SHARDS[SHARDS.index(layout.config.parallelism.shard) :], more)

    def _recomputes(self, config: Config, more: int) -> Iterator[str | FirstLayers]:
        """Yield what must be computed again, the least of each kind that fits."""
        least, limit = LeastMemory(config, config.parallelism.dp_size or 1), self.limit - more
        if least.of("none") <= limit:
            yield "none"
            return
        if least.of("selective") <= limit:
            yield "selective"
        if (fewest := least.fewest_first(limit)) is not None:
            # In a pipeline the first layers alone would slow the first rank, for which all others wait.
            every = fewest >= config.model.num_layers or config.parallelism.pipeline is not None
            yield "full" if every else FirstLayers(full=fewest)


def _pipelines(size: int) -> list[PipelineConfig | None]:
    """Return the pipelines of so many ranks, one for each schedule; none for one rank."""
    if size == 1:
        return [None]
    return [PipelineConfig(size=size, schedule=schedule, stages_per_rank=count) for schedule, count in SCHEDULES]


def mesh_text(config: Config) -> str:
    ranks, model = config.parallelism, config.model
    sizes = {"dp": ranks.dp_size or 1, **axis_sizes(ranks), "ep": ranks_along(ranks, "ep")}
    mesh = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "1 rank"
    full = model.recompute
    again = f"{full.full:g} layers" if isinstance(full, FirstLayers) else full
    text = f"{mesh}, {ranks.shard}, recompute {again}, micro-batch {config.training.micro_batch_size}"
    pipeline = ranks.pipeline
    return f"{text}, {pipeline.schedule} x {pipeline.stages_per_rank}" if pipeline else text


def _divisors(number: int, most: int) -> list[int]:
    return [size for size in range(1, min(number, most) + 1) if number % size == 0]
