"""Muon's relatives are their published equations: nanochat's optimizer moves weights alike. A derived optimizer may
declare states of a matrix, of any length, and a skipped step keeps them.
"""

import math

import pytest
import torch
from torch import nn

from megamix import Muon, ParamGroup
from megamix.mixed_precision.optim.muon import DIRECTION_SQ
from tests.builders import make_engine

# Polar Express for five turns, as nanochat has it. It divides a matrix by 1.01 times its norm, and 1e-6 more. As in the
# paper, the engine's first polynomial takes this factor.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
FIRST = tuple(one / 1.01**power for one, power in zip(POLAR_EXPRESS[0], (1, 3, 5), strict=True))
SHAPES = {"table": (48, 32), "scales": (4,), "square": (32, 32), "tall": (128, 32), "wide": (32, 128), "gate": (2, 12)}
# Of AdamW's parameters: rate, weight decay and betas.
ADAMW = {"table": (0.2, 0.001, (0.8, 0.995)), "scales": (0.5, 0.0, (0.96, 0.95))}
EPS, LR, BETA2 = 1e-10, 0.02, 0.9
# Of matrices, by update: nanochat's momentum rises, and its weight decay falls.
MOMENTUM, DECAY = (0.85, 0.87, 0.89, 0.92, 0.95), (0.2, 0.16, 0.12, 0.08, 0.04)


