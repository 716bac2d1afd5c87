"""Ours where ranks divide the model: by tensors, or in a pipeline of stages."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megamix.bench.engines import Ours, Work, make_engine
from megamix.comm.topology import Topology
from megamix.data.loader import Batch
from megamix.mixed_precision.settings import Precision, Sharding
from megamix.parallel.build import build_model
from megamix.parallel.passes import MicroBatch
from megamix.parallel.pipeline_parallel import Handover, Pipeline
from megamix.parallel.stages import plan_stages

CPU = torch.device("cpu")
SCHEDULE = "1f1b"


class OursTensorParallel(Ours):
    """megamix with every rank in one tensor-parallel axis."""

    def __init__(self, work: Work, dtype: torch.dtype = torch.bfloat16, *, sequence_parallel: bool = True):
        topology = Topology.connect(tp_size=dist.get_world_size())
        torch.manual_seed(1234)  # as make_model
        model, placements = build_model(work.model, topology, CPU, sequence_parallel=sequence_parallel)
        sharding = Sharding(units=[*model.blocks], topology=topology, placements=placements)
        self.engine = make_engine(work, model, Precision(dtype), sharding)


class OursPipeline(Ours):
    """megamix with one stage on each rank."""

    def __init__(self, work: Work, dtype: torch.dtype = torch.bfloat16):
        topology = Topology.connect(pp_size=dist.get_world_size())
        stages = plan_stages(work.model, topology.pp.size, 1)
        torch.manual_seed(1234)
        model, placements = build_model(work.model, topology, CPU, stages, sequence_parallel=False)
        sharding = Sharding(units=[*model.blocks], topology=topology, placements=placements)
        self.engine = make_engine(work, model, Precision(dtype), sharding)
        own = {topology.pp.rank: stages[topology.pp.rank].layers}
        handover = Handover(topology.pp, len(stages), (work.micro_batch_size, work.model.seq_len))
        self._pipeline = Pipeline(self.engine, model, own, SCHEDULE, handover)
        self._micro_batches = work.micro_batches

    def forward_backward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        parts = zip(tokens.chunk(self._micro_batches), targets.chunk(self._micro_batches), strict=True)
        self._pipeline.backward(MicroBatch(Batch(*part, None, part[1].numel())) for part in parts)
        return self.engine.accumulation.loss_sum / self._micro_batches
