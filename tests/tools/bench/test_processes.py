"""A bench's processes have the same settings and answer in rank order; a failure names its process."""

from functools import partial

import pytest

from megamix.tools.bench.ranks import start_ranks
from megamix.tools.ranks import RankFailure
from tests.tools.bench.tiny import Adder, fork_ranks, unbuildable


def test_ranks_keep_their_object_between_calls_and_know_each_other():
    settings = {"MEGAMIX_ADDER": "yes"}
    with start_ranks("adders", partial(Adder, 5), world_size=2, threads=1, environment=settings) as ranks:
        assert ranks.call(Adder.add, 2) == [7, 7]
        assert ranks.call(Adder.add, 1) == [8, 8]
        assert ranks.call(Adder.sum_over_ranks) == [17.0, 17.0]
        assert ranks.call(Adder.setting, "MEGAMIX_ADDER") == [("yes", 1)] * 2
        assert ranks.call(Adder.setting, "GLOO_SOCKET_IFNAME") == [("lo", 1)] * 2  # other machines cannot reach them
        assert ranks.call(Adder.setting, "OMP_NUM_THREADS") == [("1", 1)] * 2
        assert all(ranks.call(Adder.keeps_freed_memory))
        with pytest.raises(RankFailure, match=r"adders: rank 1: Traceback(.|\n)*ArithmeticError: no such sum"):
            ranks.call(Adder.fail_on_rank, 1)


def test_a_side_that_cannot_be_built_is_named(monkeypatch):
    fork_ranks(monkeypatch)
    with pytest.raises(RankFailure, match=r"broken: rank 0: Traceback(.|\n)*LookupError: nothing to build"):
        start_ranks("broken", unbuildable).call(Adder.add, 1)
