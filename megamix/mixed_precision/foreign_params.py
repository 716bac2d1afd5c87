"""Parameters that a loss reads and that the engine's module does not have: nothing trains them or removes the scale."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

log = logging.getLogger("megamix")

LEAF = "torch::autograd::AccumulateGrad"  # autograd's node of a leaf tensor


def warn_of_foreign_params(loss: Tensor, own: Iterable[nn.Parameter]) -> None:
    """Log parameters in the loss's graph that are not in `own`: the shape of each, and the operation that reads it."""
    known, found = {*map(id, own)}, dict[int, str]()
    seen = set[Any]()
    todo: list[Any] = [] if loss.grad_fn is None else [loss.grad_fn]
    while todo:
        node = todo.pop()
        new = [read for read, _ in node.next_functions if read is not None and read not in seen]
        seen.update(new)
        todo += new
        for leaf in (read for read in new if read.name() == LEAF and isinstance(read.variable, nn.Parameter)):
            if id(leaf.variable) not in known:
                found[id(leaf.variable)] = f"shape {tuple(leaf.variable.shape)}, read by {node.name()}"
    if found:
        log.warning(
            "the loss reads parameters that are not in the engine's module: %s. Nothing trains them, and their .grad "
            "is multiplied by the loss scale and summed over micro-batches: register them in the module before the "
            "engine is built, or detach() them",
            "; ".join(found.values()),
        )
