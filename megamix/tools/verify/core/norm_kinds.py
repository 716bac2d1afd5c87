"""Kinds of mistakes in a norm, as it was reported or as it clipped a gradient."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megamix.tools.verify.core.hypotheses import RightStep, factor_of
from megamix.tools.verify.core.verdict import Tensors, max_abs, norm_of


def explain_norm(right: RightStep, used: float, grads: Tensors, name: str = "", slack: float = 1e-5) -> str:
    """Return which other norm this one looks like, in place of that of all gradients; "" for no known one.

    `name`: parameter that was clipped by it. `slack`: how far rounding may take its square, relative.
    """
    squares = {other: float(grad.square().sum()) for other, grad in grads.items()}
    norm, numbers = norm_of(grads), {right.ranks, len(right.by_rank), len(right.by_rank[0])}
    told = f"that of all gradients is {norm:.4g}"
    sets = {
        f"group {group}": [other for other in squares if right.groups.get(other) == group]
        for group in sorted(set(right.groups.values()))
    }
    sets |= {"what tensor-parallel ranks replicate": [*right.replicated]}
    sums = {text: sum(map(squares.__getitem__, others)) for text, others in sets.items()}
    sums |= {f"the shards of rank {rank}": own**2 for rank, own in enumerate(_shard_norms(right, grads))}
    kinds = {"of the gradient with the loss scale in it": norm * right.loss_scale} if right.loss_scale != 1 else {}
    kinds |= {"its own": math.sqrt(squares[name])} if name and len(squares) > 1 else {}
    kinds |= {f"that of {text} alone": math.sqrt(square) for text, square in sums.items()}
    kinds |= {
        "its square, of which no root was taken": norm**2,
        "the last step's": norm_of((right.earlier or right).whole),
        "the largest element, a norm of order infinity": max(map(max_abs, grads.values())),
    }
    for times in sorted(numbers - {1}):
        for by, text in (times, f"{times}"), (math.sqrt(times), f"the root of {times}"):
            text += ", the ranks or micro-batches"
            kinds |= {f"times {text}": norm * by, f"over {text}": norm / by}
    for text, other in kinds.items():
        if abs(used / max(other, 1e-300) - 1) < 100 * slack:
            return f"{told}: {text}"
    for text, square in (squares | sums).items():
        for verb, more in (("leaves out", -1), ("counts twice", 1)):
            off = abs(used**2 - norm**2 - more * square)
            if square > 1e3 * slack * norm**2 and off < max(1e-3 * square, slack * norm**2):
                return f"{told}: it {verb} {text}"
    return ""


def explain_clipping(right: RightStep, name: str, found: Tensor, bound: float) -> str:
    """Explain a gradient that is off by one factor, or by one for each rank's shards, by the norm that clipped it."""
    whole, factor = right.whole[name], factor_of(found, right.whole[name])
    if not right.clip:
        return ""
    if factor <= 0 or max_abs(found - factor * whole) > bound * max(1.0, factor):
        norms = torch.tensor(_shard_norms(right, right.whole), dtype=torch.float64)
        coefficients = (right.clip / (norms + 1e-6)).clamp(max=1.0)
        near = len(norms) and max_abs(found - coefficients[_owner(right, name)] * whole) <= bound
        return "clipped on each rank by the norm of its own shards" if near else ""
    if factor >= 1.001:  # clipping never enlarges a gradient, and hides how large it was before
        norm = norm_of(right.whole)
        texts = [text for times, text in right.meanings() if times > factor]
        if abs(factor * norm / right.clip - 1) > 1e-3:
            return ""
        if not texts:
            return f"brought to {right.clip:g}, though the right norm is {norm:.4g}: nothing had to be clipped"
        return f"clipped to {right.clip:g}, though the right norm is {norm:.4g}; before that {', or '.join(texts)}"
    if abs(factor - 1) < 1e-3:
        return "not clipped"
    kind = explain_norm(right, right.clip / factor, right.whole, name)
    return kind and f"clipped by a norm of {right.clip / factor:.4g}, where {kind}"


def _shard_norms(right: RightStep, grads: Tensors) -> list[float]:
    """Return the norm of each rank's shards; none if one rank has all."""
    squares = torch.zeros(right.ranks, dtype=torch.float64)
    for name, grad in grads.items():
        squares.index_add_(0, _owner(right, name).flatten(), grad.square().flatten())
    return squares.sqrt().tolist() if right.ranks > 1 else []


def _owner(right: RightStep, name: str) -> Tensor:
    """Return the ranks that own a parameter's elements: INT64, like the parameter.

    Unless told, they divide rows, as FSDP2 does.
    """
    if name in right.owners:
        return right.owners[name].clamp(min=0)  # elements without an owner are reported as such
    whole = right.whole[name]
    rows = whole.shape[0] if whole.dim() else 1
    of_rank = -(-rows // right.ranks) * (whole.numel() // rows)
    return torch.arange(whole.numel()).div(of_rank, rounding_mode="floor").view(whole.shape)
