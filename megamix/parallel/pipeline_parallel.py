"""A step's micro-batches through the stages of a pipeline, by torch.distributed.pipelining's schedules.

The schedule decides when this rank runs which stage on which micro-batch; the engine is told of each backward pass and
does what it does without a pipeline. Nothing is divided by the schedule (`scale_grads=False`): the loss scale is in the
loss of the last stage, once, and the average is part of the update.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble

from megamix.comm.topology import Axis
from megamix.data.loader import Batch, joined
from megamix.mixed_precision.engine import ShardedEngine
from megamix.model.decoder import Decoder
from megamix.parallel.passes import MicroBatch, Passes
from megamix.parallel.stages import Stage

SCHEDULES: dict[str, Callable[..., Any]] = {
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv_zero_bubble": ScheduleZBVZeroBubble,
}


@dataclass(frozen=True, slots=True)
class Handover:
    """What passes from a stage to the next one, the same for all: a micro-batch's hidden states and their gradient."""

    pp: Axis
    num_stages: int
    batch: tuple[int, int]  # (B, T)
    parts: int = 1  # of T, between the stages, while activations are kept for backward; of which this rank has one


class Pipeline(Passes):
    """Runs the stages of this rank; every rank of the pipeline has one and calls it together with the others.

    Every call takes as many micro-batches as a step has, `engine.grad_accum_steps`.
    """

    def __init__(
        self, engine: ShardedEngine, model: Decoder, parts: Mapping[int, range], schedule: str, handover: Handover
    ):
        """`parts`: the blocks of each of this rank's stages, by the stage's number."""
        super().__init__(engine)
        width = model.config.hidden_size
        # Two, since shapes may differ, and torch would set one up anew whenever the other use begins.
        self._training, self._evaluation = (
            self._schedule(schedule, [*_stages(engine, model, parts, handover, (handover.batch[0], positions, width))])
            for positions in (handover.batch[1] // handover.parts, handover.batch[1])
        )
        self._weights: Iterator[float] = iter(())

    def _schedule(self, name: str, stages: list[PipelineStage]) -> Any:
        stage_or_stages = stages[0] if name == "1f1b" else stages
        return SCHEDULES[name](stage_or_stages, self.engine.grad_accum_steps, self._loss, scale_grads=False)

    def backward(self, micro_batches: Iterable[MicroBatch]) -> None:
        batches, seeds = zip(*micro_batches, strict=True)
        with self.engine.clock.span("forward_backward"), self.engine.micro_batches(len(batches)):
            self._run(self._training.step, batches, seeds)

    def _losses(self, batches: Iterable[Batch]) -> Iterator[tuple[Tensor, float]]:
        batches, losses = [*batches], list[Tensor]()
        self._run(self._evaluation.eval, batches, [None], losses=losses)
        # No loss is known on ranks without the last stage.
        yield from zip(losses, (batch.weight for batch in batches), strict=False)

    def _run(
        self, call: Callable[..., Any], batches: Sequence[Batch], seeds: Sequence[int | None], **more: Any
    ) -> None:
        # torch cuts them apart again. Every rank has them all; those in the middle use positions alone.
        tokens, targets, positions, *_ = joined(batches)
        self._weights = iter([batch.weight for batch in batches])
        if positions is not None:
            more |= {"positions": positions, "num_documents": max(batch.num_documents for batch in batches)}
        more |= {} if seeds[0] is None else {"seed": torch.tensor(seeds, dtype=torch.uint64)}
        call(tokens, target=targets, targets=targets, return_outputs=False, **more)

    def _loss(self, loss: Tensor, targets: Tensor) -> Tensor:
        """What is to be back-propagated of a last stage's result, which is the loss; called in the order of the
        micro-batches.
        """
        if not torch.is_grad_enabled():
            return loss
        # On a V the last stage is not the last rank's: only that this one has it says so.
        counts = self.engine.topology.tp.rank == 0
        return self.engine.progress.scaled(loss, next(self._weights), counts=counts)


def _stages(
    engine: ShardedEngine, model: Decoder, parts: Mapping[int, range], handover: Handover, hidden: tuple[int, ...]
) -> Iterator[PipelineStage]:
    names = {param: name for name, param in model.named_parameters()}
    # A tied table's sum begins when the whole schedule is over: one rank would send a gradient before it and the other
    # after it, and where sends and sums are matched by their order (NCCL) both would wait for ever.
    here = {*engine.topology.stage.ranks}
    shared = (bucket for bucket in engine.buckets if {*bucket.owners.axis.ranks} - here)
    done = {name for bucket in shared for name in bucket.named_params}
    # The last micro-batch leaves a rank's stages from the last one to the first: a tied table that two of them use is
    # whole when the first of them is done.
    for number in sorted(parts):
        module = Stage(model, parts[number])
        own = [names[param] for param in module.parameters()]
        yield _EngineStage(engine, module, number, handover, hidden, own, {*own} - done)
        done.update(own)


class _EngineStage(PipelineStage):
    """A stage whose backward passes the engine takes note of.

    A full backward fires the ready hooks. The halves of a split one do not: the second puts the weights' gradients
    into `param.grad` (torch 2.13, `stage_backward_weight`), and would add up micro-batches there, in half whatever the
    engine adds up in. So they are taken from there after each.
    """

    def __init__(
        self, engine: ShardedEngine, module: Stage, number: int, handover: Handover, shape: tuple[int, ...],
        names: Sequence[str], completes: Collection[str],
    ):  # fmt: skip
        # Told the shapes, torch need not run every stage once to learn them.
        hidden = torch.empty(shape, dtype=engine.plan.precision.dtype, device="meta", requires_grad=True)
        tokens = torch.empty(handover.batch, dtype=torch.int64, device="meta")
        loss = torch.empty((), device="meta", requires_grad=True)
        super().__init__(
            module, number, handover.num_stages, engine.device,
            tokens if module.is_first else hidden, loss if module.is_last else hidden, group=handover.pp.group,
        )  # fmt: skip
        self._engine, self._names, self._completes = engine, names, completes

    # A span for each: a step of many micro-batches is not one place for the watchdog.

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self._engine.clock.span("forward_backward"):
            return super().forward_one_chunk(*args, **kwargs)

    @contextmanager
    def _backward_pass(self, micro_batch: int, completes: Collection[str]) -> Iterator[None]:
        with self._engine.clock.span("forward_backward"), self._engine.backward_pass(micro_batch, completes):
            yield

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        with self._backward_pass(bwd_chunk_id, self._completes if full_backward and last_backward else ()):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with self._backward_pass(bwd_chunk_id, self._completes if last_backward else ()):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
            self._engine.collect(self._names)

    # Between stages of one rank torch 2.13 asks for gradients to hand over without a backward (`eval`), too.
    def get_local_bwd_output(self, mb_index: int) -> Any:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()  # type: ignore[no-untyped-call]

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)
