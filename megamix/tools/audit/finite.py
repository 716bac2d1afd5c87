"""First number of a training that is not finite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megamix.tools.audit.facts import DTYPES, local
from megamix.tools.audit.holders import held_by
from megamix.tools.verify.core.tape import tensors_in

KINDS = ("loss", "gradient", "state", "weight")  # in the order in which an update makes them


@dataclass(frozen=True, slots=True)
class NotFinite:
    """A number that is not finite. `kind`: one of `KINDS`. `held`: the optimizer's parameter; None for the loss."""

    kind: str
    held: Tensor | None = None
    update: int = 0  # 0: the one that is watched


@torch.no_grad()
def first_not_finite(
    losses: Sequence[Tensor], optimizer: torch.optim.Optimizer | None = None, update: int = 0
) -> NotFinite | None:
    """Return the first of `KINDS` that is not finite after an update; None if all are finite.

    After a skipped update, or without an optimizer, only the loss is judged. `losses`: of the last backward pass.
    `update`: number of the update.
    """
    # An FP16 loss may be infinite by its loss scale alone, and do no harm.
    if any(loss.isnan().any() or not (loss.dtype == torch.float16 or _finite(loss)) for loss in map(local, losses)):
        return NotFinite("loss", update=update)
    if optimizer is None or getattr(optimizer, "found_inf", None):
        return None
    held = [param for param in held_by(optimizer) if param.grad is not None]
    made = {
        "gradient": [param.grad for param in held],
        "state": [optimizer.state.get(param, {}) for param in held],
        "weight": held,
    }
    for kind, values in made.items():
        for param, value in zip(held, values, strict=True):
            if not all(map(_finite, tensors_in(value))):
                return NotFinite(kind, param, update)
    return None


def _finite(tensor: Tensor) -> bool:
    tensor = local(tensor)
    judged = tensor.layout == torch.strided and tensor.dtype in DTYPES.values()
    return not judged or bool(tensor.isfinite().all())
