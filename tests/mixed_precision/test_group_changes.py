"""A group is frozen where its `lr_factor` is 0, as with `p.grad = None` in torch. Its weights stay between `min` and
`max`. A gradient hook changes the sum over all ranks. Each gives the bits of torch, or of an engine without it, for
every optimizer and `shard`, on one rank and two.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters

from megamix import NAG, AdamW, Muon, ParamGroup, Precision, Sharding, StaticLossScale
from megamix.base import constants
from megamix.mixed_precision import fused_update
from tests.builders import FP32, make_engine

FACTORS = [0, 0.0, 1.0, 0.0, 0.5]  # of the second block; the last one stays
UPDATES = range(6)
MOVES = [2, 4, 5]  # updates that do not freeze it
SCALED = Precision(torch.float16, loss_scale=StaticLossScale(2.0**6))
# Optimizers with the schedules of some updates.
OPTIMIZERS = {
    "adamw": lambda at, **more: AdamW(lr=[0.01 * (1 + n) for n in at], betas=(0.9, 0.99), **more),
    "scheduled": lambda at, **more: AdamW(
        lr=0.01, betas=([0.5 + n / 20 for n in at], 0.99), weight_decay=[n / 10 for n in at], **more
    ),
    "by chance": lambda at, **more: AdamW(lr=0.01, betas=(0.9, 0.999), state_dtype=torch.bfloat16, **more),
    "nag": lambda at, **more: NAG(lr=0.01, momentum=[0.8 + n / 50 for n in at], **more),
    "muon": lambda at, **more: Muon(lr=0.01, row_beta2=0.9, **more),
}


class Fed(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))))

    def forward(self, grad):
        return (self.weight * grad.to(self.weight.dtype)).sum().float()


def _engine(optimizer, precision=FP32, shard="states", **settings):
    model = nn.Module()
    model.blocks = nn.ModuleList([Fed(16, 64), Fed(8, 128), Fed(128)])
    sharding = Sharding([*model.blocks], bucket_size=1024, shard=shard, accumulate=settings.pop("accumulate", "local"))
    return make_engine(model, optimizer, precision, sharding, **settings)


def _grads(step, rank=0):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return [torch.randn(shape, generator=generator) for shape in ((16, 64), (8, 128), (128,))]


def _step(engine, step, infinite=None):
    """Train a step of two micro-batches, or ranks."""
    ranks = [engine.topology.dp.rank] if engine.topology.dp.size == 2 else [0, 1]
    for rank in ranks:
        grads = _grads(step, rank)
        if infinite is not None:
            grads[infinite][3] = torch.inf
        engine.backward(sum(block(grad) for block, grad in zip(engine.module.blocks, grads, strict=True)))
    return engine.step()


def _held(engine, block=1):
    owned = [one for one in (*engine.owned_ranges(), *engine.held_states()) if f"blocks.{block}." in one.spec.name]
    held = {(one.start, kind): tensor.clone() for one in owned for kind, tensor in one.tensors.items()}
    with engine.whole_parameters():
        return held | {"half": engine.module.blocks[block].weight.detach().clone()}


def _same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def _count():
    return 2 // (dist.get_world_size() if dist.is_initialized() else 1)


def _frozen(cases):
    for kind, shard in cases:
        build, settings = OPTIMIZERS[kind], {"grad_accum_steps": _count(), "clip_grad": 0.0}
        group = ParamGroup(pattern="blocks.1.*", lr_factor=FACTORS)
        late = ParamGroup(pattern="blocks.1.*", lr_factor=[FACTORS[min(n, 4)] for n in MOVES])
        engine = _engine(build(UPDATES, groups=(group,)), SCALED, shard, **settings)
        begun = _engine(build(MOVES, groups=(late,)), SCALED, shard, **settings)
        for update in UPDATES:
            before = _held(engine)
            assert bool(_step(engine, update, infinite=0).found_inf)  # takes no entry
            result = _step(engine, update, infinite=None if update in MOVES else 1)
            assert not bool(result.found_inf), (kind, shard, update)
            assert _same(before, _held(engine)) == (update not in MOVES), (kind, shard, update)
            if update in MOVES:
                _step(begun, update)
                assert _same(_held(begun), _held(engine)), (kind, shard, update)
            if update == 2:  # another engine goes on
                state, engine = engine.state_dict(), _engine(build(UPDATES, groups=(group,)), SCALED, shard, **settings)
                engine.load_state_dict(state)


ALL = [(kind, "states") for kind in OPTIMIZERS] + [("adamw", "gradients"), ("muon", "parameters")]


@pytest.mark.parametrize("case", ALL, ids=" ".join)
def test_a_frozen_group_keeps_its_bits_and_thawed_is_as_if_it_had_begun_there(case):
    _frozen([case])


def test_likewise_on_two_ranks(run_ranks):
    run_ranks(_frozen, 2, [("adamw", "states"), ("muon", "gradients"), ("nag", "parameters")])


@pytest.mark.parametrize("compiled", [False, True])
def test_a_frozen_group_is_one_whose_gradient_is_none_in_torch(compiled, monkeypatch):
    if compiled:  # traced as for a compiler
        traced = {"dynamic": True, "fullgraph": True, "backend": "eager"}
        monkeypatch.setattr(fused_update, "_compile", lambda function: torch.compile(function, **traced))
        monkeypatch.setattr(constants, "TRIAL", 256)
        torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    groups = (ParamGroup(pattern="blocks.1.*", lr_factor=FACTORS), ParamGroup(pattern="blocks.2.*", max=0.5))
    settings = {"grad_accum_steps": 2, "compile_update": compiled}
    engine = _engine(AdamW(lr=0.01, weight_decay=0.1, betas=(0.9, 0.99), groups=groups), **settings)
    masters = [nn.Parameter(block.weight.detach().clone()) for block in engine.module.blocks]
    plain = [{"params": [one], "weight_decay": 0.1 * (one.dim() > 1), "lr": torch.tensor(0.01)} for one in masters]
    optimizer = torch.optim.AdamW(plain, betas=(0.9, 0.99), fused=True)
    for update in UPDATES:
        result = _step(engine, update)
        for master, *grads in zip(masters, _grads(update), _grads(update, 1), strict=True):
            master.grad = sum(grads) / 2
        optimizer.param_groups[1]["lr"] = torch.tensor(0.01) * FACTORS[min(update, 4)]
        masters[1].grad = masters[1].grad if update in MOVES else None
        norm = torch.nn.utils.get_total_norm([one.grad for one in masters if one.grad is not None])
        torch.testing.assert_close(result.grad_norm, norm, rtol=1e-6, atol=0.0)
        optimizer.step()
        masters[2].data.clamp_(max=0.5)
        got = [*engine.full_weights().values()]
        if compiled:  # with roundings of its own
            torch.testing.assert_close(got, [one.data for one in masters], rtol=1e-5, atol=1e-7)
        else:
            assert all(map(torch.equal, got, masters)), update
    assert counters["stats"]["unique_graphs"] - before == (2 if compiled else 0)  # the update, and the statistics


def _limited(cases):
    for kind, shard in cases:
        groups = (ParamGroup(pattern="blocks.1.*", min=-0.05, max=0.1),)
        engine = _engine(OPTIMIZERS[kind](UPDATES, groups=groups), SCALED, shard, grad_accum_steps=_count())
        plain = _engine(OPTIMIZERS[kind](UPDATES), SCALED, shard, grad_accum_steps=_count())
        begun = _held(engine)
        assert bool(_step(engine, 0, infinite=0).found_inf)
        assert _same(begun, _held(engine))
        assert begun["half"].abs().max() > 1
        for update in UPDATES:
            _step(engine, update)
            _step(plain, update)
            for one in plain.owned_ranges():
                if one.spec.name.startswith("blocks.1."):
                    one.tensors["master"].clamp_(-0.05, 0.1)
            plain.publish_masters()
            for block in range(3):
                assert _same(_held(plain, block), _held(engine, block)), (kind, shard, update)


def test_limits_are_a_clamp_after_each_update_on_one_rank_and_two(run_ranks):
    _limited([(kind, "states") for kind in ("adamw", "nag", "muon")])
    run_ranks(_limited, 2, [("adamw", "states"), ("nag", "gradients"), ("muon", "parameters")])


def _clipped(shard, accumulate, reduce_dtype, optimizer):
    """Return the weights after steps whose mean gradient is clamped to 0.5, and the last norm."""
    precision = Precision(torch.float16, loss_scale=StaticLossScale(2.0**6), reduce_dtype=reduce_dtype)
    engine = _engine(optimizer, precision, shard, accumulate=accumulate, grad_accum_steps=_count())
    engine.hook_gradients(lambda name, grad, divisor, first: grad.clamp_(-divisor / 2, divisor / 2))
    for step in range(4):
        result = _step(engine, step)
    engine.hook_gradients(lambda name, grad, divisor, first: grad.fill_(torch.nan))
    assert bool(_step(engine, 4).found_inf)
    engine.hook_gradients(None)
    assert float(_step(engine, 4).grad_norm) > float(result.grad_norm) + 1
    return engine.full_weights(), float(result.grad_norm)


WAYS = [("states", "local", "half"), ("gradients", "owner", "half_fp32_sum"), ("parameters", "local", "half")]


@pytest.mark.parametrize("way", WAYS, ids=" ".join)
def test_a_hook_after_the_sum_has_the_bits_of_torch_on_one_rank_and_two(run_ranks, way):
    optimizer = AdamW(lr=0.01, weight_decay=0.0, betas=(0.9, 0.99))
    masters = [nn.Parameter(fed.weight.detach().clone()) for fed in (Fed(16, 64), Fed(8, 128), Fed(128))]
    plain = torch.optim.AdamW(masters, lr=torch.tensor(0.01), weight_decay=0.0, betas=(0.9, 0.99), fused=True)
    norms = []
    for step in range(5):
        for master, *grads in zip(masters, _grads(step), _grads(step, 1), strict=True):
            scaled = [64 * grad.half() for grad in grads]
            mean = sum(one if way[2] == "half" else one.float() for one in scaled).float() / 128
            master.grad = mean.clamp(-0.5, 0.5) if step < 4 else mean
        norms.append(float(torch.nn.utils.get_total_norm([one.grad for one in masters])))
        plain.step()
    for weights, got in (_clipped(*way, optimizer), *run_ranks(_clipped, 2, *way, optimizer)):
        assert all(map(torch.equal, weights.values(), masters))
        assert got == pytest.approx(norms[3], rel=1e-6)


def test_a_hook_changes_what_muon_takes(run_ranks):
    optimizer = Muon(lr=0.01, ns_dtype=torch.float32)
    (alone, norm), *others = _clipped(*WAYS[0], optimizer), *run_ranks(_clipped, 2, *WAYS[2], optimizer)
    for weights, got in others:
        assert got == norm
        assert all(torch.equal(weights[name], alone[name]) for name in alone)


def _hooked(shard):
    """Return the weights after steps that leave two rows of the first block alone and clip each parameter's norm."""
    engine = _engine(AdamW(lr=0.01, weight_decay=0.0, betas=(0.9, 0.99)), FP32, shard, grad_accum_steps=_count())

    def hook(name, grad, divisor, first):
        if name == "blocks.0.weight":
            grad[: max(0, 2 * 64 - first)] = 0
        square = grad.div(divisor).double().square().sum()
        if dist.is_initialized():
            dist.all_reduce(square)
        grad.mul_((0.5 / square.sqrt()).clamp(max=1.0))

    engine.hook_gradients(hook)
    return engine.full_weights(), [float(_step(engine, step).grad_norm) for step in range(3)], engine.full_weights()


@pytest.mark.parametrize("shard", ["states", "parameters"])
def test_a_hook_zeroes_rows_and_clips_each_parameter_on_one_rank_and_two(run_ranks, shard):
    masters = [nn.Parameter(fed.weight.detach().clone()) for fed in (Fed(16, 64), Fed(8, 128), Fed(128))]
    plain = torch.optim.AdamW(masters, lr=0.01, weight_decay=0.0, betas=(0.9, 0.99))
    for step in range(3):
        for number, (master, *grads) in enumerate(zip(masters, _grads(step), _grads(step, 1), strict=True)):
            master.grad = sum(grads) / 2
            if number == 0:
                master.grad[:2] = 0
            torch.nn.utils.clip_grad_norm_([master], 0.5)
        plain.step()
    for before, norms, after in (_hooked(shard), *run_ranks(_hooked, 2, shard)):
        assert norms == pytest.approx([0.5 * 3**0.5] * 3)
        assert torch.equal(after["blocks.0.weight"][:2], before["blocks.0.weight"][:2])
        for number, master in enumerate(masters):
            torch.testing.assert_close(after[f"blocks.{number}.weight"], master.detach(), rtol=0, atol=1e-5)
