"""Sides in which ranks divide the model, by tensors or by stages, or the positions of sequences.

Ours stands beside torch's own or, for positions, beside ours with data-parallel ranks. torch's are `parallelize_module`
and its pipelines' schedules on the same model. Each runs in mixed precision, once by autocast and once by `fully_shard`
over a data-parallel axis of one rank, which also holds weights in half and casts them once a step.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megamix.comm.topology import Topology
from megamix.config import ParallelismConfig, axis_sizes
from megamix.data.loader import Batch
from megamix.mixed_precision.settings import Sharding
from megamix.model.decoder import Decoder
from megamix.parallel.build import ModelPart
from megamix.parallel.micro_batch_runner import MicroBatch
from megamix.parallel.pipeline_parallel import SCHEDULES
from megamix.parallel.stages import Stage, keep_layers, plan_stages
from megamix.tools.bench.sides import SEED, Autocast, Ours, Work, make_engine, make_model, shard_fully

SCHEDULE = "1f1b"


class OursDivided(Ours):
    """megamix on ranks of this mesh, which share their sequences or, along dp, divide them. A rank's loss is that of
    its own part: only times are compared. `tables`: of [parallelism].
    """

    def __init__(self, work: Work, **tables: Any):
        section = ParallelismConfig(**tables)
        topology = Topology.connect(**axis_sizes(section))
        part = ModelPart(work.model, section, None, topology, torch.device("cpu"))
        sharding = Sharding(units=[*part.module.blocks], topology=topology, placements=part.placements)
        self.engine = make_engine(work, part.module, sharding, part.first_weights(SEED, packed=False))
        self._runner = part.runner(self.engine, work.micro_batch_size)
        self.micro_batches = work.micro_batches

    def forward_backward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        dp, parts = self.engine.topology.dp, self.engine.topology.parts
        own = (x.chunk(dp.size)[dp.rank].chunk(self.micro_batches) for x in (tokens, targets))
        batches = (Batch(x, y, None, y.numel()) for x, y in zip(*own, strict=True))
        self._runner.forward_backward(map(MicroBatch, batches))
        return self.engine.progress.loss_sum * parts.size / self.micro_batches


class TorchTensorParallel(Autocast):
    """`parallelize_module` with sequence and loss parallelism, as torch's tutorial divides a Llama.

    It uses autocast or, if `sharded`, `fully_shard`.
    """

    def _make_model(self, work: Work, sharded: bool = False, **settings: Any) -> nn.Module:
        mesh = _mesh("tp")
        # torch's own operations: DTensor would dispatch every step of our FP32 sums by itself.
        model = make_model(work, wide=False)
        _divide(model, mesh["tp"])
        if sharded:
            shard_fully(model, model.blocks, mesh["dp"], self._dtype)
            self._dtype = torch.float32  # nothing is left for autocast
        return model

    def forward_backward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        from torch.distributed.tensor.parallel import loss_parallel

        with loss_parallel():
            with torch.autocast("cpu", self._dtype, enabled=self._dtype != torch.float32):
                logits = self.model(tokens)
            loss: Any = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
            loss.backward()
        whole: Tensor = loss.detach().full_tensor()
        return whole


class TorchPipeline(Autocast):
    """Our schedule on the same stages, by torch. Every rank takes part in the norm.

    It uses autocast or, if `sharded`, `fully_shard` with weights that stay gathered over the micro-batches.
    """

    def _make_model(self, work: Work, sharded: bool = False, **settings: Any) -> nn.Module:
        mesh, rank = _mesh("pp"), dist.get_rank()
        layers = plan_stages(work.model, dist.get_world_size(), 1)[rank].layers
        model = make_model(work)
        keep_layers(model, layers)
        part = Stage(model, layers)
        if sharded:
            blocks = [model.blocks[layer] for layer in layers]
            shard_fully(part, blocks, mesh["dp"], work.half, reshard_after_forward=False)
            self._dtype = torch.float32  # nothing is left for autocast
        stage = dist.pipelining.PipelineStage(
            part, rank, dist.get_world_size(), torch.device("cpu"), group=mesh["pp"].get_group()
        )
        count = work.micro_batches
        # Cheaper than dividing the gradients, as the schedule would.
        self._schedule = SCHEDULES[SCHEDULE](stage, count, lambda loss, _: loss / count, scale_grads=False)
        return part

    def forward_backward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        losses = list[Tensor]()
        # One autocast around all micro-batches casts the weights once.
        with torch.autocast("cpu", self._dtype, enabled=self._dtype != torch.float32):
            inputs = (tokens,) if self.model.is_first else ()  # torch 2.11 refuses them elsewhere
            self._schedule.step(*inputs, target=targets, targets=targets, losses=losses, return_outputs=False)
        return torch.stack(losses).sum().detach() if losses else torch.zeros(())

    def optimize(self) -> None:
        params = [*self.model.parameters()]
        norm: Any = torch.nn.utils.get_total_norm([param.grad for param in params if param.grad is not None])
        squares = (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).square()
        dist.all_reduce(squares)  # over the stages
        torch.nn.utils.clip_grads_with_norm_(params, self._clip_grad, squares.sqrt())
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def _mesh(name: str) -> Any:
    """Return a mesh of all ranks in one axis of that name, beside a data-parallel axis of one rank."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", name))


def _divide(model: Decoder, tp: Any) -> None:
    from torch.distributed.tensor import Replicate, Shard, parallel

    positions, columns = Shard(1), parallel.ColwiseParallel
    whole: Any = parallel.PrepareModuleInput  # the first input of a divided part is needed whole
    rows = parallel.RowwiseParallel(output_layouts=positions)
    plan = {
        "embedding": parallel.RowwiseParallel(input_layouts=Replicate(), output_layouts=positions),
        "blocks.*.attention_norm": parallel.SequenceParallel(),
        "blocks.*.attention": whole(
            input_layouts=(positions, None, None, None), desired_input_layouts=(Replicate(), None, None, None)
        ),
        **{f"blocks.*.attention.{name}": columns() for name in ("query", "key", "value")},
        "blocks.*.attention.out": rows,
        "blocks.*.feed_forward_norm": parallel.SequenceParallel(),
        "blocks.*.feed_forward": whole(input_layouts=(positions,), desired_input_layouts=(Replicate(),)),
        **{f"blocks.*.feed_forward.{name}": columns() for name in ("gate", "up")},
        "blocks.*.feed_forward.down": rows,
        "norm": parallel.SequenceParallel(),
        "head": columns(input_layouts=positions, output_layouts=Shard(-1), use_local_output=False),
    }
    parallel.parallelize_module(model, tp, plan)
