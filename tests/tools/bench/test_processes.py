"""A bench's processes have the same settings and answer in rank order; a failure names its process."""

import os
from functools import partial

import pytest
import torch

from megamix.tools.bench.ranks import start_ranks
from megamix.tools.ranks import RankFailure
from tests.programs import fresh_pages
from tests.tools.bench.tiny import fork_ranks


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

    def settings(self, names):
        """Return these, the number of threads, and whether freed memory is kept."""
        return [*map(os.environ.get, names), torch.get_num_threads(), fresh_pages() > 48 and fresh_pages() < 16]

    def fail_on_rank(self, rank):
        if torch.distributed.get_rank() == rank:
            raise ArithmeticError("no such sum")


def unbuildable(*_):
    raise LookupError("nothing to build")


def test_ranks_keep_their_object_between_calls_and_know_each_other():
    settings = {"MEGAMIX_ADDER": "yes"}
    with start_ranks("adders", partial(Adder, 5), world_size=2, threads=1, environment=settings) as ranks:
        assert ranks.call(Adder.add, 2) == [7, 7]
        assert ranks.call(Adder.add, 1) == [8, 8]
        assert ranks.call(Adder.sum_over_ranks) == [17.0, 17.0]
        names = ["MEGAMIX_ADDER", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS"]
        # Other machines cannot reach "lo".
        assert ranks.call(Adder.settings, names) == [["yes", "lo", "1", 1, True]] * 2
        with pytest.raises(RankFailure, match=r"adders: rank 1: Traceback(.|\n)*ArithmeticError: no such sum"):
            ranks.call(Adder.fail_on_rank, 1)


def test_a_side_that_cannot_be_built_is_named(monkeypatch):
    fork_ranks(monkeypatch)
    with pytest.raises(RankFailure, match=r"broken: rank 0: Traceback(.|\n)*LookupError: nothing to build"):
        start_ranks("broken", unbuildable).call(Adder.add, 1)
