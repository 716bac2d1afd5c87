"""Batches do not depend on when they were announced."""

import threading
from unittest import mock

import numpy as np
import pytest
import torch

from megamix.data.loader import BatchLoader
from megamix.data.source import MarkovSource, Rows

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")

CPU = torch.device("cpu")
THREAD = "megamix-loader_0"
PATIENCE_S = 60.0  # only a failing test waits this long


class RecordingSource:
    """Rows filled with the sample's number; `gate` holds reads back, `reads` says what was read on which thread."""

    seq_len = 3

    def __init__(self):
        self.gate = threading.Event()
        self.gate.set()
        self.reads = []
        self.new_read = threading.Semaphore(0)
        self.failing = None

    def read(self, samples):
        self.reads.append((samples, threading.current_thread().name))
        self.new_read.release()
        assert self.gate.wait(PATIENCE_S)
        if samples == self.failing:
            raise OSError(f"cannot read {samples}")
        return Rows(np.arange(samples.start, samples.stop, dtype=np.int64)[:, None] * 10 + np.arange(4))

    def wait_for_read(self):
        assert self.new_read.acquire(timeout=PATIENCE_S)

    def expect_no_read(self):
        # Right however long it waits; the wait gives a loader that reads too much the time to do it.
        assert not self.new_read.acquire(timeout=0.1), self.reads

    @property
    def read_ahead(self):
        return [samples for samples, thread in self.reads if thread == THREAD]


@pytest.fixture
def source():
    return RecordingSource()


@pytest.fixture
def loader(source):
    with BatchLoader(source, CPU, max_ready=2) as loader:
        yield loader
        source.gate.set()


def test_targets_are_the_tokens_shifted_by_one_and_share_no_memory_with_them(loader):
    tokens, targets = loader.get(range(4, 6))[:2]
    assert tokens.tolist() == [[40, 41, 42], [50, 51, 52]]
    assert tokens.dtype == targets.dtype == torch.int64
    assert tokens.is_contiguous()
    assert targets.is_contiguous()
    tokens.fill_(-1)
    assert targets.tolist() == [[41, 42, 43], [51, 52, 53]]


def test_what_a_batch_holds_does_not_depend_on_when_it_was_announced():
    markov = MarkovSource(vocab_size=50, seq_len=8, branching=3, seed=1)
    wanted = [range(start, start + 4) for start in (0, 4, 8, 4, 100, 0)]  # with redone and distant batches
    with BatchLoader(markov, CPU) as announced, BatchLoader(markov, CPU) as unannounced:
        for samples in wanted:
            announced.prefetch(samples)
        for samples in wanted:
            one, other = announced.get(samples), unannounced.get(samples)
            assert torch.equal(one.tokens, other.tokens)
            assert torch.equal(one.targets, other.targets)


def test_no_more_batches_wait_in_memory_than_allowed(source, loader):
    announced = [range(start, start + 1) for start in range(5)]
    for samples in announced:
        loader.prefetch(samples)
    source.wait_for_read()
    source.wait_for_read()
    source.expect_no_read()
    loader.get(range(1))  # makes room for exactly one more
    source.wait_for_read()
    source.expect_no_read()
    assert source.read_ahead == announced[:3]


def test_a_batch_behind_unfetched_ones_is_served_at_once_and_not_read_again(source, loader):
    for start in range(5):
        loader.prefetch(range(start, start + 1))
    for start in (4, 3, 2, 1, 0):  # while 0 and 1 fill all the room
        assert loader.get(range(start, start + 1)).tokens[0, 0] == start * 10
        source.wait_for_read()
    source.expect_no_read()


def test_get_waits_for_a_batch_that_is_being_read_instead_of_reading_it_twice(source, loader):
    source.gate.clear()
    loader.prefetch(range(2))
    source.wait_for_read()  # the thread is inside read()
    threading.Timer(0.05, source.gate.set).start()  # right without the delay too; with it, get() arrives first
    assert loader.get(range(2)).tokens[0, 0] == 0
    assert source.reads == [(range(2), THREAD)]


def test_announcing_a_batch_twice_reads_it_once(source):
    source.gate.clear()
    with BatchLoader(source, CPU) as loader:
        loader.prefetch(range(1))
        source.wait_for_read()
        loader.prefetch(range(1))  # while it is being read
        loader.prefetch(range(5, 6))
        loader.prefetch(range(5, 6))  # while it waits its turn
        source.gate.set()
        source.wait_for_read()
        loader.prefetch(range(1))  # while it lies ready
        loader.prefetch(range(6, 7))
        source.wait_for_read()
        source.expect_no_read()
    assert source.read_ahead == [range(1), range(5, 6), range(6, 7)]


def test_an_exception_of_the_thread_surfaces_in_the_get_of_its_batch_and_only_there(source, loader):
    source.failing = range(2, 4)
    loader.prefetch(range(2, 4))
    loader.prefetch(range(4, 6))
    source.wait_for_read()
    source.wait_for_read()  # the read of the second has begun, so the first has failed
    source.failing = None  # the thread's error is raised even if a new read would not meet it
    assert loader.get(range(4, 6)).tokens[0, 0] == 40
    with pytest.raises(OSError, match=r"cannot read range\(2, 4\)"):
        loader.get(range(2, 4))
    assert loader.get(range(2, 4)).tokens[0, 0] == 20  # a second try is a new read


def test_close_ends_the_thread_after_a_read_that_is_under_way(source):
    loader = BatchLoader(source, CPU, max_ready=1)
    source.gate.clear()
    for start in range(3):  # nobody fetches them
        loader.prefetch(range(start, start + 1))
    source.wait_for_read()
    threading.Timer(0.05, source.gate.set).start()
    loader.close()
    loader.close()
    assert source.gate.is_set()
    assert THREAD not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(RuntimeError, match="after shutdown"):
        loader.prefetch(range(1))


def test_batches_are_pinned_when_the_device_is_a_gpu(source, monkeypatch):
    empty = torch.empty
    made = mock.Mock(side_effect=lambda shape, dtype, pin_memory: empty(shape, dtype=dtype))
    monkeypatch.setattr(torch, "empty", made)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for device in ("cuda:0", "cpu"):
        with BatchLoader(source, torch.device(device)) as loader:
            loader.get(range(1))
    assert [call.kwargs["pin_memory"] for call in made.call_args_list] == [True, True, False, False]
