"""The memory of a pipeline's rank beside what it trains, counted without ranks and without memory.

Each stage is traced for one micro-batch (megamix/tools/plan/activations.py). What the micro-batches in flight take is
added up in the order of the schedule's own timetable.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

from megamix.parallel.stages import StagePlan
from megamix.tools.plan.activations import Activations, TracedWork, trace_stage

FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = "F", "B", "I", "W"
_ACTIONS = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)


@cache  # one schedule has those of all ranks
def timetables(schedule: str, stage_ranks: tuple[int, ...], micro_batches: int) -> list[list[tuple[str, int]]]:
    """Return (pass, stage) of each rank in the order in which it runs them in a step, as torch's own schedule has it.
    `stage_ranks`: which rank has each stage.
    """
    # torch's pipelines import the compiler: 2 s that no job without a pipeline waits for.
    from megamix.parallel.pipeline_parallel import SCHEDULES

    num_stages, ranks = len(stage_ranks), 1 + max(stage_ranks)
    own = [
        # All that the constructor of a schedule asks of a stage.
        SimpleNamespace(stage_index=index, num_stages=num_stages, group_size=ranks, group_rank=0, submod=None)
        for index in range(num_stages)
        if stage_ranks[index] == 0
    ]
    built = SCHEDULES[schedule](own[0] if schedule == "1f1b" else own, micro_batches)
    orders = [[action for action in built.pipeline_order[rank] if action is not None] for rank in range(ranks)]
    passes = [[(str(action.computation_type.value), action.stage_index) for action in order] for order in orders]
    return [[(kind, stage) for kind, stage in order if kind in _ACTIONS] for order in passes]


@dataclass(frozen=True, slots=True)
class PipelineRank:
    """One rank of a pipeline, and what it runs in a step."""

    work: TracedWork  # of a micro-batch in a stage
    stages: list[StagePlan]  # of all ranks
    pp_rank: int
    schedule: str
    micro_batches: int  # of a step

    def timetable(self) -> list[tuple[str, int]]:
        """(pass, stage) in the order in which the rank runs them in a step."""
        return timetables(self.schedule, tuple(plan.rank for plan in self.stages), self.micro_batches)[self.pp_rank]

    def held_buffers(self) -> int:
        """Return the bytes that torch keeps from step to step: for each micro-batch what arrives at each stage, and the
        gradients that a backward in halves leaves at it until the next step begins.
        """
        ends = sum((index > 0) + (index < len(self.stages) - 1) for index in self._own())
        return (ends * self.micro_batches + self._left_gradients()) * self._bytes(self.work.hidden)

    def evaluation_buffers(self) -> int:
        """Return the bytes that it keeps beside that from the first evaluation on: what arrives, and what was sent."""
        ends = sum((index > 0) + self._is_sent(index) for index in self._own())
        return ends * self.micro_batches * self._bytes((*self.work.batch, self.work.model.hidden_size))  # all positions

    def activations(self) -> Activations:
        """Return those of a step on this rank, beside what it holds."""
        hidden, looped, last = self._bytes(self.work.hidden), self.schedule != "1f1b", len(self.stages) - 1
        traced = [
            trace_stage(self.work, plan.layers, is_first=index == 0, is_last=index == last)
            for index, plan in enumerate(self.stages)
        ]
        # The step's batches, one by one and joined; the gradients that the step before has left are forgotten as it
        # begins.
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
                live -= hidden  # the next stage's input is this output, in place of the buffer that was held for it
            elif has == 0:
                blocks -= stage.blocks
                live += hidden if looped and index < last else 0  # sent or handed over, it lives on until the step ends
            if kind in (BACKWARD, BACKWARD_INPUT) and self._is_sent(index - 1) and (looped or not has_sent):
                live, has_sent = live + hidden, True  # the gradient; 1F1B has waited for one when it sends the next
        moved = sum(traced[index].moved for index in self._own())
        return Activations(*at_most, most[FORWARD], most[BACKWARD], most[BACKWARD], moved)

    def _own(self) -> list[int]:
        return [index for index, plan in enumerate(self.stages) if plan.rank == self.pp_rank]

    def _bytes(self, hidden: tuple[int, int, int]) -> int:
        return self.work.dtype.itemsize * math.prod(hidden)

    def _left_gradients(self) -> int:
        """How many gradients of inputs the halves of backward leave; within a rank they are the buffers of the stage
        before.
        """
        return sum(kind == BACKWARD_INPUT and self._is_sent(index - 1) for kind, index in self.timetable())

    def _is_sent(self, index: int) -> bool:
        """Whether that stage's output goes to another rank. There is no stage -1."""
        return 0 <= index < len(self.stages) - 1 and self.stages[index].rank != self.stages[index + 1].rank
