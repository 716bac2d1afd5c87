"""A model small enough for a bench to take a second."""

from megamix.config import ModelConfig
from megamix.tools.bench import ranks
from megamix.tools.bench.sides import Work
from megamix.tools.ranks import RankPool

MODEL = ModelConfig(vocab_size=64, seq_len=16, hidden_size=32, num_layers=2, num_heads=2)
WORK = Work(model=MODEL, micro_batch_size=2, lr=1e-2, compile_update=False)


def fork_ranks(monkeypatch):
    """Let ranks be forks, without settings of their own: a new interpreter takes seconds to import torch anew."""

    monkeypatch.setattr(ranks, "RankPool", lambda *args, environment, **kwargs: RankPool(*args, **kwargs))
