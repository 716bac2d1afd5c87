"""The processes of a bench: same settings for all, answers in rank order, and a failure says whose it was."""

import os

import pytest

from megamix.bench import processes
from megamix.bench.processes import Ranks, process_environment
from tests.bench.tiny import Adder, unbuildable


def test_ranks_keep_their_object_between_calls_and_know_each_other() -> None:
    with Ranks("adders", Adder, 5, world_size=2, threads=1, environment={"MEGAMIX_ADDER": "yes"}) as ranks:
        assert ranks.call("add", 2) == [7, 7]
        assert ranks.call("add", 1) == [8, 8]
        assert ranks.call("sum_over_ranks") == [17.0, 17.0]
        assert ranks.call("setting", "MEGAMIX_ADDER") == [("yes", 1)] * 2
        assert ranks.call("setting", "GLOO_SOCKET_IFNAME") == [("lo", 1)] * 2  # nobody reaches them from elsewhere
        for name, value in process_environment(1).items():
            assert ranks.call("setting", name) == [(value, 1)] * 2
        with pytest.raises(RuntimeError, match=r"adders: rank 1 of 2 failed:\n(.|\n)*ArithmeticError: no such sum"):
            ranks.call("fail_on_rank", 1)


def test_a_rank_that_dies_or_cannot_be_built_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"broken: rank 0 of 1 failed:\n(.|\n)*LookupError: nothing to build"):
        Ranks("broken", unbuildable)
    with (
        pytest.raises(RuntimeError, match="mortal: rank 0 of 1 died with exit code 3"),
        Ranks("mortal", Adder, 0) as ranks,
    ):
        ranks.call("die")


def test_a_rank_that_does_not_answer_is_named_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_DEADLINE_S", 0.0)
    with pytest.raises(RuntimeError, match="slow: rank 0 of 1 did not answer for 0 s"):
        Ranks("slow", Adder, 0)


def test_malloc_settings_are_those_of_the_launcher() -> None:
    keep = process_environment(3)
    assert keep["OMP_NUM_THREADS"] == "3"
    if os.uname().sysname == "Linux" and "glibc" in os.confstr("CS_GNU_LIBC_VERSION"):
        assert keep["MALLOC_MMAP_THRESHOLD_"] in (str(2**32), str(2**25))
        assert (keep["MALLOC_TRIM_THRESHOLD_"], keep["MALLOC_TOP_PAD_"]) == ("4294967296", "268435456")


def test_elsewhere_than_glibc_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes.ctypes, "CDLL", lambda name: object())
    assert process_environment(1) == {"OMP_NUM_THREADS": "1"}
