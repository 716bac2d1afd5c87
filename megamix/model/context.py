"""The context that a token sees: in a packed sequence its own document, without later tokens; in generation the text so
far.

Generation keeps the keys and values of the text so far, so a new token costs one position and not the whole text.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Documents:
    """The documents of a batch in one of three forms."""

    # Lengths of all parts of documents, one sequence after the other; they add up to B * T.
    lengths: tuple[int, ...] = ()
    mask: Tensor | None = None  # BOOL (B, 1, T, T): whether the token of a row sees the token of a column
    # INT32 (entries,): index of each document's first token among the B * T, one sequence after the other; B * T in the
    # entries behind the last document.
    borders: Tensor | None = None


# Tokens per entry of `borders`. FlashAttention's backward puts 128 rows of FP32 between two documents, so with 128
# tokens per entry its scratch memory at most doubles. Its kernels also start once for each entry; this time was not
# measured.
TOKENS_A_BORDER = 128


def most_borders(positions: Tensor) -> int:
    """Return the number of entries of `borders` for positions (B, T): the most documents that this form can hold."""
    return max(len(positions), positions.numel() // TOKENS_A_BORDER)


def find_borders(positions: Tensor) -> Documents:
    """Return the documents of a batch as borders, for kernels that take them. `positions`: INT64 (B, T). A document
    begins at each 0, and at the start of each sequence. There must be at most `most_borders` documents; the host does
    not wait to count them.
    """
    starts, end = positions == 0, positions.numel()
    starts[:, 0] = True
    borders = torch.nonzero_static(starts.flatten(), size=most_borders(positions) + 1, fill_value=end)
    return Documents(borders=borders.flatten().int())


def find_documents(positions: Tensor, as_mask: bool) -> Documents | None:
    """Return the documents of a batch as a mask or as lengths. `positions`: as in `find_borders`.

    `as_mask`: needed if shapes must not depend on the data, as in compiled code and on a GPU, where the host would wait
    to read the lengths. With lengths, attention runs once per document and computes only the document's own tokens. If
    each sequence is one document, no lengths are needed: None is returned.
    """
    starts = positions == 0
    if as_mask:
        numbers = starts.cumsum(-1)
        return Documents(mask=(numbers[:, None, :, None] == numbers[:, None, None, :]).tril())
    starts[:, 0] = True  # the rest of a document cut off at a sequence's end is a document of its own
    if int(starts.sum()) == len(starts):
        return None
    begin = starts.flatten().nonzero().flatten()
    end = torch.cat((begin[1:], begin.new_tensor([positions.numel()])))
    return Documents(lengths=tuple((end - begin).tolist()))


class BlockCache:
    """Keys and values of one block, (B, room, kv_heads, head_dim). They are allocated once, when the first keys come
    and show how many heads this process computes.
    """

    def __init__(self, room: int) -> None:
        self._room, self.length = room, 0
        self._keys = self._values = torch.empty(0)

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the keys and values of the next T positions. Return the keys and values of all positions so far.

        Shapes: (B, T, kv_heads, head_dim) -> views (B, length, kv_heads, head_dim).
        """
        if not self.length:
            batch, _, *head = key.shape
            self._keys, self._values = (key.new_empty(batch, self._room, *head) for _ in range(2))
        end = self.length + key.shape[1]
        self._keys[:, self.length : end], self._values[:, self.length : end] = key, value
        self.length = end
        return self._keys[:, :end], self._values[:, :end]


class KeyValueCache:
    """Keys and values of all blocks, for texts of up to `room` tokens each."""

    def __init__(self, num_layers: int, room: int) -> None:
        self.blocks = [BlockCache(room) for _ in range(num_layers)]

    @property
    def length(self) -> int:
        """Return the number of positions that every block with attention has seen."""
        return max(block.length for block in self.blocks)

    def places(self, tokens: Tensor) -> Tensor:
        """Return the positions of the tokens that come next, INT64 (1, T)."""
        return torch.arange(self.length, self.length + tokens.shape[1], device=tokens.device)[None]

    def seen(self, tokens: Tensor) -> Documents | None:
        """Return a mask (1, 1, T, length + T) by which each new token sees itself and all tokens before it. Return None
        for the first tokens of a text, which need no mask.
        """
        if not self.length:
            return None
        seen = torch.ones(tokens.shape[1], self.length + tokens.shape[1], dtype=torch.bool, device=tokens.device)
        return Documents(mask=seen.tril(self.length)[None, None])
