"""Weights and states are bit for bit those of a plain loop in one process, for any ranks, buckets, overlap, `shard`,
accumulation (full, or ended early at a different count on each rank; by each rank, or by the owners), clipping, dtype,
optimizer, groups, units, tied and frozen weights and recompute, over evaluations and an overflow.
"""

import random
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist

from megamix import NAG, AdamW, ParamGroup, Precision, ShardedEngine, Sharding, StaticLossScale
from megamix.comm.topology import Topology
from tests.builders import loss_of, make_batch, make_model
from tests.conftest import FULL
from tests.distributed.reference import train_reference

GROUPS = (ParamGroup(pattern="blocks.1.*", lr_factor=0.5), ParamGroup(pattern="*.gain", weight_decay=0.3))
NAG_SETTINGS = {"lr": 0.1, "weight_decay": 0.02, "groups": GROUPS}
OPTIMIZERS = {
    "adamw": AdamW(lr=0.01, groups=GROUPS),
    "nag": NAG(**NAG_SETTINGS),
    "velocity": NAG(momentum_form="velocity", **NAG_SETTINGS),
    "velocity-decoupled": NAG(momentum_form="velocity", decoupled_weight_decay=True, **NAG_SETTINGS),
    "sgd": NAG(momentum=0.0, **NAG_SETTINGS),
}


@dataclass(frozen=True)
class Case:
    dtype: torch.dtype
    grad_dtype: torch.dtype
    reduce_dtype: str | None = None
    optimizer: str = "adamw"
    dp_size: int = 1
    bucket_size: int | None = None
    overlap: bool = True
    grad_accum_steps: int = 1
    clip_grad: float = 0.0
    tied: bool = True
    frozen: bool = False
    units: str = "blocks"  # or "none"; "all": embedding and head are units, too
    recompute: bool = False
    flavours: str = "all"  # blocks that a rank's batch runs: "all", or "differ" between ranks
    shard: str = "states"
    accumulate: str = "local"
    ends: str = "full"  # micro-batches of a step: "full", grad_accum_steps; "short", 1 to that, by step and rank
    evaluates: bool = False  # between forward and backward, and between steps
    overflow: bool = False  # the attempt after the first step overflows
    steps: int = 3

    @property
    def loss_scale(self):
        return 2.0**8 if self.dtype == torch.float16 else 1.0

    def micro_batches(self, step, rank):
        return 1 + (step + rank) % self.grad_accum_steps if self.ends == "short" else self.grad_accum_steps

    def loss(self, model, step, rank, micro_batch):
        # Ranks may skip other units than each other, but call none out of order by themselves.
        flavour = (rank + step) % 2 + (self.shard != "parameters") if self.flavours == "differ" else 0
        return loss_of(model, make_batch(step, rank, micro_batch), flavour)

    def make_model(self):
        model = make_model(self.tied, self.recompute)
        model.blocks[1].up.requires_grad_(not self.frozen)
        return model

    def make_optimizer(self):
        return OPTIMIZERS[self.optimizer]

    def run(self):
        return run_engine(self)


AXES = {
    "dtypes": [(torch.float16, torch.float16), (torch.bfloat16, torch.bfloat16, "half"),
               (torch.float16, torch.float16, "half_fp32_sum"), (torch.bfloat16, torch.bfloat16, "half_fp32_sum"),
               (torch.float32, torch.float32), (torch.float16, torch.float32), (torch.bfloat16, torch.float32, "fp32")],
    "optimizer": [*OPTIMIZERS],
    "bucket_size": [1, 1111, 10**9],
    "overlap": [True, False],
    "grad_accum_steps": [1, 3],
    "clip_grad": [0.0, 1000.0, 0.05],
    "tied": [True, False],
    "frozen": [False, True],
    "units": ["blocks", "none", "all"],
    "recompute": [False, True],
    "flavours": ["all", "differ"],
    "shard": ["states", "gradients", "parameters"],
    "accumulate": ["local", "owner"],
    "ends": ["full", "short"],
    "evaluates": [False, True],
    "overflow": [False, True],
}  # fmt: skip


def draw(axes, case_of, seed, count):
    """Return `count` seeded picks from the product of all axes, first those that show a value that none before has."""
    rng, seen, covering, others = random.Random(seed), set(), [], []
    for _ in range(20 * count):
        settings = {axis: rng.choice(values) for axis, values in axes.items()}
        new = {*settings.items()} - seen
        seen |= new
        (covering if new else others).append(case_of(*settings.pop("dtypes"), dp_size=seed, **settings))
    return [_possible(case) for case in [*covering, *others][:count]]


def _possible(case):
    if case.shard == "parameters" and case.units == "none":
        case = replace(case, units="blocks")
    if case.accumulate == "owner":  # then all ranks sum the same units after each micro-batch
        return replace(case, flavours="all", ends="full")
    return replace(case, ends="full") if case.shard == "parameters" else case


