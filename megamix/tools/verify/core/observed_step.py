"""One step as every rank of our engine saw it, with everything that can be compared with one rank's.

The parts of all ranks then become whole tensors by name, and copies of the same element are compared on the way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megamix.data.loader import Batch
from megamix.mixed_precision.bucket import Bucket
from megamix.mixed_precision.engine import ShardedEngine
from megamix.mixed_precision.flat_layout import ParamSpec, Piece
from megamix.mixed_precision.observer import GRADIENT, StepObserver, Used
from megamix.mixed_precision.step import StepResult
from megamix.model.span import Span
from megamix.tools.verify.core.choices import Choice, Choices
from megamix.tools.verify.core.tape import Tape
from megamix.tools.verify.core.verdict import ByState, Tensors, equal_bits


@dataclass(frozen=True, slots=True)
class Fragment:
    """Elements [start, start + n) of the block of a parameter that a rank trains, flattened: FP32 (n,)."""

    spec: ParamSpec
    state: str
    start: int
    values: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedStep:
    """One step as one rank saw it. The gradient is the sum over ranks and micro-batches with the scale still in it."""

    scalars: dict[str, float]
    owned: list[Fragment]  # gradient, and master and states after the step; for matrices Muon's input and direction
    copies: list[Fragment]  # the half parameters that this rank's next forward would read
    buffers: Tensors  # buffers of this rank's module
    tallied: Tensors  # FP32 counts of all ranks, by tally
    dp_rank: int  # data-parallel rank whose micro-batches these were
    span: Span | None  # division of their positions
    choices: dict[str, list[Choice]] = field(default_factory=dict)  # of each micro-batch, by router
    tape: Tape = field(default_factory=dict)  # tensors through the modules of the first micro-batch, if recorded


def observed(engine: ShardedEngine, result: StepResult | None, used: UsedValues) -> ObservedStep:
    """Return the state of a rank after a step. `result`: the step's; None: there was no step, and no gradient."""
    with engine.whole_parameters():
        engine.wait()
        slots = ((bucket, slot.spec) for bucket in engine.buckets for slot in bucket.plan.slots)
        copies = [_fragment(spec, "copy", 0, bucket.named_params[spec.name].reshape(-1)) for bucket, spec in slots]
    held = (*engine.owned_ranges(), *engine.held_states())
    states = [_fragment(one.spec, state, one.start, own) for one in held for state, own in one.tensors.items()]
    span: Span | None = getattr(engine.module, "span", None)
    if span is not None:
        span = Span(span.num_ranks, span.rank, by_heads=span.by_heads)  # a span that no forward has entered can be sent
    buffers = {name: buffer.to("cpu", copy=True) for name, buffer in engine.module.named_buffers()}
    tallied = {} if result is None else {name: counts.to("cpu", copy=True) for name, counts in result.tallied.items()}
    told = () if result is None else ("loss", "found_inf", "grad_norm", "max_abs", "loss_scale", "lr")
    scalars = {name: float(getattr(result, name)) for name in told} | {
        "next_loss_scale": float(engine.loss_scale.loss_scale),
        "applied_updates": float(engine.applied_updates),
        "skipped_steps": float(engine.skipped_steps),
    }
    return ObservedStep(
        scalars=scalars, owned=used.fragments() + states, copies=copies, buffers=buffers, tallied=tallied,
        dp_rank=engine.topology.data.rank, span=span,
    )  # fmt: skip


class UsedValues(StepObserver):
    """Observer that keeps this rank's part of the sums that the last update used, and Muon's inputs and directions."""

    def __init__(self) -> None:
        self.values = dict[tuple[Used, str], Tensor]()  # by kind and parameter, on the device
        self._pieces = dict[str, Piece]()

    def on_use(self, what: Used, bucket: Bucket, values: Tensor) -> None:
        for piece in (one for one in bucket.pieces if one.numel):
            if what == GRADIENT or piece.spec.matrices:
                self.values[what, piece.spec.name] = values[piece.elements].clone()  # a step may free its sums
                self._pieces[piece.spec.name] = piece

    def fragments(self) -> list[Fragment]:
        """Return the fragments. Waits for the device, which no step may do."""
        pieces = self._pieces
        return [_fragment(pieces[of].spec, what, pieces[of].first, own) for (what, of), own in self.values.items()]