def _draws(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _adamw(param, grad, state, update, rate, decay, betas):
    state["second"] = state.get("second", torch.zeros_like(grad)).lerp(grad.square(), 1 - betas[1])
    state["first"] = state.get("first", torch.zeros_like(grad)).lerp(grad, 1 - betas[0])
    corrected = (state["second"] / (1 - betas[1] ** update)).sqrt() + EPS
    return param * (1 - rate * decay) - rate / (1 - betas[0] ** update) * state["first"] / corrected


def _muon(param, grad, state, update):
    rows, columns = param.shape
    momentum, decay = MOMENTUM[update - 1], DECAY[update - 1]
    state["first"] = state.get("first", torch.zeros_like(grad)).lerp(grad, 1 - momentum)
    x = torch.lerp(grad, state["first"], momentum)
    # MuonEq: each row gets the mean norm.
    x = x * (x.norm() / rows**0.5 / x.norm(dim=1, keepdim=True).clamp(min=1e-6))
    # Polar Express.
    x = x / (x.norm() * 1.01 + 1e-6)
    for a, b, c in POLAR_EXPRESS:
        gram = x.mT @ x if rows > columns else x @ x.mT
        turned = b * gram + c * (gram @ gram)
        x = a * x + (x @ turned if rows > columns else turned @ x)
    # Muon+: the norm of an orthogonal matrix.
    x = x * (min(rows, columns) ** 0.5 / x.norm().clamp(min=1e-6))
    # NorMuon: second moments along the longer side.
    dim = 1 if rows >= columns else 0
    mean_sq = x.square().mean(dim)
    state["rows"] = state.get("rows", torch.zeros_like(mean_sq)).lerp(mean_sq, 1 - BETA2)
    factor = state["rows"].clamp(min=1e-10).rsqrt()
    kept = (mean_sq.sum() * x.shape[dim]).sqrt() / (mean_sq * x.shape[dim] * factor.square()).sum().sqrt()
    x = x * (factor * kept).unsqueeze(dim)
    # Cautious weight decay; the decay, too, has the factor of tall matrices.
    lr = LR * max(1.0, rows / columns) ** 0.5
    return param - lr * x - lr * decay * param * (x * param >= 0)


def test_nanochat_s_optimizer_moves_weights_alike():
    groups = [
        ParamGroup(pattern=name, lr_factor=rate / LR, weight_decay=decay, betas=betas)
        for name, (rate, decay, betas) in ADAMW.items()
    ]
    groups.append(ParamGroup(pattern="tall", weight_decay=[2 * decay for decay in DECAY]))  # 4 times as many rows
    optimizer = Muon(
        lr=LR, weight_decay=DECAY, groups=groups, eps=EPS, momentum=MOMENTUM, adjust_lr="original",
        ns_table=(FIRST, *POLAR_EXPRESS[1:]), ns_eps=1e-6 / 1.01, equal_rows=True, exact_norm=True, row_beta2=BETA2,
        cautious_weight_decay=True, adamw=[*ADAMW], ns_dtype=torch.float32,
    )  # fmt: skip
    want = {name: _draws(shape, number) for number, (name, shape) in enumerate(SHAPES.items())}
    model = nn.ParameterDict({name: weight.clone() for name, weight in want.items()})
    engine, states = make_engine(model, optimizer), {name: {} for name in want}
    for update in range(1, 1 + len(DECAY)):
        grads = {name: _draws(shape, 100 * update + number) for number, (name, shape) in enumerate(SHAPES.items())}
        engine.backward(sum((param * grads[name]).sum() for name, param in model.items()))
        engine.step()
        for name, grad in grads.items():
            move = _adamw if name in ADAMW else _muon
            want[name] = move(want[name], grad, states[name], update, *ADAMW.get(name, ()))
        for name, weight in engine.full_weights().items():
            # Each of five updates rounds weights twice, and steps, which are smaller, some dozen times.
            assert (weight - want[name]).abs().max() < 4e-6 * weight.abs().max(), name


def _linear(optimizer, losses):
    """Return an engine after a step of one matrix for each factor of a loss."""
    torch.manual_seed(0)
    model = nn.Linear(12, 20, bias=False)
    engine = make_engine(model, optimizer)
    for step, factor in enumerate(losses):
        engine.backward((model.weight * _draws((20, 12), step)).sum() * factor)
        engine.step()
    return engine


class _Counting(Muon):
    """Keeps the norm of the last matrix, and counts the directions of each row."""

    def matrix_states(self, rows, columns):
        return {"last_norm": 1, "counts": rows}

    def direction(self, matrix, states):
        norm = matrix.float().norm(dim=(-2, -1))[..., None]
        return super().direction(matrix, states)[0], {"last_norm": norm, "counts": states["counts"] + 1}


def test_a_state_of_a_matrix_can_have_any_length_and_a_skipped_step_keeps_it():
    engine = _linear(_Counting(lr=0.1), [1.0, math.inf, 2.0])
    states = {name: state for held in engine.held_states() for name, state in held.tensors.items()}
    assert states["counts"].tolist() == [2.0] * 20
    assert states["last_norm"].shape == (1,)
    kept = engine.state_dict()
    again = _linear(_Counting(lr=0.1), [])
    again.load_state_dict(kept)
    assert [held.tensors["counts"][0] for held in again.held_states() if "counts" in held.tensors] == [2.0]
    with pytest.raises(ValueError, match="build the engine as it was then"):
        _linear(Muon(lr=0.1), []).load_state_dict(kept)


def test_a_skipped_step_keeps_the_moments_bit_for_bit():
    moments = [_linear(Muon(lr=0.1, row_beta2=0.9), losses).held_states() for losses in ([1.0], [1.0, math.nan])]
    ((before,), (after,)) = moments
    assert after.tensors[DIRECTION_SQ].any()
    assert torch.equal(before.tensors[DIRECTION_SQ], after.tensors[DIRECTION_SQ])


@pytest.mark.parametrize(
    ("states", "said"),
    [
        ({"master": 1}, "Stating.states of weight has 'master'"),
        ({"momentum_buffer": 1}, "Stating.states of weight has 'momentum_buffer'"),
        ({"count": 1}, r"Stating returned the states \[\], but matrix_states names \['count'\]; return each of them"),
        ({"count": 0}, "Stating.matrix_states: count has no length of at least 1"),
    ],
)
def test_a_state_of_another_s_name_an_empty_one_and_one_that_is_not_returned_are_refused(states, said):
    class Stating(Muon):
        def matrix_states(self, rows, columns):
            return states

    with pytest.raises(ValueError, match=said):
        _linear(Stating(lr=0.1), [1.0])


RULES = {
    "match_rms_adamw": lambda rows, columns: 0.2 * max(rows, columns) ** 0.5,
    "original": lambda rows, columns: max(1.0, rows / columns) ** 0.5,
    "spectral_norm": lambda rows, columns: (rows / columns) ** 0.5,
}


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_of_scale_is_its_formula(rule):
    own = Muon(lr=0.1, adjust_lr=rule)
    for rows, columns in ((8, 8), (32, 8), (8, 32)):
        assert own.lr_scale(rows, columns) == pytest.approx(RULES[rule](rows, columns))


def test_zeros_have_a_direction_of_zeros():
    own = Muon(lr=0.1, equal_rows=True, exact_norm=True, row_beta2=0.9)
    direction, states = own.direction(torch.zeros(4, 6, dtype=torch.bfloat16), {DIRECTION_SQ: torch.zeros(6)})
    assert not direction.any()
    assert not states[DIRECTION_SQ].any()


def test_coefficients_go_turn_by_turn_and_the_last_stays():
    first, second = (1.0, 2.0, 3.0), (4.0, 5.0, 6.0)
    assert Muon(lr=0.1, ns_steps=2, ns_coefficients=first).turns == [first, first]
    assert Muon(lr=0.1, ns_steps=3, ns_table=[first, second]).turns == [first, second, second]
