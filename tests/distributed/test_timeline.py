"""A watched step reports for every bucket when its transfers were launched, had arrived, were needed and were awaited.
It computes the same bits and never makes the host wait for a GPU.
"""

import threading
from contextlib import nullcontext

import pytest
import torch

from megamix import Precision, Sharding
from megamix.comm import timeline as timeline_module
from megamix.comm.collectives import Pending
from megamix.comm.timeline import Timeline, Transfer
from megamix.log.profiling import Transfers
from tests.builders import make_engine, make_model, train_step


class Work:
    """A collective that ends on demand."""

    def __init__(self, error=None):
        self.end, self.error = threading.Event(), error

    def wait(self):
        self.end.wait()
        if self.error is not None:
            raise self.error


@pytest.fixture
def now(monkeypatch):
    """Return the time of a clock that the test sets."""
    time = {"s": 10.0}
    monkeypatch.setattr(timeline_module.time, "perf_counter", lambda: time["s"])
    return time


def test_a_transfer_lands_when_it_has_arrived_and_is_waited_for_from_when_it_is_needed(now):
    timeline, work = Timeline(torch.device("cpu")), Work()
    summed = Pending(work, then=lambda: now.update(s=17.5))  # a sum takes time
    now["s"] = 11.0
    timeline.watch("reduce_scatter", 3, summed)
    (arrival,) = summed.works
    now["s"] = 12.0
    work.end.set()
    arrival.wait()
    now["s"] = 15.0
    summed.wait()
    now["s"] = 20.0
    summed.wait()  # waiting again: nothing is left
    assert timeline.transfers() == [Transfer("reduce_scatter", 3, 1.0, 2.0, 5.0, 2.5)]


def test_an_error_of_a_transfer_reaches_who_waits_for_it():
    work = Work(RuntimeError("a peer died"))
    pending = Pending(work)
    Timeline(torch.device("cpu")).watch("all_gather", 0, pending)
    work.end.set()
    with pytest.raises(RuntimeError, match="a peer died"):
        pending.wait()


def _watched_and_not(overlap, reduce_dtype):
    weights, timelines = [], []
    for watched in (2, 0):
        model = make_model(tied=False)
        sharding = Sharding([*model.blocks], bucket_size=1500, overlap=overlap)
        engine = make_engine(model, None, Precision(torch.bfloat16, reduce_dtype=reduce_dtype), sharding, clip_grad=1.0)
        for step in range(3):
            timeline = Timeline(engine.device)
            with engine.observe(Transfers(timeline)) if step < watched else nullcontext():
                train_step(engine, step)
            timelines += [timeline] if step < watched else []
        weights.append(engine.full_weights())
    equal = all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    return [timeline.transfers() for timeline in timelines], len(engine.buckets), equal


@pytest.mark.parametrize(("overlap", "reduce_dtype"), [(True, "half_fp32_sum"), (False, "half")])
def test_watched_steps_compute_the_same_bits_and_tell_of_every_bucket(run_ranks, overlap, reduce_dtype):
    for steps, buckets, equal in run_ranks(_watched_and_not, 2, overlap, reduce_dtype):
        assert equal
        assert buckets > 3
        for transfers in steps:
            sums = [one.bucket for one in transfers if one.kind == "reduce_scatter"]
            assert sums == [*range(buckets)]
            assert sorted(one.bucket for one in transfers if one.kind == "all_gather") == sums
            for one in transfers:
                assert 0 < one.launched_s <= min(one.landed_s, one.needed_s)
                assert one.waited_s >= max(0.0, one.landed_s - one.needed_s)


def test_a_gpu_tells_by_events_alone_until_all_is_over(monkeypatch):
    recorded = []  # stream of each event, in order
    streams = ["compute"]

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            recorded.append(streams[-1])
            self.at = len(recorded)

        def elapsed_time(self, end):
            assert recorded[-1] == "synchronized"
            return 1000.0 * (end.at - self.at)

    class OnStream(nullcontext):
        def __enter__(self):
            streams.append(self.enter_result)

        def __exit__(self, *error):
            streams.pop()

    class Ordered:
        def wait(self):
            recorded.append(f"{streams[-1]} waits")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "beside")
    monkeypatch.setattr(torch.cuda, "stream", OnStream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: recorded.append("synchronized"))
    timeline, pending = Timeline(torch.device("cuda", 0)), Pending(Ordered())
    timeline.watch("all_gather", 1, pending)
    pending.wait()
    assert recorded == ["compute", "compute", "beside waits", "beside", "compute", "compute waits", "compute"]
    assert timeline.transfers() == [Transfer("all_gather", 1, 1.0, 3.0, 4.0, 2.0)]
