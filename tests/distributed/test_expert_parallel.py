"""Blocks that expert-parallel ranks divide are trained as one process trains the whole parameters, bit for bit, with
each dtype, optimizer, `shard` and `accumulate`. An overflow in one block moves nothing anywhere. Weights and
checkpoints go from any number of such ranks to any other, and a copy that differs is named among its holders.
"""

import math
from dataclasses import asdict, dataclass
from typing import Literal

import pytest
import torch
from torch import nn

from megamix import NAG, AdamW, Muon, Precision, ShardedEngine, Sharding, StaticLossScale
from megamix.checkpoint.load import load, newest_checkpoint
from megamix.checkpoint.manifest import RunRecord
from megamix.checkpoint.save import save
from megamix.checkpoint.snapshot import take_snapshot
from megamix.comm.topology import Topology
from megamix.inspect.replicas import DamagedMemory, check_replicas
from megamix.mixed_precision.settings import Placement, ReduceDtype, Shard
from tests.checkpoint.state import all_or_none_of
from tests.distributed.reference import train_reference
from tests.parallel.layouts import are_equal, assemble, contents, states, with_one_inf

pytestmark = pytest.mark.uncounted

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
    reduce_dtype: ReduceDtype = "half"
    shard: Shard = "states"
    accumulate: Literal["local", "owner"] = "local"
    cp_size: int = 1
    pp_size: int = 1  # of a model that is loaded alone
    bucket_size: int | None = 2000
    clip_grad: float = 0.0
    # What the plain loop asks for.
    steps = 3
    dp_size = RANKS

    def __str__(self):
        changed = {key: value for key, value in asdict(self).items() if value != getattr(Case, key, None)}
        return " ".join(f"{key}={value}" for key, value in changed.items())

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
    topology, model = Topology.connect(pp=case.pp_size, cp=case.cp_size, ep_size=case.ep_size), _Model()
    if case.pp_size > 1:  # a block on each stage, and the head on the last
        model.blocks = nn.ModuleDict({f"{topology.pp.rank}": model.blocks[topology.pp.rank]})
        model.head = model.head if topology.pp.rank == 1 else nn.Identity()
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


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_block_moves_as_its_part_of_the_whole(run_ranks, case):
    want, ranks = _plain_loop(case), run_ranks(_train, RANKS, case)
    kinds, shapes = {"master": want.masters}, {name: tuple(one.shape) for name, one in _Model().named_parameters()}
    for name, held in want.states.items():
        for state, values in zip(OPTIMIZERS[case.optimizer].states(name, shapes[name]), held, strict=True):
            kinds.setdefault(state, {})[name] = values
    for kind, values in kinds.items():
        found, shared = assemble([rank[0][kind] for rank in ranks])
        assert found.keys() == values.keys()
        assert not shared  # each element has one owner in the world
        for name, value in found.items():
            assert torch.equal(value.flatten(), values[name][: value.numel()]), f"{kind} of {name}"
    for _, norms, units in ranks:
        assert norms == want.grad_norms
        assert case.shard != "parameters" or all(bool(unit) == name.startswith("blocks") for name, unit in units)


def _call_apart():
    """Call another block on each rank out of turn, and return what is told."""
    engine = _engine(Case(RANKS, shard="parameters", bucket_size=None))
    _backward(engine, Case(RANKS), 0)
    engine.step()
    try:
        engine.module.blocks[engine.topology.world.rank % 2](torch.zeros(1, WIDTH, dtype=torch.bfloat16), 0, 1)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_units_with_experts_are_called_by_all_ranks_together(run_ranks):
    """The ranks that own a block, here each alone, cannot know what the others call."""
    for rank, told in enumerate(run_ranks(_call_apart, RANKS)):
        here, there = f"blocks.{rank % 2}", f"blocks.{(rank + 1) % 2}"
        assert told.startswith(f"unit {here} is called out of turn here, but {there} on another rank")


