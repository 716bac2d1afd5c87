"""The passes of a step's micro-batches through a pipeline's stages, by torch.distributed.pipelining's schedules.

The schedule decides when this rank runs which stage on which micro-batch. The engine is notified of each backward pass,
and collects its gradients as it does without a pipeline. The schedule scales no gradient (`scale_grads=False`): the
last stage multiplies each loss by the loss scale, and the update averages.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble

from megamix.config import evaluated_at_once
from megamix.data.loader import Batch, joined
from megamix.mixed_precision.engine import ShardedEngine
from megamix.model.decoder import Decoder
from megamix.parallel.micro_batch_runner import MicroBatch, MicroBatchRunner
from megamix.parallel.stages import Stage, StagePlan

SCHEDULES: dict[str, Callable[..., Any]] = {
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv_zero_bubble": ScheduleZBVZeroBubble,
}


class Pipeline(MicroBatchRunner):
    """Runs the stages of this rank. Every rank of the pipeline has such an object, and all make each call together.
    Calls with another number of micro-batches set up stages anew.
    """

    def __init__(
        self,
        engine: ShardedEngine,
        model: Decoder,
        plans: Sequence[StagePlan],
        schedule: str,
        micro_batch_size: int,
        parts_in_training: int = 1,
    ):
        """Make the stages. `plans`: of all stages. `parts_in_training`: the equal parts into which training divides
        this rank's positions again, and of which it hands over one.
        """
        super().__init__(engine)
        own = model.config.seq_len // engine.topology.cp.size

        def build(positions: int, count: int) -> Any:
            stages = [*_stages(engine, model, plans, micro_batch_size, positions)]
            stage_or_stages = stages[0] if schedule == "1f1b" else stages
            return SCHEDULES[schedule](stage_or_stages, count, self._loss, scale_grads=False)

        # Training and evaluation may have different shapes, and torch would set up a common schedule again at each
        # change. A cache of one is dropped with its buffers, where the number of micro-batches changes.
        self._training = lru_cache(1)(partial(build, own // parts_in_training))
        self._evaluation = lru_cache(1)(partial(build, own))
        self._weights: Iterator[float] = iter(())

    def forward_backward(self, micro_batches: Iterable[MicroBatch]) -> None:
        batches, seeds = zip(*micro_batches, strict=True)
        # Outside of the stages' passes this rank waits for other stages.
        with self.engine.clock.span("exposed_pipeline"), self.engine.micro_batches(len(batches)):
            self._run(self._training(len(batches)).step, batches, seeds)

    def _losses(self, batches: Iterable[Batch]) -> Iterator[tuple[Tensor, float]]:
        batches = [*batches]
        # torch keeps a buffer for each arriving micro-batch, and sent outputs until the next call. So a call gets few.
        count = evaluated_at_once(len(batches), self.engine.topology.pp.size)
        for first in range(0, len(batches), count):
            part, losses = batches[first : first + count], list[Tensor]()
            self._run(self._evaluation(count).eval, part, [None], losses=losses)
            # Ranks without the last stage know no loss.
            yield from zip(losses, (batch.weight for batch in part), strict=False)

    def _run(
        self, call: Callable[..., Any], batches: Sequence[Batch], seeds: Sequence[int | None], **more: Any
    ) -> None:
        # torch cuts the joined batch into micro-batches again. Every rank has the whole batch, though the middle stages
        # use only the positions.
        tokens, targets, positions, _, _, deal = joined(batches)
        self._weights = iter([batch.weight for batch in batches])
        if positions is not None:
            more |= {"positions": positions, "num_documents": max(batch.num_documents for batch in batches)}
        more |= {} if deal is None else {"deal": deal}
        more |= {} if seeds[0] is None else {"seed": torch.tensor(seeds, dtype=torch.uint64)}
        call(tokens, target=targets, targets=targets, return_outputs=False, **more)

    def _loss(self, loss: Tensor, targets: Tensor) -> Tensor:
        """Return the scaled loss to back-propagate. `loss`: the last stage's result. torch calls it in the order of the
        micro-batches.
        """
        if not torch.is_grad_enabled():
            return loss
        # Not `counts_loss`: in a V-shaped schedule the first rank has the last stage. torch calls this method only on
        # the rank that has the last stage.
        counts = self.engine.topology.counts_sums
        return self.engine.progress.scaled(loss, next(self._weights), counts=counts)


def _stages(
    engine: ShardedEngine, model: Decoder, plans: Sequence[StagePlan], micro_batch_size: int, positions: int
) -> Iterator[PipelineStage]:
    """Yield this rank's stages. `positions`: of the hidden states that each stage sends to the next one."""
    names = {param: name for name, param in model.named_parameters()}
    # A tied table's reduction begins only when the whole schedule is over. Otherwise one rank would send an activation
    # gradient before the reduction and its peer after it. NCCL matches sends and reductions by their order, so both
    # ranks would wait for ever.
    here = {*engine.topology.stage.ranks}
    shared = (bucket for bucket in engine.buckets if {*bucket.owners.axis.ranks} - here)
    done = {name for bucket in shared for name in bucket.named_params}
    # Backward of the last micro-batch runs a rank's last stage first. If two stages of a rank use a tied table, its
    # gradient is complete after the lower stage.
    # With these shapes torch need not run every stage once to learn them.
    tokens = torch.empty(micro_batch_size, model.config.seq_len, dtype=torch.int64, device="meta")
    shape, dtype = (micro_batch_size, positions, model.config.hidden_size), engine.plan.precision.dtype
    hidden = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
    loss = torch.empty((), device="meta", requires_grad=True)
    topology = engine.topology
    for number, plan in enumerate(plans):
        if plan.rank == topology.pp.rank:
            module = Stage(model, plan.layers)
            own = [names[param] for param in module.parameters()]
            ends = tokens if module.is_first else hidden, loss if module.is_last else hidden
            stage = _EngineStage(module, number, len(plans), engine.device, *ends, group=topology.pp.group)
            stage.engine, stage.names, stage.completes = engine, own, {*own} - done
            yield stage
            done.update(own)


class _EngineStage(PipelineStage):
    """A stage that tells the engine of its backward passes.

    A full backward fires the ready hooks. A split backward does not: its second half puts the weights' gradients into
    `param.grad` (torch 2.13, `stage_backward_weight`). There the micro-batches would be added up in half, even if the
    engine accumulates in FP32. So the engine collects the gradients from `param.grad` after each second half.
    """

    engine: ShardedEngine
    names: Sequence[str]  # of its parameters
    completes: Collection[str]  # those whose gradients are complete after its last backward

    # Each pass is a span of its own, so the watchdog sees progress within a step of many micro-batches.

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.engine.clock.span("forward_backward", f" of stage {self.stage_index}"):
            return super().forward_one_chunk(*args, **kwargs)

    @contextmanager
    def _backward_pass(self, micro_batch: int, completes: Collection[str], loss: Any = None) -> Iterator[None]:
        span = self.engine.clock.span("forward_backward", f" of stage {self.stage_index}")
        with span, self.engine.backward_pass(micro_batch, completes, loss):
            yield

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        with self._backward_pass(bwd_chunk_id, self.completes if full_backward and last_backward else (), loss):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with self._backward_pass(bwd_chunk_id, self.completes if last_backward else ()):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
            self.engine.collect(self.names)

    # Between stages of one rank torch 2.13 hands over gradients even if there is no backward, as in `eval`. Then these
    # two methods hand over nothing.
    def get_local_bwd_output(self, mb_index: int) -> Any:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()  # type: ignore[no-untyped-call]

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)
