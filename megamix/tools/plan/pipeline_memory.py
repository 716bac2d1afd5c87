"""Memory of a pipeline's rank beside the parameters that it trains, counted without ranks and without memory.

Each stage is traced for one micro-batch (megamix/tools/plan/activations.py). The bytes of the micro-batches in flight
are added up in the order of the schedule's own timetable.
"""

from __future__ import annotations

import math
from functools import cache
from types import SimpleNamespace
from typing import NamedTuple

from megamix.config import evaluated_at_once, ranks_along
from megamix.parallel.stages import StagePlan
from megamix.tools.plan.activations import Activations, TracedWork, trace_stage

FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = "F", "B", "I", "W"
_ACTIONS = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)


@cache  # one schedule has the timetables of all ranks
def timetables(schedule: str, stage_ranks: tuple[int, ...], micro_batches: int) -> list[list[tuple[str, int]]]:
    """Return (pass, stage) of each rank in the order in which it runs them in a step, from torch's own schedule.

    `stage_ranks`: rank of each stage.
    """
    # torch's pipelines import the compiler, which takes 2 s. Jobs without a pipeline do not wait for that.
    from megamix.parallel.pipeline_parallel import SCHEDULES

    num_stages, ranks = len(stage_ranks), 1 + max(stage_ranks)
    own = [
        # A schedule's constructor asks a stage for these attributes only.
        SimpleNamespace(stage_index=index, num_stages=num_stages, group_size=ranks, group_rank=0, submod=None)
        for index in range(num_stages)
        if stage_ranks[index] == 0
    ]
    built = SCHEDULES[schedule](own[0] if schedule == "1f1b" else own, micro_batches)
    orders = [filter(None, built.pipeline_order[rank]) for rank in range(ranks)]
    passes = [[(str(action.computation_type.value), action.stage_index) for action in order] for order in orders]
    return [[one for one in order if one[0] in _ACTIONS] for order in passes]


class PipelineRank(NamedTuple):
    """One rank of a pipeline, and the passes that it runs in a step."""

    work: TracedWork  # work of one micro-batch in a stage
    stages: list[StagePlan]  # stages of all ranks
    pp_rank: int
    schedule: str
    micro_batches: int  # micro-batches of a step

    def timetable(self) -> list[tuple[str, int]]:
        """Return (pass, stage) in the order in which the rank runs them in a step."""
        return timetables(self.schedule, tuple(plan.rank for plan in self.stages), self.micro_batches)[self.pp_rank]

    def held_buffers(self) -> int:
        """Return the bytes that torch keeps from step to step.

        They are the arriving tensors of each stage and micro-batch, and the gradients that a backward in halves leaves
        at a stage until the next step begins.
        """
        ends = sum((index > 0) + (index < len(self.stages) - 1) for index in self._own())
        return (ends * self.micro_batches + self._left_gradients()) * self._bytes(self.work.hidden)

    def evaluation_buffers(self) -> int:
        """Return the further bytes kept from the first evaluation on: the batches, what arrives and what was sent."""
        ends = sum((index > 0) + self._is_sent(index) for index in self._own())
        at_once = evaluated_at_once(self.micro_batches, 1 + max(plan.rank for plan in self.stages))
        rows, positions = self.work.batch  # context-parallel ranks divide the positions, and no others do
        shape = rows, positions // ranks_along(self.work.division, "cp"), self.work.model.hidden_size
        return at_once * (ends * self._bytes(shape) + self.work.batch_bytes)

    def activations(self) -> Activations:
        """Return the bytes of a step's activations on this rank, beside the bytes that it holds."""
        hidden, looped, last = self._bytes(self.work.hidden), self.schedule != "1f1b", len(self.stages) - 1
        traced = [
            trace_stage(self.work, plan.layers, is_first=index == 0, is_last=index == last)
            for index, plan in enumerate(self.stages)
        ]
        # The step's batches count one by one and joined. Gradients left by the step before are freed as it begins.
        live = 2 * self.micro_batches * self.work.batch_bytes - self._left_gradients() * hidden
        most, at_most, blocks, has_sent = {FORWARD: 0, BACKWARD: 0}, (0, 0), 0, False
        for kind, index in self.timetable():
            stage = traced[index]
            had, has, top = {
                FORWARD: (0, stage.kept, stage.forward),
                BACKWARD: (stage.kept, 0, stage.backward),
                BACKWARD_INPUT: (stage.kept, stage.between, stage.input),
                BACKWARD_WEIGHT: (stage.between, 0, stage.weight),
            }[kind]
            phase = FORWARD if kind == FORWARD else BACKWARD
            blocks += stage.blocks if kind == FORWARD else 0
            if live - had + top > max(most.values()):
                at_most = blocks, live + max(0, has - had) - blocks
            most[phase] = max(most[phase], live - had + top)
            live += has - had
            if kind == FORWARD and index < last and not self._is_sent(index):
                live -= hidden  # the output is the next stage's input; the buffer held for it is freed
            elif has == 0:
                blocks -= stage.blocks
                live += hidden if looped and index < last else 0  # a sent or handed-over output stays until a step ends
            if kind in (BACKWARD, BACKWARD_INPUT) and self._is_sent(index - 1) and (looped or not has_sent):
                live, has_sent = live + hidden, True  # the sent gradient; 1F1B waits for it before it sends another
        moved = sum(traced[index].moved for index in self._own())
        return Activations(*at_most, most[FORWARD], most[BACKWARD], most[BACKWARD], moved)

    def _own(self) -> list[int]:
        return [index for index, plan in enumerate(self.stages) if plan.rank == self.pp_rank]

    def _bytes(self, hidden: tuple[int, int, int]) -> int:
        return self.work.dtype.itemsize * math.prod(hidden)

    def _left_gradients(self) -> int:
        """Return how many gradients of inputs the halves of backward leave.

        Within a rank such gradients are the buffers of the stage before.
        """
        return sum(kind == BACKWARD_INPUT and self._is_sent(index - 1) for kind, index in self.timetable())

    def _is_sent(self, index: int) -> bool:
        """Return whether that stage's output goes to another rank. There is no stage -1."""
        return 0 <= index < len(self.stages) - 1 and self.stages[index].rank != self.stages[index + 1].rank
