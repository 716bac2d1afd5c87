"""What a token sees: of packed sequences its own document, and no later tokens; of a text what came before.

What attention has computed of that is kept, so that a new token costs one position and not the whole text.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Documents:
    """The documents of a batch in one of three forms."""

    # Those of all pieces of documents, one sequence after the other; they add up to B * T.
    lengths: tuple[int, ...] = ()
    mask: Tensor | None = None  # BOOL (B, 1, T, T): whether a row's token sees a column's
    # INT32 (entries,): where each begins among the B * T tokens, one sequence after the other; B * T from the end on.
    borders: Tensor | None = None


# Tokens a document for which `borders` has room: FlashAttention's backward puts 128 rows of FP32 between two documents,
# so its scratch is at most doubled, and its kernels start for each entry. Not measured on a GPU.
TOKENS_A_BORDER = 128


def most_borders(positions: Tensor) -> int:
    """Return how many documents (B, T) positions may have to be told by their borders, whatever they are."""
    return max(len(positions), positions.numel() // TOKENS_A_BORDER)


def find_borders(positions: Tensor) -> Documents:
    """Return the documents that INT64 positions (B, T) begin at each 0, and anew in each sequence, for kernels that
    take their borders. There may be at most `most_borders`; the device alone counts them.
    """
    starts, end = positions == 0, positions.numel()
    starts[:, 0] = True
    borders = torch.nonzero_static(starts.flatten(), size=most_borders(positions) + 1, fill_value=end)
    return Documents(borders=borders.flatten().int())


def find_documents(positions: Tensor, as_mask: bool) -> Documents | None:
    """Return the same documents in another form.

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


class BlockCache:
    """Keys and values of one block, (B, room, kv_heads, head_dim), allocated once: by the first ones, which tell how
    many heads this process computes.
    """

    def __init__(self, room: int) -> None:
        self._room, self.length = room, 0
        self._keys = self._values = torch.empty(0)

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keep those of the next T positions; all so far.

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
    """Those of all blocks, for texts of up to `room` tokens each."""

    def __init__(self, num_layers: int, room: int) -> None:
        self.blocks = [BlockCache(room) for _ in range(num_layers)]

    @property
    def length(self) -> int:
        """Positions that every block that looks back has seen."""
        return max(block.length for block in self.blocks)

    def places(self, tokens: Tensor) -> Tensor:
        """Positions of the tokens that come next, INT64 (1, T)."""
        return torch.arange(self.length, self.length + tokens.shape[1], device=tokens.device)[None]

    def seen(self, tokens: Tensor) -> Documents | None:
        """Return what each of them sees, itself and all before, as a mask (1, 1, T, length + T); None for the first
        tokens.
        """
        if not self.length:
            return None
        seen = torch.ones(tokens.shape[1], self.length + tokens.shape[1], dtype=torch.bool, device=tokens.device)
        return Documents(mask=seen.tril(self.length)[None, None])
