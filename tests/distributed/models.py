"""Small modules with the shapes of trouble: tied weights, recompute, branches that some ranks skip, tiny parameters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCAB, WIDTH, LENGTH = 29, 24, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 40)
        self.down = nn.Linear(40, WIDTH)
        self.gain = nn.Parameter(torch.ones(1))  # smaller than any dp_size

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(F.gelu(self.up(self.norm(x))))


class Bent(nn.Linear):
    """A block that is compiled to three kernels instead of a dozen."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(super().forward(x))


class TinyModel(nn.Module):
    """Embedding, three blocks, and a head. `tied`: the head is the embedding's weight. `recompute`: blocks run again in
    backward.
    """

    def __init__(self, tied: bool = True, recompute: bool = False):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.recompute = recompute
        for param in self.parameters():
            if param.dim() > 1:
                nn.init.normal_(param, std=0.2)

    def forward(self, tokens: Tensor, flavour: int = 0) -> Tensor:
        """Run the blocks. `flavour` 0 runs all in order; 1 skips the first; 2 runs them in reverse order and skips the
        middle one.
        """
        x = self.embedding(tokens)
        for index in ((0, 1, 2), (1, 2), (2, 0))[flavour]:
            block = self.blocks[index]
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(self.norm(x))


def make_model(tied: bool = True, recompute: bool = False) -> TinyModel:
    torch.manual_seed(7)
    return TinyModel(tied, recompute)


def compiled_model(tied: bool = True, *, compiled: bool = True) -> TinyModel:
    """Return a model whose blocks are compiled, or the same model with blocks that are not."""
    model = make_model(tied)
    model.blocks = nn.ModuleList(Bent() for _ in model.blocks)
    for block in model.blocks if compiled else ():
        block.compile(dynamic=False)
    return model


def make_batch(step: int, rank: int, micro_batch: int) -> Tensor:
    """Return the tokens of one micro-batch, a function of its step, rank and number: int64 (3, LENGTH)."""
    generator = torch.Generator().manual_seed(1000 * step + 50 * rank + micro_batch)
    return torch.randint(VOCAB, (3, LENGTH), generator=generator)


def loss_of(model: nn.Module, tokens: Tensor, flavour: int = 0) -> Tensor:
    logits = model(tokens, flavour)
    return F.cross_entropy(logits[:, :-1].float().reshape(-1, VOCAB), tokens[:, 1:].reshape(-1))