def run_engine(case, compile_update=False, group=None):
    model = case.make_model()
    units = {"none": [], "blocks": [*model.blocks], "all": [model.embedding, *model.blocks, model.head]}[case.units]
    topology = Topology.current(group)
    engine = ShardedEngine(
        model,
        case.make_optimizer(),
        Precision(case.dtype, case.grad_dtype, StaticLossScale(case.loss_scale), case.reduce_dtype),
        Sharding(units, topology, case.bucket_size, case.overlap, shard=case.shard, accumulate=case.accumulate),
        clip_grad=case.clip_grad,
        grad_accum_steps=case.grad_accum_steps,
        compile_update=compile_update,
    )
    rank, losses, grad_norms = topology.dp.rank, [], []

    @torch.no_grad()
    def evaluate():
        if case.evaluates:
            loss_of(engine, make_batch(99, 0, 0))

    for step, planted in [(0, False), (0, True), *((step, False) for step in range(1, case.steps))]:
        if planted and not case.overflow:
            continue
        step_losses = []
        micro_batches = case.micro_batches(step, rank)
        for micro_batch in range(micro_batches):
            loss = case.loss(engine, step, rank, micro_batch)
            evaluate()
            step_losses.append(loss.item())
            last = micro_batch == micro_batches - 1
            engine.backward(loss * torch.inf if planted and last and rank == 0 else loss, last=last)
        result = engine.step()
        evaluate()
        assert bool(result.found_inf) == planted
        if not planted:
            grad_norms.append(float(result.grad_norm))
            losses.append(step_losses)
    engine.wait()
    return engine, losses, grad_norms


def plain_loop(case):
    with torch.device("cpu"):
        return train_reference(case.make_model(), case.loss, case.make_optimizer(), case)


def differences(case, engine, losses, grad_norms, reference=None):
    """Return the masters, states, half parameters, losses and norms of this rank that are not bitwise the reference's.
    The reference is the plain loop, run here unless given.
    """
    reference = reference or plain_loop(case)
    rank, wrong = engine.topology.dp.rank, []
    held = [(one, one.spec.block[0].start) for one in engine.held_states()]
    for owned, start in [*((one, one.start) for one in engine.owned_ranges()), *held]:
        name = owned.spec.name
        for state, values in owned.tensors.items():
            if not torch.equal(values.cpu(), reference.states[name][state][start : start + len(values)]):
                wrong.append(f"{state} of {name}")
    with engine.whole_parameters():
        for name, param in engine.module.named_parameters():
            if param.requires_grad:
                want = reference.states[name]["master"][: param.numel()].view(param.shape)
                wrong += [] if torch.equal(param.cpu(), want.to(case.dtype)) else [f"half parameter {name}"]
    want_losses = []
    for step, all_ranks in enumerate(reference.losses):
        start = sum(case.micro_batches(step, other) for other in range(rank))
        want_losses.append(all_ranks[start : start + case.micro_batches(step, rank)])
    if losses != want_losses:
        wrong.append(f"losses {losses} instead of {want_losses}")
    if grad_norms != reference.grad_norms:
        wrong.append(f"gradient norms {grad_norms} instead of {reference.grad_norms}")
    return [f"{case}: {what}" for what in wrong]


def check_cases(cases):
    """Train some of the references on each rank and share them: they are the same on all ranks."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if cases[0].dp_size > 1 else (0, 1)
    references = {number: plain_loop(case) for number, case in enumerate(cases) if number % size == rank}
    if size > 1:
        told = [{}] * size
        dist.all_gather_object(told, references)
        references = {number: reference for some in told for number, reference in some.items()}
    return [line for number, case in enumerate(cases) for line in differences(case, *case.run(), references[number])]


COUNTS = {1: 250, 2: 500, 3: 130, 4: 190, 8: 90} if FULL else {1: 21, 2: 22, 3: 6, 4: 12, 8: 3}


@pytest.mark.parametrize("dp_size", COUNTS)
def test_any_ranks_equal_the_plain_loop(run_ranks, dp_size):
    cases = draw(AXES, Case, dp_size, COUNTS[dp_size])
    wrong = run_ranks(check_cases, dp_size, cases, deadline_s=900.0 if FULL else 60.0)
    assert not any(wrong), "\n".join(sum(wrong, [])[:5])


def _two_groups_of_two():
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    case = Case(torch.float16, torch.float16, dp_size=2, bucket_size=1111, clip_grad=0.05)
    return differences(case, *run_engine(case, group=groups[dist.get_rank() // 2]))


def test_a_group_of_some_ranks_trains_like_a_world_of_its_own(run_ranks):
    assert run_ranks(_two_groups_of_two, 4) == [[], [], [], []]