def rank_device() -> torch.device:
    """Return the device that this rank computes on: the GPU that its pool has given it, or the CPU."""
    if dist.is_initialized() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # untyped in torch
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class Poison:
    """Makes one element of a gradient infinite while active, on the last rank only."""

    def __init__(self, engine: ShardedEngine):
        self.active = False
        world = engine.topology.world
        if world.rank == world.size - 1:
            param = next(iter(engine.buckets[0].named_params.values()))
            param.register_hook(self._poison)  # type: ignore[no-untyped-call]  # untyped in torch

    def _poison(self, grad: Tensor) -> Tensor:
        if not self.active:
            return grad
        grad = grad.clone()
        grad.view(-1)[-1].fill_(torch.inf)  # an assignment would copy the number from the host
        return grad


def _fragment(spec: ParamSpec, state: str, start: int, values: Tensor) -> Fragment:
    return Fragment(spec, state, start, values.detach().to("cpu", torch.float32, copy=True))


@dataclass(slots=True)
class Whole:
    """Tensors of the full model: FP32, by (state, parameter).

    `owners`: the rank that had each element, INT64. `problems`: elements that were missing, or differed.
    """

    tensors: ByState = field(default_factory=dict)
    owners: ByState = field(default_factory=dict)
    problems: list[tuple[str, str]] = field(default_factory=list)  # (parameter, problem)

    def of(self, state: str) -> Tensors:
        return {name: tensor for (kind, name), tensor in self.tensors.items() if kind == state}


def assemble(ranks: Sequence[Iterable[Fragment]]) -> Whole:
    """Return the ranks' fragments put together: every element once, or alike in all copies."""
    whole = Whole()
    for rank, fragments in enumerate(ranks):
        for part in fragments:
            values, name, shape = part.values, part.spec.name, part.spec.full_shape
            places = torch.arange(math.prod(shape)).view(shape)[part.spec.block]
            where = places.reshape(-1)[part.start : part.start + len(values)]
            full = whole.tensors.setdefault((part.state, name), torch.zeros(shape)).view(-1)
            owners = whole.owners.setdefault((part.state, name), torch.full(shape, -1)).view(-1)
            again = owners[where] >= 0
            other, own = full[where][again], values[again]
            if not equal_bits(other, own):
                gap = (other - own).abs().max()
                whole.problems.append((name, f"{part.state} of rank {rank} differs by {gap:.3g} from a copy"))
            full[where] = values
            owners[where] = rank
    for (state, name), owners in whole.owners.items():
        if missing := int((owners < 0).sum()):
            whole.problems.append((name, f"{missing} of {owners.numel()} elements of {state} have no owner"))
    return whole


def assemble_choices(ranks: Sequence[ObservedStep], by_rank: Sequence[Sequence[Batch]]) -> list[list[Choices]]:
    """Return the choices for each micro-batch of each data-parallel rank. `by_rank`: those micro-batches."""
    whole = [[Choices() for _ in mine] for mine in by_rank]
    for seen in ranks:
        for name, kept in seen.choices.items():
            for batch, choices, (*_, own) in zip(by_rank[seen.dp_rank], whole[seen.dp_rank], kept, strict=True):
                part = None if seen.span is None else seen.span.begin(batch.targets, batch.deal)
                places = torch.arange(own.shape[1]).expand(len(own), -1) if part is None else part.places
                experts = choices.setdefault(name, own.new_zeros(*batch.tokens.shape, own.shape[-1]))
                experts[torch.arange(len(own))[:, None], places] = own
    return whole
