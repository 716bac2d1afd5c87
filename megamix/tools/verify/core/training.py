"""The engine of a job without the job: what a tool steps by hand."""

import torch

from megamix.builders.objects import build_optimizer, build_precision
from megamix.comm.topology import Topology
from megamix.config import Config, axis_sizes, grad_accum_steps, ranks_along
from megamix.mixed_precision.average import WeightAverage
from megamix.mixed_precision.engine import ShardedEngine
from megamix.mixed_precision.settings import Sharding
from megamix.parallel.build import ModelPart
from megamix.parallel.micro_batch_runner import MicroBatchRunner


def build_training(config: Config, device: torch.device) -> MicroBatchRunner:
    """Return the runner of a job that begins, with its engine and the model's initial weights. Every rank must call
    it.
    """
    section, optimizer, pace = config.parallelism, config.optimizer, config.pace
    topology = Topology.connect(ep_size=ranks_along(section, "ep"), **axis_sizes(section))
    part = ModelPart(config.model, section, config.precision.fp8, topology, device)
    engine = ShardedEngine(
        part.module,
        build_optimizer(optimizer, config.model, config.lr_schedule, pace),
        build_precision(config.precision),
        Sharding(
            units=part.module.units, topology=topology, bucket_size=section.bucket_size, overlap=section.overlap,
            placements=part.placements, shard=section.shard, accumulate=section.accumulate,
        ),
        clip_grad=optimizer.clip_grad,
        grad_accum_steps=grad_accum_steps(config, topology.dp.size),
        compile_update=optimizer.compile,
        fill=part.first_weights(config.training.seed, packed=False),
    )  # fmt: skip
    if config.training.average is not None:
        WeightAverage(engine, config.training.average.decay)
    return part.runner(engine, pace.micro_batch_size)
