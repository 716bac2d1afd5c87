"""An overflowing step, a probe and a discarded step leave no trace in buffers that forwards change, such as running
statistics and their counts, whatever wrote them; writes of user code between steps stay.
"""

from typing import get_args

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from megamix import Precision, Sharding, StaticLossScale
from megamix.mixed_precision.settings import Shard
from tests.builders import make_engine

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
    sharding = Sharding([model.first, model.last], shard=shard)
    return make_engine(model, None, FP16, sharding, **more)


def _forward(engine, step, times=1.0):
    rank = dist.get_rank() if dist.is_initialized() else 0
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + rank))
    return engine((x * times).half()).float().square().mean()


def _step(engine, step, overflows=False):
    """Take a step; if it overflows, on one rank alone."""
    alone = not dist.is_initialized() or dist.get_rank() == 1
    for _ in range(engine.grad_accum_steps):
        engine.backward(_forward(engine, step) * (float("inf") if overflows and alone else 1.0))
    assert bool(engine.step().found_inf) == overflows


def _buffers(engine):
    return {name: buffer.clone() for name, buffer in engine.module.named_buffers()}


def _equal(one, other):
    return [name for name in one if torch.equal(one[name], other[name])]


def _kept_over_overflows(shard, recompute, micro_batches):
    """Return whether each step changed the right buffers, with an overflow also in the first step."""
    engine = _engine(shard, recompute, grad_accum_steps=micro_batches)
    told = []
    for step, overflows in enumerate([True, False, True, False]):
        before = _buffers(engine)
        _step(engine, step, overflows)
        same = _equal(before, _buffers(engine))
        told.append(len(same) == len(before) if overflows else same == STAY)
    return told


def _all_kept():
    cases = [(shard, recompute) for shard in get_args(Shard) for recompute in (False, True)]
    return [_kept_over_overflows(shard, recompute, 2) for shard, recompute in cases]


def test_an_overflow_on_one_rank_moves_no_buffer_on_any(run_ranks):
    assert run_ranks(_all_kept, 2) == [[[True] * 4] * 6] * 2


def _discard(engine):
    engine.backward(_forward(engine, 1))
    engine.discard_step()


def _fail_in_backward(engine):
    class Planted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("planted")

    hook = engine.module.first.register_forward_hook(lambda module, args, out: Planted.apply(out))
    with pytest.raises(ValueError, match="planted"):
        engine.backward(_forward(engine, 1))
    hook.remove()


def _fail_in_forward(engine):
    def fail(*_):
        raise ValueError("planted")

    hook = engine.module.last.register_forward_hook(fail)
    with pytest.raises(ValueError, match="planted"):
        _forward(engine, 1)
    hook.remove()
    engine.discard_step()


def _probe(engine):
    engine.backward(_forward(engine, 1))
    engine.probe_loss_scale()


def _two_forwards(engine):
    engine.backward(_forward(engine, 1) + _forward(engine, 2) * float("nan"))
    engine.step()


@pytest.mark.parametrize("spoil", [_discard, _fail_in_backward, _fail_in_forward, _probe, _two_forwards])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_what_is_no_step_moves_no_buffer(spoil, recompute, steps_before):
    engine = _engine(recompute=recompute)
    for step in range(steps_before):
        _step(engine, step)
    before = _buffers(engine)
    spoil(engine)
    assert _equal(before, _buffers(engine)) == [*before]
    _step(engine, 7)
    assert _equal(before, _buffers(engine)) == STAY


def test_what_user_code_writes_between_steps_is_not_put_back():
    engine = _engine()
    _step(engine, 0)
    model = engine.module
    for number, write in enumerate(
        [
            lambda: model.norms[0].running_mean.fill_(3.0),
            lambda: model.norms[1].table.mul_(2.0),
            lambda: model.track.register_buffer("running_var", torch.full((4,), 5.0)),
        ]
    ):
        write()
        before = _buffers(engine)
        _step(engine, number, overflows=True)
        assert _equal(before, _buffers(engine)) == [*before]
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
    before = _buffers(engine)
    _step(engine, 3, overflows=True)
    assert _equal(before, _buffers(engine)) == [*before]


def test_statistics_of_compiled_blocks_are_put_back():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False)), nn.Linear(4, 1))
    model[0].compile(backend="aot_eager")
    engine = make_engine(model, precision=FP16)
    _step(engine, 0)
    before = _buffers(engine)
    _step(engine, 1, overflows=True)
    assert _equal(before, _buffers(engine)) == [*before]
    _step(engine, 1)
    assert _equal(before, _buffers(engine)) == []


class _Operands(TorchDispatchMode):
    """Notes the id of each tensor that an operation receives."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.update(map(id, tree_leaves((args, kwargs))))
        return func(*args, **(kwargs or {}))


def test_buffers_of_any_kind_are_left_alone_if_nothing_moves_them():
    kinds = {
        "eighth": torch.ones(3).to(torch.float8_e4m3fn),
        "complex": torch.ones(3, dtype=torch.complex64),
        "expanded": torch.ones(1).expand(4, 3),
        "sparse": torch.eye(3).to_sparse(),
        "unknown": torch.full((2, 2), float("nan")),
        "flag": torch.tensor(True),
        "empty": torch.zeros(0),
    }
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 1))
    for name, buffer in kinds.items():
        model[0].register_buffer(name, buffer, persistent=False)
    engine = make_engine(model, precision=FP16)
    _step(engine, 0, overflows=True)  # the engine learns in this step's first forward
    with _Operands() as operands:
        _step(engine, 1)
        _step(engine, 2, overflows=True)
    assert not [name for name, buffer in kinds.items() if getattr(model[0], name) is not buffer]
    touched = [name for name, buffer in model.named_buffers() if id(buffer) in operands.seen]
    assert touched == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
