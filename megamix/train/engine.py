"""The engine of a job, as its configuration says: for the job itself, and for a tool that takes its steps by hand."""

import torch

from megamix.comm.topology import Topology
from megamix.config import Config, axis_sizes, grad_accum_steps, ranks_along
from megamix.mixed_precision.average import WeightAverage
from megamix.mixed_precision.engine import ShardedEngine
from megamix.mixed_precision.settings import Sharding
from megamix.mixed_precision.weights import Fill
from megamix.parallel.build import ModelPart
from megamix.parallel.micro_batch_runner import MicroBatchRunner
from megamix.train.objects import build_optimizer, build_precision


class JobEngine(ShardedEngine):
    """The engine that trains this rank's part of a job's model, with the average of its weights if there is one."""

    def __init__(self, config: Config, part: ModelPart, topology: Topology, fill: Fill):
        """Take the part's weights over. Every rank must call it."""
        section = config.parallelism
        sharding = Sharding(
            units=part.module.units, topology=topology, bucket_size=section.bucket_size, overlap=section.overlap,
            placements=part.placements, shard=section.shard, accumulate=section.accumulate,
        )  # fmt: skip
        super().__init__(
            part.module,
            build_optimizer(config),
            build_precision(config.precision),
            sharding,
            clip_grad=config.optimizer.clip_grad,
            grad_accum_steps=grad_accum_steps(config, topology.dp.size),
            compile_update=config.optimizer.compile,
            fill=fill,
        )
        if config.training.average is not None:
            WeightAverage(self, config.training.average.decay)


def build_training(config: Config, device: torch.device) -> MicroBatchRunner:
    """Return the runner of a job that begins, with its engine and the model's initial weights, without the job. Every
    rank must call it.
    """
    section = config.parallelism
    topology = Topology.connect(ep_size=ranks_along(section, "ep"), **axis_sizes(section))
    part = ModelPart(config.model, section, config.precision.fp8, topology, device)
    engine = JobEngine(config, part, topology, part.first_weights(config.training.seed, packed=False))
    return part.runner(engine, config.training.micro_batch_size)
