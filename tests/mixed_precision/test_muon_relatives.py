"""Muon's relatives are their published equations: nanochat's optimizer moves its own model alike. A derived optimizer
may declare states of a matrix, of any length, and a skipped step keeps them.
"""

import dataclasses
import fnmatch
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megamix import Muon, ParamGroup, ShardedEngine
from megamix.mixed_precision.muon import DIRECTION_SQ
from tests.builders import FP32

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
WIDTH, KV, VOCAB, LENGTH, LAYERS = 32, 16, 48, 12, 4
STEPS = 5


class _Block(nn.Module):
    """nanochat's block. Every other layer has value embeddings, with a gate for each head."""

    def __init__(self, gated):
        super().__init__()
        self.attn, self.mlp = nn.Module(), nn.Module()
        self.attn.c_q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.attn.c_k, self.attn.c_v = (nn.Linear(WIDTH, KV, bias=False) for _ in range(2))
        self.attn.c_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.attn.ve_gate = nn.Linear(12, 2, bias=False) if gated else None
        self.mlp.c_fc = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.mlp.c_proj = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x, values):
        normed, heads = _normed(x), (*x.shape[:2], -1, WIDTH // 4)
        q, k, v = (linear(normed).view(heads) for linear in (self.attn.c_q, self.attn.c_k, self.attn.c_v))
        if values is not None:
            v = v + 3 * torch.sigmoid(self.attn.ve_gate(normed[..., :12]))[..., None] * values.view(heads)
        q, k, v = (one.transpose(1, 2) for one in (_normed(q), _normed(k), v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.attn.c_proj(y.transpose(1, 2).reshape(x.shape))
        return x + self.mlp.c_proj(F.relu(self.mlp.c_fc(_normed(x))).square())


class _Nanochat(nn.Module):
    """A small model with nanochat's names and shapes."""

    def __init__(self):
        super().__init__()
        drawn = torch.Generator().manual_seed(7)
        blocks = nn.ModuleList(_Block(gated=layer % 2 == 1) for layer in range(LAYERS))
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(VOCAB, WIDTH), "h": blocks})
        self.value_embeds = nn.ModuleDict({str(layer): nn.Embedding(VOCAB, KV) for layer in range(1, LAYERS, 2)})
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.resid_lambdas, self.x0_lambdas = nn.Parameter(torch.ones(LAYERS)), nn.Parameter(torch.full((LAYERS,), 0.1))
        self.smear_gate = nn.Linear(24, 1, bias=False)
        self.smear_lambda, self.backout_lambda = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.full((1,), 0.2))
        for param in self.parameters():
            if param.dim() > 1:
                param.data.normal_(0.0, WIDTH**-0.5, generator=drawn)

    def forward(self, tokens):
        x = _normed(self.transformer["wte"](tokens))
        gate = self.smear_lambda * torch.sigmoid(self.smear_gate(x[:, 1:, :24]))
        x = x0 = middle = torch.cat([x[:, :1], x[:, 1:] + gate * x[:, :-1]], dim=1)
        for layer, block in enumerate(self.transformer["h"]):
            values = self.value_embeds[str(layer)](tokens) if str(layer) in self.value_embeds else None
            x = block(self.resid_lambdas[layer] * x + self.x0_lambdas[layer] * x0, values)
            middle = x if layer == LAYERS // 2 else middle
        logits = self.lm_head(_normed(x - self.backout_lambda * middle)).float()
        return 15 * torch.tanh(logits / 15)


def _normed(x):
    return F.rms_norm(x, (x.size(-1),))


