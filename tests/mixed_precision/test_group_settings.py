"""Betas and eps of AdamW by group, and momentum by group, classical or Nesterov's, are those of torch's fused
optimizers bit for bit, on 1, 2 and 4 ranks, with skipped steps and across a resume. An own optimizer's settings follow
the updates, too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from megamix import NAG, AdamW, Optimizer, ParamGroup, Sharding
from megamix.base import constants
from megamix.comm.topology import Topology
from megamix.mixed_precision import fused_update
from tests.builders import FP32, make_engine

LR, DECAY, STEPS = 0.01, 0.1, 7
SKIPPED = {0: math.inf, 4: math.nan}  # step -> one element of its gradient; the first comes before any update
GROUPS = (
    ParamGroup(pattern="table", betas=(0.8, 0.96), eps=1e-10, weight_decay=0.0),
    ParamGroup(pattern="scale", betas=(0.96, 0.95), eps=1e-6, lr_factor=0.5),
)
MOMENTA = (ParamGroup(pattern="table", momentum=0.5, weight_decay=0.0), ParamGroup(pattern="scale", momentum=0.0))
OPTIMIZERS = {
    "adamw": AdamW(lr=LR, weight_decay=DECAY, betas=(0.9, 0.99), groups=GROUPS),
    "classical": NAG(lr=LR, weight_decay=DECAY, nesterov=False, groups=MOMENTA),
    "nesterov": NAG(lr=LR, weight_decay=DECAY, groups=MOMENTA),
}
# Three numbers for five updates: the last two updates use the last one.
BETA1, BETA2, DECAYS, MOMENTUM = [0.5, 0.8, 0.9], [0.9, 0.95, 0.99], [0.2, 0.1, 0.0], [0.85, 0.9, 0.95]
SCHEDULED = {
    "adamw": AdamW(
        lr=LR, weight_decay=DECAYS, betas=(BETA1, BETA2),
        groups=(ParamGroup(pattern="table", betas=(0.8, BETA2), eps=1e-10, weight_decay=DECAY),),
    ),
    "nag": NAG(lr=LR, weight_decay=DECAYS, momentum=MOMENTUM),
}  # fmt: skip


class Fed(nn.Module):
    """Three parameters, each with a gradient that is given."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight, self.table = (nn.Parameter(torch.randn(16, 64, generator=generator)) for _ in range(2))
        self.scale = nn.Parameter(torch.randn(128, generator=generator))

    def forward(self, grads):
        return sum((param * grads[name]).sum() for name, param in self.named_parameters())


def _grads(step):
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(param.shape, generator=generator) for name, param in Fed().named_parameters()}


def _torchs(kind):
    """Return the weights after torch's own steps, of which it is told only those that do not overflow."""
    model = Fed()
    weight, *others = ({"params": [param]} for param in (model.weight, model.table, model.scale))
    table, scale = (group | {"weight_decay": 0.0} for group in others)
    lr = torch.tensor(LR)  # FP32, as the engine has it
    if kind == "adamw":
        weight |= {"betas": (0.9, 0.99)}
        table |= {"betas": (0.8, 0.96), "eps": 1e-10}
        scale |= {"betas": (0.96, 0.95), "eps": 1e-6, "lr": lr / 2}
        optimizer = torch.optim.AdamW([weight, table, scale], lr=lr, weight_decay=DECAY, fused=True)
    else:
        nesterov = {"nesterov": kind == "nesterov"}
        groups = [weight | {"momentum": 0.9} | nesterov, table | {"momentum": 0.5} | nesterov, scale]
        optimizer = torch.optim.SGD(groups, lr=lr, weight_decay=DECAY, fused=True)
    for step in range(STEPS):
        if step not in SKIPPED:
            for name, param in model.named_parameters():
                param.grad = _grads(step)[name]
            optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


def _trained(optimizer, topology, compiled=False):
    """Return the weights after the engine's steps. Halfway another engine goes on."""

    def engine():
        sharding = Sharding(topology=topology, bucket_size=1024)
        return make_engine(Fed(), optimizer, FP32, sharding, compile_update=compiled)

    trained = engine()
    for step in range(STEPS):
        grads = _grads(step)
        if step in SKIPPED:
            grads["table"][3, 5] = SKIPPED[step]
        trained.backward(trained(grads))
        assert bool(trained.step().found_inf) == (step in SKIPPED)
        if step == STEPS // 2:
            begun, trained = trained, engine()
            trained.load_state_dict(begun.state_dict())
    return trained.full_weights()


