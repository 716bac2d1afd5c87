"""Parameters that a loss reads and the engine's module does not have: nothing trains them or takes the scale out."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

log = logging.getLogger("megamix")

LEAF = "torch::autograd::AccumulateGrad"  # the node of what no operation has made


def warn_of_foreign_params(loss: Tensor, own: Iterable[nn.Parameter]) -> None:
    """Log those that the loss's graph leads to, each by its shape and by what reads it. One walk over the graph."""
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
            "is times the loss scale, summed over micro-batches: register them in the module before the engine is "
            "built, or detach() them",
            "; ".join(found.values()),
        )
