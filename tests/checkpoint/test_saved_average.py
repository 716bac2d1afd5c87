"""A checkpoint keeps the average of the weights, and any layout loads it, bit for bit. An average that a checkpoint
lacks starts from its masters; one that nobody keeps is dropped; the log says either. It is exported by name.
"""

import logging

import torch

from megamix import Checkpoints, WeightAverage
from megamix.checkpoint.export_dcp import export_dcp
from megamix.checkpoint.verify import read_checkpoint
from tests.builders import bf16_engine, train_steps

DECAY = 0.75


def _engine(shard="states", bucket_size=1111):
    engine = bf16_engine(shard=shard, bucket_size=bucket_size)
    return engine, WeightAverage(engine, DECAY)


def _averaged(engine, average):
    with average.weights():
        return engine.full_weights()


def _saved(folder, shard):
    engine, average = _engine(shard)
    checkpoints = Checkpoints(engine, folder)
    checkpoints.load()
    train_steps(engine)
    checkpoints.save({})
    return _averaged(engine, average)


def _loaded(folder, shard, bucket_size):
    engine, average = _engine(shard, bucket_size)
    assert Checkpoints(engine, folder).load() == {}
    return _averaged(engine, average)


def _same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_any_layout_loads_the_average(run_ranks, tmp_path):
    for size, shard in ((1, "gradients"), (2, "parameters")):
        folder = tmp_path / shard
        want = _saved(folder, shard) if size == 1 else run_ranks(_saved, size, folder, shard)[0]
        assert _same(_loaded(folder, "states", None), want)
        for got in run_ranks(_loaded, 2, folder, "parameters", 1):
            assert _same(got, want)


def test_an_average_that_is_not_there_starts_from_the_masters(tmp_path, caplog):
    engine = bf16_engine()
    train_steps(engine)
    Checkpoints(engine, tmp_path).save({})
    own, average = _engine()
    with caplog.at_level(logging.WARNING):
        Checkpoints(own, tmp_path).load()
    assert caplog.messages == ["the average of the weights starts from the masters: the checkpoint has none"]
    assert _same(_averaged(own, average), engine.full_weights())


def test_an_average_that_nobody_keeps_is_dropped(tmp_path, caplog):
    _saved(tmp_path, "states")
    engine, straight = bf16_engine(), bf16_engine()
    with caplog.at_level(logging.WARNING):
        Checkpoints(engine, tmp_path).load()
    assert caplog.messages == ["the average of the weights is dropped: none is kept from now on"]
    train_steps(straight)
    assert _same(engine.full_weights(), straight.full_weights())


def test_torch_reads_the_average_by_name(tmp_path):
    want = _saved(tmp_path / "own", "states")
    export_dcp(read_checkpoint(next((tmp_path / "own").glob("step_*"))), tmp_path / "dcp")
    found = {name: torch.zeros_like(tensor) for name, tensor in want.items()}
    torch.distributed.checkpoint.load({"average": found}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert _same(found, want)


def test_the_engine_s_own_state_keeps_it_too():
    engine, average = _engine()
    train_steps(engine)
    other, own = _engine()
    other.load_state_dict(engine.state_dict())
    assert _same(_averaged(other, own), _averaged(engine, average))
    plain = bf16_engine(shard="states", bucket_size=1111)
    plain.load_state_dict(engine.state_dict())  # which keeps none
    other.load_state_dict(plain.state_dict())
    assert _same(_averaged(other, own), plain.full_weights())
