"""The graph of a loss, and the parameters in it that the engine's module does not have: nothing trains them or removes
the scale.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

log = logging.getLogger("megamix")

LEAF = "torch::autograd::AccumulateGrad"  # autograd's node of a leaf tensor


def readers_of(ends: Iterable[Any], hidden: object = None) -> dict[Any, list[Any]]:
    """Return the nodes of the graphs that end in these nodes, each with the nodes that read its result. What nodes with
    `hidden` in their metadata read is left out.
    """
    readers: dict[Any, list[Any]] = {end: [] for end in ends if end is not None}
    todo = [*readers]
    while todo:
        node = todo.pop()
        if hidden is not None and hidden in node.metadata:
            continue
        for read, _ in node.next_functions:
            if read is not None:
                if read not in readers:
                    todo.append(read)
                readers.setdefault(read, []).append(node)
    return readers


def warn_of_foreign_params(loss: Tensor, own: Iterable[nn.Parameter]) -> None:
    """Log parameters in the loss's graph that are not in `own`: the shape of each, and the operation that reads it."""
    known, readers = {*map(id, own)}, readers_of([loss.grad_fn])
    leaves = (node for node in readers if node.name() == LEAF and isinstance(node.variable, nn.Parameter))
    foreign = [leaf for leaf in leaves if id(leaf.variable) not in known]
    if foreign:
        log.warning(
            "the loss reads parameters that are not in the engine's module: %s. Nothing trains them, and their .grad "
            "is multiplied by the loss scale and summed over micro-batches: register them in the module before the "
            "engine is built, or detach() them",
            "; ".join(f"shape {tuple(leaf.variable.shape)}, read by {readers[leaf][0].name()}" for leaf in foreign),
        )
