"""Buffers of somebody's own training: their first values, their changes by forward, and skipped steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from megamix.tools.verify.core.hypotheses import HALVES, RightStep, factor_of, lost, nearest
from megamix.tools.verify.core.reference import Work
from megamix.tools.verify.core.verdict import NOISE, U32, Tensors, Verdict, max_abs
from megamix.tools.verify.foreign.watch import SeenStep


def check_first_buffers(verdict: Verdict, plain: Tensors, seen: Sequence[SeenStep]) -> None:
    """Check every rank's buffers before the first step against the plain model's, in the dtype that the rank keeps.

    `plain`: the plain model's buffers. Later steps go on from the trainer's own.
    """
    others = {name: _real(buffer) for name, buffer in plain.items()}
    for rank, buffers in enumerate(one.buffers for one in seen):
        for name, plain_buffer in plain.items():
            where, got = f"{name} on rank {rank}", buffers.get(name)
            if got is None or got.shape != plain_buffer.shape:
                here = "there is none" if got is None else f"of shape {(*got.shape,)}"
                text = f"of shape {(*plain_buffer.shape,)} in the plain model, and here {here}"
                verdict.expect("initial buffer", where, False, text)
                continue
            want = plain_buffer.to(got.dtype)
            if not torch.equal(want.to(plain_buffer.dtype), plain_buffer) and torch.equal(got, want):
                text = f"rounded to {HALVES.get(got.dtype, got.dtype)}, as it is kept, and compared so"
                verdict.leave("initial buffer", where, text)
            got, want = _real(got), _real(want)
            verdict.equal("initial buffer", where, got, want, partial(explain_values, got, want, others))
        for name in buffers.keys() - plain:
            verdict.leave("initial buffer", name, "not compared: the plain model has none of this name")


def explain_values(got: Tensor, want: Tensor, others: Tensors) -> str:
    """Say which kind of mistake the first values look like, or how many elements have other values.

    `others`: values with other names. `got` and `want`: FP64.
    """
    bound = 64 * U32 * max_abs(want.nan_to_num(0.0, 0.0, 0.0))
    kind = lost(got, want) or nearest(got, want, bound, _other_values(got, want, others))
    return kind or f"other values in {float((got != want).double().mean()):.0%} of its elements"


def _other_values(got: Tensor, want: Tensor, others: Tensors) -> Iterator[tuple[str, Tensor]]:
    for name, other in others.items():
        if other.shape == want.shape:
            yield f"that of {name}", other
    if want.dim() == 2 and want.size(0) == want.size(1):
        yield "the right one transposed", want.t()
        yield "the right one turned by one column", want.roll(1, 1)
    yield "the right one inverted, as a mask of the other meaning", 1 - want
    factor = factor_of(got, want)
    yield f"{factor:.4g} times the right one", factor * want
    if (want > 0).all() and (got > 0).all():
        power = factor_of(got.log(), want.log())
        yield f"the right one to the power of {power:.4g}, as rotary frequencies of another base", want**power


def _real(buffer: Tensor) -> Tensor:
    """Return a buffer as FP64: complex numbers as pairs, whole numbers and booleans as numbers."""
    return (torch.view_as_real(buffer) if buffer.is_complex() else buffer).double()


def check_buffers(verdict: Verdict, right: RightStep, before: SeenStep, after: SeenStep) -> None:
    """Check rank 0's buffers: by the plain model's forward if it moves them; the others must stay in a skipped step.

    A skipped step may leave the changes by forward, as torch's batch norm does, or undo them.
    """
    if not after.buffers:
        return
    mine, reference = right.by_rank[0], right.reference

    def moved_by(work: Work, model: nn.Module = reference.exact) -> Tensors:
        reference.step(model, right.weights, work)
        return {name: _real(buffer).cpu().clone() for name, buffer in model.named_buffers()}

    wanted, rounded = moved_by(mine), moved_by(mine, reference.native)
    counted = _counted(wanted, before.buffers, after.buffers)
    for name in filter(after.buffers.__contains__, wanted):
        want, was, got = wanted[name], _real(before.buffers[name]), _real(after.buffers[name])
        moves = bool(_apart(want, was).any())
        if not _apart(got, was).any() and not (moves and any(after.updates)):
            continue
        if not moves:
            if not any(after.updates):
                verdict.expect("buffer after a skipped step", name, False, "moved by a step that is none")
            elif how := lost(got, was) if got.numel() > 1 else "":
                verdict.expect("buffer", name, False, f"forward does not move it, and it is {how}")
            else:
                verdict.leave("buffer", name, "not compared: your step moves it, the plain model's forward does not")
            continue
        largest = max_abs(want.nan_to_num(0.0, 0.0, 0.0))
        bound = NOISE * float(_apart(rounded[name], want).max()) + 64 * U32 * largest

        def explain(name: str = name, was: Tensor = was, got: Tensor = got, bound: float = bound) -> str:
            twice = moved_by([one for one in mine for _ in range(2)])
            kinds = [("never moved", was), ("moved twice by each micro-batch: its forward runs again", twice[name])]
            if not counted:
                factor = factor_of(got - was, moves := wanted[name] - was)
                kinds.append((f"moved {factor:.4g} times as far: another momentum", was + factor * moves))
            for rank in range(1, len(right.by_rank)):
                text = f"moved by the samples of rank {rank}"
                kinds.append((text, moved_by(right.by_rank[rank])[name]))
            return nearest(got, wanted[name], bound, iter(kinds)) or counted

        verdict.note("buffer", name, float(_apart(got, want).max()), bound, explain)


def _apart(one: Tensor, other: Tensor) -> Tensor:
    """Return the distance of elements, which is 0 if both are NaN or the same infinity, as a new observer's are."""
    return (one - other).abs().masked_fill(torch.isclose(one, other, rtol=0.0, atol=0.0, equal_nan=True), 0.0)


def _counted(wanted: Tensors, before: Tensors, after: Tensors) -> str:
    """Return an explanation from a buffer that counts forwards, "" if it counts as many as micro-batches."""
    for name in (name for name, of in after.items() if name in wanted and not (of.dim() or of.is_floating_point())):
        went, goes = (float(_real(of) - _real(before[name])) for of in (after[name], wanted[name]))
        if went != goes:
            compared = "more" if went > goes else "fewer"
            return f"moved by {compared} forwards than micro-batches: {name} went up by {went:g}, not by {goes:g}"
    return ""
