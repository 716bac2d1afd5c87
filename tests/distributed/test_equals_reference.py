"""Weights and states are bit for bit those of a plain loop in one process, for any ranks, bucket size, overlap,
accumulation (full, or ended early at a different count on each rank), clipping, dtype, optimizer, groups, tied weights
and recompute.
"""

import itertools
import random
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from megamix import NAG, AdamW, ParamGroup, Precision, ShardedEngine, Sharding, StaticLossScale
from megamix.comm.topology import Topology
from tests.builders import loss_of, make_batch, make_model
from tests.conftest import FULL
from tests.distributed.reference import train_reference

pytestmark = pytest.mark.uncounted

GROUPS = (ParamGroup(pattern="blocks.1.*", lr_factor=0.5), ParamGroup(pattern="*.gain", weight_decay=0.3))
OPTIMIZERS = {
    "adamw": AdamW(lr=0.01, groups=GROUPS),
    "nag": NAG(lr=0.1, weight_decay=0.02, groups=GROUPS),
    "velocity": NAG(lr=0.1, weight_decay=0.02, groups=GROUPS, momentum_form="velocity"),
    "velocity-decoupled": NAG(
        lr=0.1, weight_decay=0.02, groups=GROUPS, momentum_form="velocity", decoupled_weight_decay=True
    ),
    "sgd": NAG(lr=0.1, momentum=0.0, weight_decay=0.02, groups=GROUPS),
}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
CLIP = {"off": 0.0, "idle": 1000.0, "binding": 0.05}


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
    units: bool = True
    recompute: bool = False
    flavours: str = "all"  # blocks that a rank's batch runs: "all", or "differ" between ranks
    shard: str = "states"
    accumulate: str = "local"
    ends: str = "full"  # micro-batches of a step: "full", grad_accum_steps; "short", 1 to that, by step and rank
    steps: int = 4

    @property
    def loss_scale(self):
        return 2.0**8 if self.dtype == torch.float16 else 1.0

    def micro_batches(self, step, rank):
        return 1 + (step + rank) % self.grad_accum_steps if self.ends == "short" else self.grad_accum_steps

    def loss(self, model, step, rank, micro_batch):
        flavour = (1 + (rank + step) % 2) if self.flavours == "differ" else 0
        return loss_of(model, make_batch(step, rank, micro_batch), flavour)


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
    "units": [True, False],
    "recompute": [False, True],
    "flavours": ["all", "differ"],
    "ends": ["full", "short"],
}  # fmt: skip


def _cases(dp_size, count):
    """Return `count` seeded picks from the product of all axes, after a block with every value of every axis."""
    product = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]
    rng = random.Random(dp_size)
    rng.shuffle(product)
    covering, seen = [], set()
    for settings in product:
        if new := set(settings.items()) - seen:
            seen |= new
            covering.append(settings)
    picks = covering + product[: max(0, count - len(covering))]
    cases = []
    for settings in picks:
        others = {name: value for name, value in settings.items() if name != "dtypes"}
        cases.append(Case(*settings["dtypes"], dp_size=dp_size, **others))
    return cases


def run_engine(case, compile_update=False, group=None):
    model = make_model(case.tied, case.recompute)
    scale = StaticLossScale(case.loss_scale)
    sharding = Sharding(
        [*model.blocks] if case.units else [], Topology.current(group), case.bucket_size, case.overlap,
        shard=case.shard, accumulate=case.accumulate,
    )  # fmt: skip
    engine = ShardedEngine(
        model,
        OPTIMIZERS[case.optimizer],
        Precision(case.dtype, case.grad_dtype, scale, case.reduce_dtype),
        sharding,
        clip_grad=case.clip_grad,
        grad_accum_steps=case.grad_accum_steps,
        compile_update=compile_update,
    )
    rank = engine.topology.dp.rank
    losses, grad_norms = [], []
    for step in range(case.steps):
        step_losses = []
        micro_batches = case.micro_batches(step, rank)
        for micro_batch in range(micro_batches):
            loss = case.loss(model, step, rank, micro_batch)
            step_losses.append(loss.item())
            engine.backward(loss, last=micro_batch == micro_batches - 1)
        grad_norms.append(float(engine.step().grad_norm))
        losses.append(step_losses)
    engine.wait()
    return engine, losses, grad_norms


def plain_loop(case):
    with torch.device("cpu"):
        return train_reference(make_model(case.tied), case.loss, OPTIMIZERS[case.optimizer], case)


def differences(case, engine, losses, grad_norms, reference=None):
    """Return the shards, half parameters, losses and norms of this rank that are not bitwise the reference's. The
    reference is the plain loop, run here unless given.
    """
    reference = reference or plain_loop(case)
    rank, dp_size = engine.topology.dp.rank, case.dp_size
    wrong = []
    with engine.whole_parameters():
        halves = [bucket.params.cpu().clone() for bucket in engine.buckets]
    for index, (bucket, half) in enumerate(zip(engine.buckets, halves, strict=True)):
        kinds = {"master": {name: [master] for name, master in reference.masters.items()}, "state": reference.states}
        own = {
            "master": [bucket.master],
            "state": [torch.cat([states[name] for states in bucket.states]) for name in bucket.states[0]],
        }
        for kind, values in kinds.items():
            for number, mine in enumerate(own[kind]):
                mine, full = mine.cpu(), torch.zeros(bucket.plan.padded_numel, device="cpu")
                for slot in bucket.plan.slots:
                    want = values[slot.spec.name][number]
                    full[slot.start : slot.start + want.numel()] = want
                if not torch.equal(mine, full.view(dp_size, -1)[rank]):
                    gap = (mine - full.view(dp_size, -1)[rank]).abs().max()
                    wrong.append(f"{kind} {number} of bucket {index}: off by up to {gap:.3g}")
                if kind == "master" and not torch.equal(half, full.to(case.dtype)):
                    wrong.append(f"half parameters of bucket {index}")
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
    wrong = []
    for number, case in enumerate(cases):
        wrong += differences(case, *run_engine(case), references[number])
    return wrong


@pytest.mark.parametrize("dp_size", [2, 3, 4, 8])
def test_many_ranks_equal_the_plain_loop(run_ranks, dp_size):
    count = ({2: 400, 3: 100, 4: 100, 8: 60} if FULL else {2: 12, 3: 4, 4: 4, 8: 2})[dp_size]
    wrong = run_ranks(check_cases, dp_size, _cases(dp_size, count)[:count], deadline_s=900.0)
    assert not any(wrong), "\n".join(sum(wrong, [])[:5])


def test_one_process_equals_the_plain_loop():
    wrong = check_cases(_cases(1, 200 if FULL else 12))
    assert not wrong, "\n".join(wrong[:5])


def _two_groups_of_two():
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    case = Case(torch.float16, torch.float16, dp_size=2, bucket_size=1111, clip_grad=0.05)
    return differences(case, *run_engine(case, group=groups[dist.get_rank() // 2]))


def test_a_group_of_some_ranks_trains_like_a_world_of_its_own(run_ranks):
    assert run_ranks(_two_groups_of_two, 4) == [[], [], [], []]
