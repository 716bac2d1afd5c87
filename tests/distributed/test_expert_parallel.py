"""Blocks that expert-parallel ranks divide are trained as one process trains the whole parameters, bit for bit, with
each dtype, optimizer, `shard` and `accumulate`. An overflow in one block moves nothing anywhere.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from megamix import NAG, AdamW, Muon, Precision, ShardedEngine, Sharding, StaticLossScale
from megamix.comm.topology import Topology
from megamix.mixed_precision.settings import Placement
from tests.distributed.reference import train_reference
from tests.parallel.layouts import are_equal, assemble, contents, states, with_one_inf

RANKS, WIDTH = 4, 16
FULL_SHAPES = {"experts": (4, 16, WIDTH), "rows": (64, WIDTH)}  # divided in dim 0


class _Block(nn.Module):
    """A dense layer, a stack of experts and a matrix of which each rank has some rows. Nothing is exchanged: a rank's
    samples see its own blocks alone.
    """

    def __init__(self):
        super().__init__()
        for name, shape in FULL_SHAPES.items():
            self.register_parameter(name, nn.Parameter(0.2 * torch.randn(shape)))
        self.norm = nn.LayerNorm(WIDTH)
        self.dense = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, block, of):
        """Return the next hidden states. `block`: the one of `of` blocks in the held ones that is seen."""
        experts, rows = self.experts.chunk(of)[block], self.rows.chunk(of)[block]
        x = x + torch.tanh(self.dense(self.norm(x)))
        for expert in experts:
            x = x + torch.tanh(x @ expert.T)
        return x + (x @ rows.T).tanh() @ rows


class _Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, block=0, of=1):
        for layer in self.blocks:
            x = layer(x, block, of)
        return self.head(x)


OPTIMIZERS = {
    "adamw": AdamW(lr=0.01),
    "nag": NAG(lr=0.1, weight_decay=0.02),
    "muon": Muon(lr=0.02, ns_dtype=torch.float32, adamw_lr_factor=0.5),
}


@dataclass(frozen=True)
class Case:
    ep_size: int
    optimizer: str = "adamw"
    dtype: torch.dtype = torch.bfloat16
    reduce_dtype: str = "half"
    shard: str = "states"
    accumulate: str = "local"
    cp_size: int = 1
    bucket_size: int | None = 2000
    clip_grad: float = 0.0
    # What the plain loop asks for.
    steps = 3
    dp_size = RANKS

    @property
    def grad_dtype(self):
        return torch.float32 if self.reduce_dtype == "fp32" else self.dtype

    @property
    def loss_scale(self):
        return 2.0**8 if self.dtype == torch.float16 else 1.0

    def micro_batches(self, step, rank):
        return 2

    def loss(self, model, step, rank, micro_batch, block=0, of=1):
        generator = torch.Generator().manual_seed(1000 * step + 50 * rank + micro_batch)
        x = torch.randn(5, WIDTH, generator=generator).to(self.dtype)
        return model(x, block, of).float().square().mean()


def _engine(case):
    topology, model = Topology.connect(cp=case.cp_size, ep_size=case.ep_size), _Model()
    ep, placements = topology.along("ep"), {}
    for number, layer in model.blocks.named_children():
        for name, shape in FULL_SHAPES.items():
            block = getattr(layer, name).detach().chunk(ep.size)[ep.rank].clone()
            layer.register_parameter(name, nn.Parameter(block))
            offset = (shape[0] // ep.size * ep.rank, *[0] * (len(shape) - 1))
            owners = topology.owners_of("ep")
            placements[f"blocks.{number}.{name}"] = Placement(shape, offset, owners, along="ep")
    sharding = Sharding(
        [*model.blocks.children()], topology, case.bucket_size, placements=placements, shard=case.shard,
        accumulate=case.accumulate,
    )  # fmt: skip
    precision = Precision(case.dtype, case.grad_dtype, StaticLossScale(case.loss_scale), case.reduce_dtype)
    return ShardedEngine(
        model, OPTIMIZERS[case.optimizer], precision, sharding, clip_grad=case.clip_grad, grad_accum_steps=2,
        compile_update=False,
    )  # fmt: skip


def _backward(engine, case, step):
    rank = engine.topology.world.rank
    for micro_batch in range(case.micro_batches(step, rank)):
        engine.backward(case.loss(engine.module, step, rank, micro_batch))


def _train(case):
    """Return this rank's masters and states, the norms, and the unit of each parameter. The attempt after the first
    step overflows in the experts of one rank, and must leave no trace.
    """
    engine, norms = _engine(case), []
    for step in (0, None, *range(1, case.steps)):
        planted = step is None and engine.topology.world.rank == 2
        hook = engine.module.blocks[1].experts.register_hook(with_one_inf) if planted else None
        before = contents(engine) if case.shard != "parameters" else []
        _backward(engine, case, step or 0)
        result = engine.step()
        assert bool(result.found_inf) == (step is None)
        if step is None:
            engine.wait()
            assert case.shard == "parameters" or are_equal(before, contents(engine))
        else:
            norms.append(float(result.grad_norm))
        if hook is not None:
            hook.remove()
    units = {(slot.spec.name, slot.spec.unit) for bucket in engine.buckets for slot in bucket.plan.slots}
    return states(engine), norms, units


def _plain_loop(case):
    def loss_of(model, step, rank, micro_batch):
        return case.loss(model, step, rank, micro_batch, rank % case.ep_size, case.ep_size)

    return train_reference(_Model(), loss_of, OPTIMIZERS[case.optimizer], case)


FP32, FP16 = torch.float32, torch.float16
CASES = [
    Case(2),
    Case(4),
    Case(2, cp_size=2, shard="parameters"),
    Case(2, dtype=FP32, reduce_dtype="fp32", clip_grad=0.05),
    Case(4, dtype=FP16, reduce_dtype="half_fp32_sum", shard="gradients"),
    Case(2, dtype=FP16, reduce_dtype="half_fp32_sum", shard="parameters", bucket_size=None),
    Case(2, "nag", FP16, shard="gradients", accumulate="owner"),
    Case(4, "nag", reduce_dtype="fp32", shard="parameters"),
    Case(2, "muon", bucket_size=None),
    Case(4, "muon", FP32, "fp32", shard="parameters", accumulate="owner"),
    Case(2, "muon", FP16, "half_fp32_sum", shard="gradients", clip_grad=0.05),
    Case(2, "muon", FP32, "fp32", cp_size=2, bucket_size=1),
]


@pytest.mark.parametrize("case", CASES)
def test_a_block_moves_as_its_part_of_the_whole(run_ranks, case):
    want, ranks = _plain_loop(case), run_ranks(_train, RANKS, case)
    for kind in ranks[0][0]:
        found, shared = assemble([rank[0][kind] for rank in ranks])
        assert found.keys() == {name for name, states in want.states.items() if kind in states}
        assert not shared  # each element has one owner in the world
        for name, value in found.items():
            assert torch.equal(value.flatten(), want.states[name][kind][: value.numel()]), f"{case}: {kind} of {name}"
    for _, norms, units in ranks:
        assert norms == want.grad_norms
        assert case.shard != "parameters" or all(bool(unit) == name.startswith("blocks") for name, unit in units)


def _call_apart():
    """Call another block on each rank out of turn."""
    engine = _engine(Case(RANKS, shard="parameters", bucket_size=None))
    _backward(engine, Case(RANKS), 0)
    engine.step()
    own = engine.topology.world.rank % 2
    told = rf"^unit blocks.{own} is called out of turn here, but blocks.{1 - own} on another rank"
    with pytest.raises(RuntimeError, match=told):
        engine.module.blocks[own](torch.zeros(1, WIDTH, dtype=torch.bfloat16), 0, 1)


def test_units_with_experts_are_called_by_all_ranks_together(run_ranks):
    """The ranks that own a block, here each alone, cannot know what the others call."""
    run_ranks(_call_apart, RANKS)