def _loss(model, step):
    tokens = torch.randint(VOCAB, (4, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


@dataclasses.dataclass(frozen=True)
class _Group:
    """Settings of one of nanochat's groups of AdamW."""

    lr: float
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.8, 0.95)


ADAMW = {  # by pattern of the name
    "lm_head.*": _Group(0.004, 0.01, (0.8, 0.96)), "transformer.wte.*": _Group(0.2, 0.001, (0.8, 0.995)),
    "value_embeds.*": _Group(0.1, 0.01, (0.8, 0.995)), "resid_lambdas": _Group(0.005, 0.05),
    "x0_lambdas": _Group(0.5, 0.0, (0.96, 0.95)), "smear_*": _Group(0.2), "backout_lambda": _Group(0.2),
}  # fmt: skip
EPS, LR, BETA2 = 1e-10, 0.02, 0.9
# Of matrices, by update: nanochat's momentum rises, and its weight decay falls.
MOMENTUM, DECAY = (0.85, 0.87, 0.89, 0.92, 0.95), (0.2, 0.16, 0.12, 0.08, 0.04)


class _NanochatOptimizer:
    """nanochat's equations, one parameter after the other."""

    def __init__(self, model, dtype):
        self.params, self.dtype = dict(model.named_parameters()), dtype
        self.first = {name: torch.zeros_like(param) for name, param in self.params.items()}
        self.second = {name: torch.zeros_like(param) for name, param in self.params.items()}
        self.rows = {name: torch.zeros(max(param.shape)) for name, param in self.params.items()}
        self.updates = 0

    @torch.no_grad()
    def step(self):
        self.updates += 1
        for name, param in self.params.items():
            group = next((one for pattern, one in ADAMW.items() if fnmatch.fnmatchcase(name, pattern)), None)
            if group is None:
                self._muon(name, param, param.grad)
            else:
                self._adamw(name, param, param.grad, group)

    def _adamw(self, name, param, grad, group):
        beta1, beta2 = group.betas
        param.mul_(1 - group.lr * group.weight_decay)
        self.first[name].lerp_(grad, 1 - beta1)
        self.second[name].lerp_(grad.square(), 1 - beta2)
        corrected = (self.second[name] / (1 - beta2**self.updates)).sqrt() + EPS
        param.sub_(group.lr / (1 - beta1**self.updates) * self.first[name] / corrected)

    def _muon(self, name, param, grad):
        rows, columns = param.shape
        momentum, decay = (table[self.updates - 1] for table in (MOMENTUM, DECAY))
        self.first[name].lerp_(grad, 1 - momentum)
        x = torch.lerp(grad, self.first[name], momentum).to(self.dtype)
        # MuonEq: each row gets the mean norm.
        target = x.float().norm() / rows**0.5
        x = x * (target / x.float().norm(dim=1, keepdim=True).clamp(min=1e-6)).to(self.dtype)
        # Polar Express.
        x = x / (x.norm() * 1.01 + 1e-6)
        for a, b, c in POLAR_EXPRESS:
            gram = x.mT @ x if rows > columns else x @ x.mT
            turned = b * gram + c * (gram @ gram)
            x = a * x + (x @ turned if rows > columns else turned @ x)
        # Muon+: the norm of an orthogonal matrix.
        x = x.float()
        x = x * (min(rows, columns) ** 0.5 / x.norm().clamp(min=1e-6))
        # NorMuon: second moments along the longer side.
        dim = 1 if rows >= columns else 0
        mean_sq = x.square().mean(dim)
        self.rows[name].lerp_(mean_sq, 1 - BETA2)
        factor = self.rows[name].clamp(min=1e-10).rsqrt()
        kept = (mean_sq.sum() * x.shape[dim]).sqrt() / (mean_sq * x.shape[dim] * factor.square()).sum().sqrt()
        x = x * (factor * kept).unsqueeze(dim)
        # Cautious weight decay; the decay, too, has the factor of tall matrices.
        lr = LR * max(1.0, rows / columns) ** 0.5
        param.sub_(lr * x + lr * decay * param * (x * param >= 0))


def _ours(ns_dtype):
    groups = [
        ParamGroup(pattern=pattern, lr_factor=one.lr / LR, weight_decay=one.weight_decay, betas=one.betas)
        for pattern, one in ADAMW.items()
    ]
    tall = ParamGroup(pattern="*.c_fc.weight", weight_decay=[2 * decay for decay in DECAY])  # 4 times as many rows
    return Muon(
        lr=LR, weight_decay=DECAY, groups=(*groups, tall), eps=EPS, momentum=MOMENTUM, adjust_lr="original",
        ns_table=(FIRST, *POLAR_EXPRESS[1:]), ns_eps=1e-6 / 1.01, equal_rows=True, exact_norm=True, row_beta2=BETA2,
        cautious_weight_decay=True, adamw=[*ADAMW], ns_dtype=ns_dtype,
    )  # fmt: skip


def _gaps(ns_dtype):
    """Return, after each step, the largest difference of any tensor, as a share of its largest weight."""
    plain, model = _Nanochat(), _Nanochat()
    theirs, engine = (
        _NanochatOptimizer(plain, ns_dtype),
        ShardedEngine(model, _ours(ns_dtype), FP32, compile_update=False),
    )
    gaps = []
    for step in range(STEPS):
        plain.zero_grad()
        _loss(plain, step).backward()
        theirs.step()
        engine.backward(_loss(model, step))
        engine.step()
        weights = engine.full_weights()
        both = [(weights[name], param.detach()) for name, param in plain.named_parameters()]
        gaps.append(max(float((own - other).abs().max() / other.abs().max()) for own, other in both))
    return gaps


def test_nanochat_s_optimizer_moves_its_model_alike():
    gaps = _gaps(torch.float32)
    # Each update turns the roundings of the one before into new directions: 1.1e-5 after five, by MKL on AVX-512.
    assert max(gaps[0], gaps[-1]) < 4e-5, gaps


def _draws(rows, columns, seed):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def _linear(optimizer, losses):
    """Return an engine after a step of one matrix for each factor of a loss."""
    model = nn.Linear(12, 20, bias=False)
    engine = ShardedEngine(model, optimizer, FP32, compile_update=False)
    for step, factor in enumerate(losses):
        engine.backward((model.weight * _draws(20, 12, step)).sum() * factor)
        engine.step()
    return engine


@dataclasses.dataclass(frozen=True, kw_only=True)
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


@pytest.mark.parametrize("name", ["master", "momentum_buffer"])
def test_a_state_with_a_name_of_another_is_refused(name):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Wrong(Muon):
        def matrix_states(self, rows, columns):
            return {name: 1}

    with pytest.raises(ValueError, match=f"Wrong.states of weight has '{name}'"):
        _linear(Wrong(lr=0.1), [])


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Silent(Muon):
    """Declares a state, of a given length, and returns none."""

    length: int = 1

    def matrix_states(self, rows, columns):
        return {"count": self.length}


@pytest.mark.parametrize(
    ("length", "said"),
    [
        (1, r"direction of _Silent returned the states \[\], but matrix_states names \['count'\]; return each of them"),
        (0, "_Silent.matrix_states: count has no length of at least 1"),
    ],
)
def test_a_state_that_is_not_returned_and_an_empty_one_are_named(length, said):
    with pytest.raises(ValueError, match=said):
        _linear(_Silent(lr=0.1, length=length), [1.0])


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


@pytest.mark.parametrize(("rows", "columns"), [(24, 40), (40, 24), (32, 32)])
def test_rows_and_norms_get_what_the_settings_say(rows, columns):
    """Check that equal rows change nothing where rows are equal, that a direction's norm is exact, and that
    moments of one update alone make all rows of the longer side equal.
    """
    matrix = _draws(rows, columns, 3)
    plain, own = Muon(lr=0.1, ns_dtype=torch.float32), Muon(lr=0.1, ns_dtype=torch.float32, equal_rows=True)
    level = F.normalize(matrix, dim=1)
    scaled = torch.linspace(1, 9, rows)[:, None] * level
    made = own.direction(scaled, {})[0]
    torch.testing.assert_close(made, plain.direction(level, {})[0], atol=1e-4, rtol=0)
    exact = Muon(lr=0.1, ns_dtype=torch.float32, exact_norm=True, row_beta2=0.9)
    direction, states = exact.direction(matrix, {DIRECTION_SQ: torch.zeros(max(rows, columns))})
    assert float(direction.norm()) == pytest.approx(min(rows, columns) ** 0.5, rel=1e-6)
    norms = direction.norm(dim=1 if rows >= columns else 0)
    torch.testing.assert_close(norms, norms.mean().expand_as(norms))
    assert states[DIRECTION_SQ].shape == (max(rows, columns),)


def test_zeros_have_a_direction_of_zeros():
    own = Muon(lr=0.1, equal_rows=True, exact_norm=True, row_beta2=0.9)
    direction, states = own.direction(torch.zeros(4, 6, dtype=torch.bfloat16), {DIRECTION_SQ: torch.zeros(6)})
    assert not direction.any()
    assert not states[DIRECTION_SQ].any()


def test_coefficients_go_turn_by_turn_and_the_last_stays():
    first, second = (1.0, 2.0, 3.0), (4.0, 5.0, 6.0)
    assert Muon(lr=0.1, ns_steps=2, ns_coefficients=first).turns == [first, first]
    assert Muon(lr=0.1, ns_steps=3, ns_table=[first, second]).turns == [first, second, second]


def test_cautious_decay_leaves_the_elements_that_move_away_from_zero():
    given = {"lr": 0.1, "weight_decay": 0.5}
    weights = []
    for optimizer in (Muon(**given), Muon(**given, cautious_weight_decay=True), Muon(lr=0.1, weight_decay=0.0)):
        torch.manual_seed(0)
        weights.append(_linear(optimizer, [1.0]).full_weights()["weight"])
    decayed, cautious, plain = weights
    torch.manual_seed(0)
    before = nn.Linear(12, 20, bias=False).weight.detach()
    nearer = (before - plain) * before >= 0
    assert 0 < nearer.sum() < nearer.numel()
    assert torch.equal(cautious, torch.where(nearer, decayed, plain))
