"""A small model whose layers count their tokens' choices and have a loss of their own."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from megamix import Tally, add_loss
from tests.builders import MODEL_VOCAB

WIDTH, PLACES = 16, 5


def counted_up(value, counts):
    return value + counts


class Chooser(nn.Module):
    """Gives each token a place. `adds`: its loss is added where it arises; otherwise the caller takes it."""

    def __init__(self, adds):
        super().__init__()
        self.router = nn.Linear(WIDTH, PLACES, bias=False)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.chosen = Tally(PLACES, counted_up)
        self.adds = adds

    def forward(self, x):
        logits = self.router(x).float()
        self.chosen.add(F.one_hot(logits.argmax(-1), PLACES).flatten(0, -2).sum(0))
        loss = 0.1 * logits.logsumexp(-1).square().mean()
        out = x + torch.tanh(self.linear(x))
        if self.adds:
            return add_loss(out, loss)
        self.loss = loss
        return out


class Choosers(nn.Module):
    def __init__(self, adds=True, recompute=False):
        super().__init__()
        self.embedding = nn.Embedding(MODEL_VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Chooser(adds) for _ in range(2))
        self.head = nn.Linear(WIDTH, MODEL_VOCAB, bias=False)
        self.recompute = recompute

    def forward(self, tokens, flavour=0):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


def choosers(**settings):
    torch.manual_seed(3)
    return Choosers(**settings)
