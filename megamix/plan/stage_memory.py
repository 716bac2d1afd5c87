"""The memory of a pipeline's rank beside what it trains, counted without ranks and without memory.

Each stage is traced for one micro-batch (megamix/plan/activations.py), and what the micro-batches in flight take is
added up in the order of the schedule's own timetable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from megamix.live_storage import LiveStorage
from megamix.model.transformer import Transformer
from megamix.parallel.stages import Stage, StagePlan
from megamix.plan.activations import (
    Activations,
    Machine,
    Meter,
    place,
    use_gpu_kernels,
    watch_backward,
    without_memory,
)

FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = "F", "B", "I", "W"
_ACTIONS = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
INT64 = 8

Build = Callable[[int], Transformer]  # a rank's blocks, that many of them, with both ends, on the meta device


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineFacts:
    """What decides the memory of every stage alike."""

    schedule: str
    micro_batches: int  # of a step
    batch: tuple[int, int]  # (B, T) of a micro-batch
    hidden: tuple[int, int, int]  # between stages, in `dtype`, while activations are kept
    dtype: torch.dtype
    machine: Machine
    compiled: bool

    @property
    def hidden_bytes(self) -> int:
        return self.dtype.itemsize * self.hidden[0] * self.hidden[1] * self.hidden[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes of one micro-batch in one stage, beside the buffers in which its input and its gradient arrive. The most of
    each pass has in it what is kept for it.
    """

    blocks: int  # kept by the blocks from forward to backward
    kept: int  # by all, with the output
    forward: int
    backward: int
    # Of a backward in two halves: the most of each, and what is kept between them.
    input: int
    between: int
    weight: int


def timetable(stages: Sequence[StagePlan], pp_rank: int, schedule: str, micro_batches: int) -> list[tuple[str, int]]:
    """(pass, stage) in the order in which a rank runs them in a step, as torch's own schedule has it."""
    # torch's pipelines import the compiler: 2 s that no job without a pipeline waits for.
    from megamix.parallel.pipeline_parallel import SCHEDULES

    ranks = 1 + max(plan.rank for plan in stages)
    own = [
        # All that the constructor of a schedule asks of a stage.
        SimpleNamespace(stage_index=index, num_stages=len(stages), group_size=ranks, group_rank=pp_rank, submod=None)
        for index, plan in enumerate(stages)
        if plan.rank == pp_rank
    ]
    order = SCHEDULES[schedule](own[0] if schedule == "1f1b" else own, micro_batches).pipeline_order[pp_rank]
    passes = ((str(action.computation_type.value), action.stage_index) for action in order if action is not None)
    return [(kind, stage) for kind, stage in passes if kind in _ACTIONS]


def held_buffers(stages: Sequence[StagePlan], pp_rank: int, facts: PipelineFacts) -> int:
    """Return the bytes that torch keeps from step to step: for each micro-batch what arrives at each stage, and the
    gradients that a backward in halves leaves at it until the next step begins.
    """
    last = len(stages) - 1
    ends = sum((index > 0) + (index < last) for index, plan in enumerate(stages) if plan.rank == pp_rank)
    return (ends * facts.micro_batches + _left_gradients(stages, pp_rank, facts)) * facts.hidden_bytes


def evaluation_buffers(stages: Sequence[StagePlan], pp_rank: int, facts: PipelineFacts) -> int:
    """Return the bytes that it keeps beside that from the first evaluation on: what arrives, and what was sent."""
    whole = facts.dtype.itemsize * facts.batch[0] * facts.batch[1] * facts.hidden[2]  # all positions
    ends = sum((index > 0) + _is_sent(stages, index) for index, plan in enumerate(stages) if plan.rank == pp_rank)
    return ends * facts.micro_batches * whole


def pipeline_activations(
    stages: Sequence[StagePlan], pp_rank: int, facts: PipelineFacts, traced: Sequence[StageMemory]
) -> Activations:
    """Return those of a step on this rank, beside what it holds. `traced`: all stages."""
    hidden, looped, last = facts.hidden_bytes, facts.schedule != "1f1b", len(stages) - 1
    # The step's batches, one by one and joined; the gradients that the step before has left are forgotten as it begins.
    live = 2 * _batch_bytes(facts) - _left_gradients(stages, pp_rank, facts) * hidden
    most, at_most, blocks, has_sent = {FORWARD: 0, BACKWARD: 0}, (0, 0), 0, False
    for kind, index in timetable(stages, pp_rank, facts.schedule, facts.micro_batches):
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
        if kind == FORWARD and index < last and not _is_sent(stages, index):
            live -= hidden  # the next stage's input is this output, in place of the buffer that was held for it
        elif has == 0:
            blocks -= stage.blocks
            live += hidden if looped and index < last else 0  # sent or handed over, it lives on until the step ends
        if kind in (BACKWARD, BACKWARD_INPUT) and _is_sent(stages, index - 1) and (looped or not has_sent):
            live, has_sent = live + hidden, True  # the gradient; 1F1B has waited for one when it sends the next
    return Activations(*at_most, most[FORWARD], most[BACKWARD], 0)


