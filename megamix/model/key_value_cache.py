"""What attention has computed of the tokens so far, so that a new token costs one position and not the whole text."""

import torch
from torch import Tensor

from megamix.config import ModelConfig
from megamix.model import sizes
from megamix.model.documents import Documents


class BlockCache:
    """Keys and values of one block, (B, room, kv_heads, head_dim), allocated once."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self._keys, self._values, self.length = keys, values, 0

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keep those of the next T positions; all so far.

        Shapes: (B, T, kv_heads, head_dim) -> views (B, length, kv_heads, head_dim).
        """
        end = self.length + key.shape[1]
        self._keys[:, self.length : end], self._values[:, self.length : end] = key, value
        self.length = end
        return self._keys[:, :end], self._values[:, :end]


class KeyValueCache:
    """Those of all blocks, for `batch` texts of up to `room` tokens each."""

    def __init__(self, config: ModelConfig, batch: int, room: int, like: Tensor) -> None:
        """`like`: a parameter of the model, for dtype and device."""
        shape = (batch, room, sizes.num_kv_heads(config), sizes.head_dim(config))
        self.blocks = [BlockCache(like.new_empty(shape), like.new_empty(shape)) for _ in range(config.num_layers)]

    @property
    def length(self) -> int:
        """Positions that every block has seen."""
        return self.blocks[0].length

    def places(self, tokens: Tensor) -> Tensor:
        """Positions of the tokens that come next, INT64 (1, T)."""
        return torch.arange(self.length, self.length + tokens.shape[1], device=tokens.device)[None]

    def seen(self, tokens: Tensor) -> Documents | None:
        """What each of them sees, itself and all before, as a mask (1, 1, T, length + T); None for the first tokens."""
        if not self.length:
            return None
        seen = torch.ones(tokens.shape[1], self.length + tokens.shape[1], dtype=torch.bool, device=tokens.device)
        return Documents(mask=seen.tril(self.length)[None, None])
