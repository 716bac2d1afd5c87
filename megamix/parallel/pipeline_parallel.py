"""A step's micro-batches through the stages of a pipeline, by torch.distributed.pipelining's schedules.

The schedule decides when this rank runs which stage on which micro-batch; the engine learns of each backward pass and
does what it does without a pipeline. Nothing is divided by the schedule (`scale_grads=False`): the loss scale is in the
loss of the last stage, once, and the average is the update's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble

from megamix.comm.topology import Axis
from megamix.mixed_precision.engine import ShardedEngine
from megamix.model.transformer import Transformer
from megamix.parallel.stages import Stage

SCHEDULES: dict[str, type] = {
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv_zero_bubble": ScheduleZBVZeroBubble,
}


class Pipeline:
    """Every rank of a pipeline has one, and calls it together with the others.

    `parts`: the blocks of each of this rank's stages, by the stage's number, of `num_stages`. A step has
    `engine.grad_accum_steps` micro-batches, and so has every other call.
    Shapes: a micro-batch is `shape`, (B, T).
    """

    def __init__(
        self, engine: ShardedEngine, model: Transformer, parts: dict[int, range], num_stages: int, schedule: str,
        pp: Axis, shape: tuple[int, int],
    ):  # fmt: skip
        self._engine = engine
        names = {param: name for name, param in model.named_parameters()}
        done: set[str] = set()
        stages = []
        # A rank's stages finish their last micro-batch from the last one to the first: a tied table that two of them
        # use is whole when the first of them has.
        for number in sorted(parts):
            module = Stage(model, parts[number])
            own = [names[param] for param in module.parameters()]
            stages.append(_EngineStage(engine, module, own, {*own} - done, number, num_stages, pp, shape))
            done.update(own)
        kind = SCHEDULES[schedule]
        self._schedule = kind(
            stages[0] if kind is Schedule1F1B else stages, engine.grad_accum_steps, loss_fn=self._loss,
            scale_grads=False,
        )  # fmt: skip

    def backward(
        self, batches: Sequence[tuple[Tensor, Tensor, Tensor | None]], seeds: Sequence[int] | None = None
    ) -> None:
        """All micro-batches of a step: what `engine.backward(engine(...))` is for each without a pipeline."""
        with self._engine.accumulate(len(batches)):
            self._run(self._schedule.step, batches, seeds)

    @torch.no_grad()
    def losses(self, batches: Sequence[tuple[Tensor, Tensor, Tensor | None]]) -> list[Tensor]:
        """Of as many micro-batches as a step has; on ranks without the last stage none."""
        losses: list[Tensor] = []
        self._run(self._schedule.eval, batches, None, losses=losses)
        return losses

    def _run(self, call: Any, batches: Any, seeds: Sequence[int] | None, **kwargs: Any) -> None:
        tokens, targets, positions = zip(*batches, strict=True)
        if positions[0] is not None:
            kwargs["positions"] = torch.cat(positions)
        if seeds is not None:
            kwargs["seed"] = torch.tensor(seeds)
        joined = torch.cat(targets)
        call(torch.cat(tokens), target=joined, targets=joined, return_outputs=False, **kwargs)

    def _loss(self, loss: Tensor, targets: Tensor) -> Tensor:
        """What the schedule back-propagates on the last stage, which has computed the loss itself."""
        return self._engine.scaled(loss) if torch.is_grad_enabled() else loss


class _EngineStage(PipelineStage):
    """A stage whose backward passes the engine takes note of.

    A full backward fires the ready hooks. The two halves of a split one do not: the second puts the weights' gradients
    into `param.grad` by itself (torch 2.13, `stage_backward_weight`), where they would be summed in half over the
    micro-batches, whatever the engine sums in; so they are taken from there after each.
    """

    def __init__(
        self, engine: ShardedEngine, module: Stage, names: Sequence[str], completes: Collection[str],
        number: int, num_stages: int, pp: Axis, shape: tuple[int, int],
    ):  # fmt: skip
        config, dtype = module.config, engine.half_params.dtype
        # Shapes are known: without these torch would run every stage once to learn them.
        hidden = torch.empty(*shape, config.hidden_size, dtype=dtype, device="meta", requires_grad=True)
        tokens = torch.empty(shape, dtype=torch.int64, device="meta")
        loss = torch.empty((), device="meta", requires_grad=True)
        device = engine.half_params.flat[0].device
        super().__init__(
            module, number, num_stages, device, input_args=hidden if number else tokens,
            output_args=loss if module.is_last else hidden, group=pp.group,
        )  # fmt: skip
        self._engine, self._names, self._completes = engine, names, completes

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        with self._engine.backward_pass(bwd_chunk_id, self._completes if full_backward and last_backward else ()):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with self._engine.backward_pass(bwd_chunk_id, self._completes if last_backward else ()):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
            self._engine.half_grads.take(self._names)

    # Between stages of one rank torch 2.13 asks for gradients to hand over without a backward (`eval`), too.
    def get_local_bwd_output(self, mb_index: int) -> Any:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()  # type: ignore[no-untyped-call]

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)