def _batch_bytes(facts: PipelineFacts) -> int:
    """Tokens and targets of a step."""
    return 2 * INT64 * facts.micro_batches * facts.batch[0] * facts.batch[1]


def _left_gradients(stages: Sequence[StagePlan], pp_rank: int, facts: PipelineFacts) -> int:
    """How many gradients of inputs the halves of backward leave; within a rank they are the buffers of the stage
    before.
    """
    passes = timetable(stages, pp_rank, facts.schedule, facts.micro_batches)
    return sum(kind == BACKWARD_INPUT and _is_sent(stages, index - 1) for kind, index in passes)


def _is_sent(stages: Sequence[StagePlan], index: int) -> bool:
    """Whether that stage's output goes to another rank. There is no stage -1."""
    return 0 <= index < len(stages) - 1 and stages[index].rank != stages[index + 1].rank


def trace_stages(build: Build, stages: Sequence[StagePlan], facts: PipelineFacts) -> list[StageMemory]:
    """Trace one micro-batch in each of the stages."""
    traces: dict[tuple[bool, bool], tuple[_StagePeaks, _StagePeaks]] = {}
    found = []
    for index, plan in enumerate(stages):
        ends = index == 0, index == len(stages) - 1
        if ends not in traces:
            traces[ends] = _trace(build, 1, ends, facts), _trace(build, 2, ends, facts)
        found.append(_with_blocks(*traces[ends], len(plan.layers)))
    return found


@dataclass(slots=True)
class _StagePeaks:
    kept: int = 0
    forward: int = 0
    backward: int = 0
    backward_end: int = 0  # when nothing of the blocks is kept any more
    input: int = 0
    between: int = 0
    weight: int = 0


def _with_blocks(one: _StagePeaks, two: _StagePeaks, num_blocks: int) -> StageMemory:
    """Every block is alike: what the second one adds, each further one does."""
    block, further = two.kept - one.kept, num_blocks - 1
    return StageMemory(
        blocks=block * num_blocks,
        kept=one.kept + block * further,
        forward=one.forward + block * further,
        backward=max(one.backward + block * further, one.backward_end),
        input=one.input + (two.input - one.input) * further,
        between=one.between + (two.between - one.between) * further,
        weight=one.weight + (two.weight - one.weight) * further,
    )


def _trace(build: Build, num_blocks: int, ends: tuple[bool, bool], facts: PipelineFacts) -> _StagePeaks:
    is_first, is_last = ends
    device = torch.device("cpu" if facts.machine == "cpu" else "meta")
    with without_memory(facts.machine):
        model = build(num_blocks + (not is_first) + (not is_last))
        place(model, facts.dtype, device)
        if facts.machine == "gpu":
            use_gpu_kernels(model, facts.compiled)
        stage = Stage(model, range(not is_first, num_blocks + (not is_first)))
        targets = torch.zeros(facts.batch, dtype=torch.int64, device=device)
        x, came_back = (torch.zeros(facts.hidden, dtype=facts.dtype, device=device) for _ in range(2))
        x = targets.clone() if is_first else x.requires_grad_()
        with LiveStorage(counts_meta=True) as tracker:
            for tensor in (*model.parameters(), *model.buffers(), targets, x, came_back):
                tensor.detach()  # counted as soon as touched
            meter = Meter(tracker)
            grads = None if is_last else [came_back]
            # The first stage's second half is all of it.
            halves = facts.schedule.endswith("zero_bubble") and not is_first
            found = _halves(stage, x, targets, grads, meter) if halves else _StagePeaks()
            _whole(model, stage, (x, targets), grads, meter, found)
    if not halves:
        found.input, found.between, found.weight = found.kept, found.kept, max(found.backward, found.backward_end)
    return found


def _halves(stage: Stage, x: Tensor, targets: Tensor, grads: list[Tensor] | None, meter: Meter) -> _StagePeaks:
    """A backward in halves, by what torch's stages call."""
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    out, found = stage(x, targets), _StagePeaks()
    meter.peak()
    passed, groups = stage_backward_input([out], grads, [x], stage.parameters())
    found.input = meter.peak()
    del passed
    x.grad = None  # counted with what is sent
    found.between = meter.live()
    stage_backward_weight(stage.parameters(), groups)
    found.weight = meter.peak()
    for param in stage.parameters():
        param.grad = None
    return found


def _whole(
    model: Transformer, stage: Stage, inputs: tuple[Tensor, Tensor], grads: list[Tensor] | None, meter: Meter,
    found: _StagePeaks,
) -> None:  # fmt: skip
    def blocks_are_done() -> None:
        found.backward = max(found.backward, meter.peak())

    stop_watching = watch_backward(model, model.blocks[stage.layers.start], blocks_are_done)
    meter.peak()
    out = stage(*inputs)
    stop_watching()
    found.kept, found.forward = meter.live(), meter.peak()
    torch.autograd.backward(out, grads or torch.empty_like(out))
    found.backward_end = meter.peak()
