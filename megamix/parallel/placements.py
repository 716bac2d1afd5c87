"""Which block of each parameter a tensor-parallel rank holds: arithmetic on names and shapes, nothing is connected."""

from __future__ import annotations

from collections.abc import Mapping

from megamix.comm.topology import Topology
from megamix.mixed_precision.settings import Placement

# What computes columns of its output has rows of its weight (out, in), and that part of its bias.
_COLUMNS = ("attention.query", "attention.key", "attention.value", "feed_forward.gate", "feed_forward.up")
_VOCABULARY = ("embedding", "head")  # rows of the table of tokens
_ROWS = ("attention.out", "feed_forward.down")  # a part of the sum of every output; the bias is added once, after it
# Of these each rank sees its own heads alone, whatever else is divided.
_WITHIN_HEADS = ("attention.query_norm", "attention.key_norm")


def place_params(
    shapes: Mapping[str, tuple[int, ...]], topology: Topology, *, sequence_parallel: bool
) -> dict[str, Placement]:
    """`shapes`: of the full parameters, by name in a `Transformer`. Every size that is divided must divide evenly."""
    return {name: _place(name, shape, topology, sequence_parallel) for name, shape in shapes.items()}


def _place(name: str, shape: tuple[int, ...], topology: Topology, sequence_parallel: bool) -> Placement:
    tp = topology.tp
    dim = divided_dim(name)
    if dim is None:
        # With whole activations every rank computes the same gradient; with a part of the positions, or of the heads,
        # a part of it.
        counts = sequence_parallel or tp.rank == 0 or _module(name).endswith(_WITHIN_HEADS)
        return Placement(shape, (0,) * len(shape), topology.stage, counts)
    start = shape[dim] // tp.size * tp.rank
    return Placement(shape, tuple(start if axis == dim else 0 for axis in range(len(shape))), topology.dp)


def divided_dim(name: str) -> int | None:
    """The dim of a parameter in which tensor-parallel ranks divide it; None: each holds all of it."""
    module = _module(name)
    if module in _VOCABULARY or module.endswith(_COLUMNS):
        return 0
    return 1 if module.endswith(_ROWS) and name.endswith("weight") else None


def block_shape(name: str, full_shape: tuple[int, ...], tp_size: int) -> tuple[int, ...]:
    """Of the part that one of `tp_size` ranks holds."""
    divided = divided_dim(name)
    return tuple(size // tp_size if dim == divided else size for dim, size in enumerate(full_shape))


def _module(name: str) -> str:
    return name.rpartition(".")[0]