def _assert_equal(ours, theirs):
    assert not [name for name in theirs if not torch.equal(ours[name], theirs[name])]


def _on_ranks():
    for replicas in (1, 2):
        topology = Topology.connect(replicas=replicas)
        for kind, optimizer in OPTIMIZERS.items():
            _assert_equal(_trained(optimizer, topology), _torchs(kind))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_alone_groups_and_momentum_are_torchs_bit_for_bit(kind):
    _assert_equal(_trained(OPTIMIZERS[kind], None), _torchs(kind))


def test_on_2_and_4_ranks_they_are_torchs_bit_for_bit(run_ranks):
    run_ranks(_on_ranks, 4)


def _by_schedule(kind):
    """Return the weights after the equations, one operation after the other, with each update's own numbers."""
    weights = {name: param.detach() for name, param in Fed().named_parameters()}
    held = {name: [torch.zeros_like(weight), torch.zeros_like(weight)] for name, weight in weights.items()}
    applied = [step for step in range(STEPS) if step not in SKIPPED]
    for update, step in enumerate(applied):
        at = min(update, 2)
        for name, grad in _grads(step).items():
            weight, states, lr = weights[name], held[name], torch.tensor(LR)
            is_table = name == "table" and kind == "adamw"
            decay = torch.tensor(DECAY if is_table else DECAYS[at] if weight.dim() > 1 else 0.0)
            if kind == "nag":
                momentum, grad = torch.tensor(MOMENTUM[at]), grad + decay * weight
                states[0] = momentum * states[0] + grad
                weights[name] = weight - lr * (grad + momentum * states[0])
                continue
            tables = [[0.8] * 3 if is_table else BETA1, BETA2]
            products = [math.prod(table) * table[2] ** (update - 2) if update > 2 else math.prod(table[: update + 1])
                        for table in tables]  # fmt: skip
            states[0] = torch.lerp(states[0], grad, torch.tensor(1 - tables[0][at]))
            states[1] = torch.lerp(states[1], grad.square(), torch.tensor(1 - tables[1][at]))
            debias = [torch.tensor(1 / (1 - products[0])), torch.tensor(1 / math.sqrt(1 - products[1]))]
            denominator = states[1].sqrt() * debias[1] + torch.tensor(1e-10 if is_table else 1e-8)
            weight = weight - lr * decay * weight
            weights[name] = weight - lr * debias[0] * (states[0] / denominator)
    return weights


@pytest.mark.parametrize("kind", SCHEDULED)
def test_schedules_count_applied_updates_and_go_on_after_a_resume_bit_for_bit(kind):
    _assert_equal(_trained(SCHEDULED[kind], None), _by_schedule(kind))


def test_one_graph_serves_all_groups_and_their_schedules(monkeypatch):
    # Traced as for a compiler, whose own work would cost seconds and prove no more.
    traced = {"dynamic": True, "fullgraph": True, "backend": "eager"}
    monkeypatch.setattr(fused_update, "_compile", lambda function: torch.compile(function, **traced))
    monkeypatch.setattr(constants, "TRIAL", 256)
    torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    _assert_equal(_trained(SCHEDULED["adamw"], None, compiled=True), _by_schedule("adamw"))
    assert counters["stats"]["unique_graphs"] - before == 3  # the update of each of two engines, and the statistics


@dataclass(frozen=True, kw_only=True)
class Scaled(Optimizer):
    """Plain descent with a factor of the step that no optimizer of ours has."""

    kappa: float | Sequence[float] = 1.0
    group_settings: ClassVar[tuple[str, ...]] = ("kappa",)

    def states(self, name, shape):
        return {}

    def coefficients(self, update, values):
        return (values.kappa.float(),)

    def equation(self, grad, master, states, at):
        return master - at.lr * at.coefficients[0] * grad, {}


@pytest.mark.parametrize("kappa", [0.5, [0.5, 0.25, 2.0]])
def test_a_setting_of_an_own_optimizer_follows_the_updates(kappa):
    weights = {name: param.detach() for name, param in Fed().named_parameters()}
    for update, step in enumerate(step for step in range(STEPS) if step not in SKIPPED):
        at = kappa[min(update, 2)] if isinstance(kappa, list) else kappa
        for name, grad in _grads(step).items():
            weights[name] = weights[name] - torch.tensor(LR) * torch.tensor(at) * grad
    _assert_equal(_trained(Scaled(lr=LR, kappa=kappa), None), weights)
