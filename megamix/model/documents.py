"""Which tokens of packed sequences see each other: those of one document, and no later ones."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Documents:
    """The documents of a batch in one of two forms."""

    lengths: tuple[int, ...] = ()
    """Of all pieces of documents, one sequence after the other; they add up to B * T."""
    mask: Tensor | None = None
    """BOOL (B, 1, T, T): whether a row's token sees a column's."""


def find_documents(positions: Tensor, as_mask: bool) -> Documents | None:
    """The documents that INT64 positions (B, T) begin at each 0, and anew in each sequence.

    as_mask: needed where shapes must not depend on the data, as on a GPU (reading them would wait for it) and in
    compiled code. Without, attention runs once a document, at the cost of its own tokens alone, and None is returned
    for sequences that hold one document each.
    """
    starts = positions == 0
    if as_mask:
        numbers = starts.cumsum(-1)
        return Documents(mask=(numbers[:, None, :, None] == numbers[:, None, None, :]).tril())
    starts[:, 0] = True  # what was cut off at the end of the sequence before goes on by itself
    if int(starts.sum()) == len(starts):
        return None
    begin = starts.flatten().nonzero().flatten()
    end = torch.cat((begin[1:], begin.new_tensor([positions.numel()])))
    return Documents(lengths=tuple((end - begin).tolist()))