def _weights_through_the_engine(case):
    """Return full weights, this rank's masters, and whether another engine that is given the weights has the same."""
    source = _engine(case)
    _backward(source, case, 0)
    source.step()
    weights, target = source.full_weights(), _engine(case)
    target.load_weights({name: weight + 1 for name, weight in weights.items()})
    target.load_weights(weights)
    check_replicas(target)
    mine, loaded = states(source)["master"], states(target)["master"]
    return weights, mine, are_equal([one.values for one in mine], [one.values for one in loaded])


@pytest.mark.parametrize("case", [Case(2), Case(4, shard="parameters")], ids=str)
def test_full_weights_hold_all_blocks_and_load_again(run_ranks, case):
    ranks = run_ranks(_weights_through_the_engine, RANKS, case)
    masters, _ = assemble([owned for _, owned, _ in ranks])
    for weights, _, same in ranks:
        assert same
        assert weights.keys() == masters.keys()
        assert all(torch.equal(weights[name], masters[name]) for name in masters)


def _damage(ep_size, victim, name):
    engine = _engine(Case(ep_size))
    if engine.topology.world.rank == victim:
        dict(engine.module.named_parameters())[name].data.view(-1)[0] += 1
    try:
        check_replicas(engine)
    except DamagedMemory as error:
        return str(error)
    return "clean"


def test_a_copy_that_differs_is_named_by_the_holders_of_its_block(run_ranks):
    name = "blocks.1.experts"
    (told,) = {*run_ranks(_damage, RANKS, 2, 1, name)}
    assert told.endswith(f"rank 1 differs from the masters; rank 1: the half parameter {name}")
    (told,) = {*run_ranks(_damage, RANKS, 4, 2, name)}  # a lone holder
    assert told.endswith(f"rank 2 differs from the masters; rank 2: {name} (half parameter or master)")
    assert {*run_ranks(_damage, RANKS, 2, RANKS, name)} == {"clean"}


def _save(folder, case):
    engine = _engine(case)
    for owned in engine.owned_ranges():  # each element another value, the same on any layout
        number = torch.arange(math.prod(owned.spec.full_shape)).view(owned.spec.full_shape)[owned.spec.block].flatten()
        for factor, values in enumerate(owned.tensors.values(), start=1):
            values.copy_(factor * number[owned.start : owned.start + len(values)])
    engine.publish_masters()
    save(folder, take_snapshot(engine, RunRecord()), all_or_none_of(engine))
    return states(engine)


def _load(folders, case):
    """Return this rank's state after each checkpoint."""
    found = []
    for folder in folders:
        engine = _engine(case)
        checkpoint = newest_checkpoint(folder, all_or_none_of(engine))
        assert checkpoint is not None
        load(checkpoint, engine, all_or_none_of(engine))
        check_replicas(engine)
        found.append(states(engine))
    return found


LAYOUTS = [
    (1, Case(1)), (2, Case(2)), (4, Case(4, shard="parameters")), (4, Case(2)), (4, Case(2, cp_size=2)),
    (4, Case(2, pp_size=2)),
]  # fmt: skip


def test_a_checkpoint_of_any_ep_size_loads_into_every_other(run_ranks, tmp_path):
    folders = [tmp_path / f"{number}" for number in range(len(LAYOUTS))]
    saved = [run_ranks(_save, size, folder, case) for folder, (size, case) in zip(folders, LAYOUTS, strict=True)]
    want = {kind: assemble([rank[kind] for rank in saved[0]])[0] for kind in saved[0][0]}
    for size, case in LAYOUTS:
        ranks = run_ranks(_load, size, folders, case)
        for number in range(len(folders)):
            for kind, values in want.items():
                found, shared = assemble([rank[number][kind] for rank in ranks])
                assert not shared
                assert found.keys() == values.keys()
                assert all(torch.equal(found[name], values[name]) for name in values)
