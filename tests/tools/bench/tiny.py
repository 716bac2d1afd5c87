"""A model small enough for a bench to take a second, and actors for the processes of a bench."""

import os

import torch

from megamix.config import ModelConfig
from megamix.tools.bench import ranks
from megamix.tools.bench.sides import Work
from megamix.tools.ranks import RankPool
from tests.programs import fresh_pages

MODEL = ModelConfig(vocab_size=64, seq_len=16, hidden_size=32, num_layers=2, num_heads=2)
WORK = Work(model=MODEL, micro_batch_size=2, lr=1e-2, compile_update=False)


def fork_ranks(monkeypatch):
    """Let ranks be forks, without settings of their own: a new interpreter takes seconds to import torch anew."""

    def pool(*args, environment, **kwargs):
        return RankPool(*args, **kwargs)

    monkeypatch.setattr(ranks, "RankPool", pool)


class Adder:
    """Actor that keeps a sum from call to call."""

    def __init__(self, start):
        self.total = start

    def add(self, value):
        self.total += value
        return self.total

    def sum_over_ranks(self):
        total = torch.tensor(float(torch.distributed.get_rank() + self.total))
        torch.distributed.all_reduce(total)
        return total.item()

    def setting(self, name):
        return os.environ[name], torch.get_num_threads()

    def keeps_freed_memory(self):
        return fresh_pages() > 48 and fresh_pages() < 16

    def fail_on_rank(self, rank):
        if torch.distributed.get_rank() == rank:
            raise ArithmeticError("no such sum")


def unbuildable(*_):
    raise LookupError("nothing to build")
