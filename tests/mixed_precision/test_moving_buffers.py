"""An overflowing step, a probe and a discarded step leave no trace in buffers that forwards change, such as running
statistics and their counts, whatever wrote them; writes of user code between steps stay.
"""

from contextlib import contextmanager
from functools import partial
from typing import get_args

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megamix import Precision, Sharding, StaticLossScale
from megamix.mixed_precision.settings import Shard
from tests.builders import make_engine
from tests.mixed_precision.spoilers import SPOILERS

STAY = ["norms.1.table", "track.num_batches_tracked"]
FP16 = Precision(torch.float16, loss_scale=StaticLossScale(8.0))


class Replaced(nn.Module):
    """Changes one buffer in place by a function that torch counts, and replaces a second one by another tensor."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("average", torch.zeros(4), persistent=False)
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, x):
        with torch.no_grad():
            self.total += x.mean(0)
            self.average = 0.9 * self.average + 0.1 * x.mean(0)
        return x + self.table.to(x.dtype)


class Net(nn.Module):
    def __init__(self, recompute=False):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norms = nn.Sequential(nn.BatchNorm1d(4, affine=False), Replaced())
        self.track = nn.InstanceNorm1d(4, track_running_stats=True)  # its statistics have no count
        self.last = nn.Linear(4, 1)
        self.recompute = recompute

    def forward(self, x):
        x = self.first(x)
        x = checkpoint(self.norms, x, use_reentrant=False) if self.recompute else self.norms(x)
        return self.last(self.track(x.T.unsqueeze(0)).squeeze(0).T)


def _engine(shard="states", recompute=False, **more):
    torch.manual_seed(0)
    model = Net(recompute)
    return make_engine(model, None, FP16, Sharding([model.first, model.last], shard=shard), **more)


def _forward(engine, step):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + engine.topology.dp.rank))
    return engine(x.half()).float().square().mean()


def _step(engine, step, overflows=False):
    """Take a step; if it overflows, on the last rank alone."""
    dp = engine.topology.dp
    for _ in range(engine.grad_accum_steps):
        engine.backward(_forward(engine, step) * (float("inf") if overflows and dp.rank == dp.size - 1 else 1.0))
    assert bool(engine.step().found_inf) == overflows


@contextmanager
def _kept(engine, moved=None):
    """Run a block that leaves all buffers alone, or moves all but those in `moved`."""
    before = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    yield
    same = [name for name, buffer in engine.module.named_buffers() if torch.equal(before[name], buffer)]
    assert same == ([*before] if moved is None else moved)


def _overflow(shard):
    for recompute in (False, True):
        engine = _engine(shard, recompute, grad_accum_steps=2)
        for step, overflows in enumerate([True, False, True, False]):
            with _kept(engine, None if overflows else STAY):
                _step(engine, step, overflows)


@pytest.mark.parametrize("shard", get_args(Shard))
def test_an_overflow_on_one_rank_moves_no_buffer_on_any(run_ranks, shard):
    run_ranks(_overflow, 2, shard)


def _two_forwards(engine, forward):
    engine.backward(_forward(engine, 1) + _forward(engine, 2) * float("nan"))
    engine.step()


@pytest.mark.parametrize("spoil", [*SPOILERS, _two_forwards])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_what_is_no_step_moves_no_buffer(spoil, recompute, steps_before):
    engine = _engine(recompute=recompute)
    for step in range(steps_before):
        _step(engine, step)
    with _kept(engine, STAY):
        with _kept(engine):
            spoil(engine, partial(_forward, engine, 1))
        _step(engine, 7)


def test_what_user_code_writes_between_steps_is_not_put_back():
    engine = _engine()
    _step(engine, 0)
    model = engine.module
    writes = [
        lambda: model.norms[0].running_mean.fill_(3.0),
        lambda: model.norms[1].table.mul_(2.0),
        lambda: model.track.register_buffer("running_var", torch.full((4,), 5.0)),
    ]
    for number, write in enumerate(writes):
        write()
        with _kept(engine):
            _step(engine, number, overflows=True)
    nan = _forward(engine, 4) * float("nan")
    model.norms[1].total.fill_(7.0)  # the value that the next forward finds stays
    engine.backward(nan + _forward(engine, 5))
    model.norms[1].average.fill_(2.0)
    engine.step()
    assert model.norms[1].total.tolist() == [7.0] * 4
    assert model.norms[1].average.tolist() == [2.0] * 4


def test_evaluation_and_a_norm_that_is_thawed_later():
    engine = _engine()
    model = engine.module
    model.norms[0].eval()
    _step(engine, 0)
    model.norms[0].train()
    _step(engine, 1)  # the engine learns in this step
    model.eval()
    with torch.no_grad():
        _forward(engine, 2)
    model.train()
    with _kept(engine):
        _step(engine, 3, overflows=True)


def test_statistics_of_compiled_blocks_are_put_back():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False)), nn.Linear(4, 1))
    model[0].compile(backend="aot_eager")
    engine = make_engine(model, precision=FP16)
    _step(engine, 0)
    with _kept(engine):
        _step(engine, 1, overflows=True)
    with _kept(engine, []):
        _step(engine, 1)


def test_buffers_of_any_kind_are_left_alone_if_nothing_moves_them():
    kinds = {
        "eighth": torch.ones(3).to(torch.float8_e4m3fn),
        "expanded": torch.ones(1).expand(4, 3),
        "sparse": torch.eye(3).to_sparse(),
        "unknown": torch.full((2, 2), float("nan")),
    }
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 1))
    for name, buffer in kinds.items():
        model[0].register_buffer(name, buffer, persistent=False)
    engine = make_engine(model, precision=FP16)
    _step(engine, 0, overflows=True)  # the engine learns in this step's first forward
    _step(engine, 1)
    _step(engine, 2, overflows=True)
    assert not [name for name, buffer in kinds.items() if getattr(model[0], name) is not buffer]
