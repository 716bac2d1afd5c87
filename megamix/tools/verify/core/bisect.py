"""Search for the module that makes a gradient wrong: the first whose tensors leave their bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from megamix.data.loader import Batch
from megamix.model.span import Span
from megamix.tools.verify.core.hypotheses import RightStep, factor_of
from megamix.tools.verify.core.reference import Reference
from megamix.tools.verify.core.tape import INPUT, INPUT_GRADIENT, OUTPUT, OUTPUT_GRADIENT, Tape, recorded
from megamix.tools.verify.core.verdict import NOISE, UNIT, Tensors, max_abs


class RankTape(NamedTuple):
    """Tape of one rank. `dp_rank`: data-parallel rank whose data it had. `span`: division of positions, if any."""

    dp_rank: int
    tape: Tape
    span: Span | None = None

    @property
    def data(self) -> tuple[int, int | None]:
        """Return what the ranks with the same data have in common."""
        return self.dp_rank, None if self.span is None else self.span.rank

    def own(self, whole: Tape, batch: Batch) -> Tape:
        """Return this rank's positions of tensors whose dim 1 has an entry for each."""
        if self.span is None or (part := self.span.begin(batch.targets, batch.deal)) is None:
            return whole
        num_positions = part.num_positions
        return {key: part.own(x) if x.dim() > 1 and x.shape[1] == num_positions else x for key, x in whole.items()}


def culprit(right: RightStep, tapes: Sequence[RankTape]) -> str:
    """Return the first wrong module of a step, "" if none is. `tapes`: those of all ranks."""
    reference, found = right.reference, []
    for rank, mine in enumerate(tapes):
        batch, _ = right.by_rank[mine.dp_rank][0]
        models = reference.exact, reference.native
        exact, native = (mine.own(_record(reference, model, right.weights, batch), batch) for model in models)
        all_parts = [other.tape for other in tapes if other.data == mine.data]
        if wrong := first_module(mine.tape, all_parts, exact, native):
            found.append((*wrong, rank))
    if not found:
        return ""
    _, text, rank = min(found)  # a rank that gets another one's wrong tensor is wrong later
    return f"{text} (rank {rank})"


def _record(reference: Reference, model: nn.Module, weights: Tensors, batch: Any) -> Tape:
    reference.put(model, weights)
    with recorded(model) as tape:
        torch.autograd.backward(reference.loss(model, batch))
    model.zero_grad()
    return tape


def first_module(tape: Tape, all_parts: Sequence[Tape], exact: Tape, native: Tape) -> tuple[int, str] | None:
    """Return position, name and error of the first wrong module; None if none is wrong.

    Bound: NOISE times the rounding error on one rank, the largest over the tensor, and 4 roundings of the largest
    element. Gradients are compared up to one factor: loss scale and number of micro-batches. `all_parts`: tapes of the
    ranks with the same data. Some gradients are parts of a sum over tensor-parallel ranks; then the sum is compared.
    """
    kinds: dict[bool, float] = {False: 1.0}  # key: whether it is a gradient; value: its factor
    wrong: tuple[int, str] | None = None
    for number, (key, want) in enumerate(exact.items()):
        here, near = tape.get(key), native.get(key)
        if here is None or near is None or not here.shape == want.shape == near.shape:
            continue  # a shard, or a tensor that one rank computes in another form
        parts = torch.stack([part[key].double() for part in all_parts if key in part]).sum(0)
        is_gradient = key[1] in (OUTPUT_GRADIENT, INPUT_GRADIENT)
        near = near.double() / (factor_of(near, want) if is_gradient else 1.0)
        bound = NOISE * max_abs(near - want) + 4 * UNIT.get(here.dtype, 0.0) * max_abs(want)
        scales = [kinds[is_gradient]] * 2 if is_gradient in kinds else [factor_of(here, want), factor_of(parts, want)]
        errors = [
            max_abs(one.double() / scale - want) if scale else math.inf
            for one, scale in zip((here, parts), scales, strict=True)
        ]
        if min(errors) <= bound:
            kinds.setdefault(is_gradient, scales[errors.index(min(errors))])
        elif wrong is None:
            wrong = number, f"{_place(*key)}: its {key[1]} is off by {min(errors):.3g}, bound {bound:.3g}"
    return wrong


def _place(name: str, what: str) -> str:
    if what in (OUTPUT, INPUT_GRADIENT):
        return name or "the whole model"
    if not name:
        return "the loss" if what == OUTPUT_GRADIENT else "the micro-batch"
    outer = name.rpartition(".")[0] or "the whole model"
    return f"{outer}, {'before' if what == INPUT else 'behind'} {name}"
