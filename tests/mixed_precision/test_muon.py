"""Muon equals torch.optim.Muon up to rounding, its iteration is the polynomial of singular values, and shape, module
and name decide which parameters are matrices; settings of a wrong kind are refused.
"""

import dataclasses
import math
import re
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import _muon

from megamix import NAG, AdamW, Muon, Optimizer, ParamGroup, Precision, ShardedEngine
from megamix.mixed_precision.flat_layout import ParamSpec, build_layout
from megamix.mixed_precision.matrix_layout import Place, choose_homes, is_cut, matrices_of, pieces_of
from megamix.mixed_precision.muon import MOMENTUM, iterated, orthogonalised

U32 = 2.0**-24
STEPS = 6


def _matrix(rows, columns, seed):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def _torch_muon(rows, columns, lr):
    """Return the weight and momentum of torch.optim.Muon after the given gradients."""
    weight = nn.Parameter(_matrix(rows, columns, 0))
    optimizer = torch.optim.Muon([weight], lr=lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(STEPS):
        weight.grad = _matrix(rows, columns, 1 + step)
        optimizer.step()
    return weight.detach(), optimizer.state[weight]["momentum_buffer"]


def _engine(rows, columns, optimizer):
    """Return an engine after the same gradients: the loss is linear in the weight, so that its gradients are given."""
    model = nn.Linear(columns, rows, bias=False)
    model.weight.data = _matrix(rows, columns, 0)
    engine = ShardedEngine(model, optimizer, Precision(torch.float32), compile_update=False)
    for step in range(STEPS):
        engine.backward((model.weight * _matrix(rows, columns, 1 + step)).sum())
        engine.step()
    return engine


@pytest.mark.parametrize(("rows", "columns"), [(24, 40), (40, 24), (32, 32)])
def test_it_is_torch_s_but_for_roundings(rows, columns):
    """Compare one iteration in FP32.

    Both decays round the weight up to 2 times, both steps the direction up to 3 times and the weight once. So each step
    may add FP32's u times 6 of the largest weight and 6 of the largest step.
    """
    own = Muon(lr=0.02, ns_dtype=torch.float32)
    with mock.patch.object(_muon, "_zeropower_via_newtonschulz", lambda grad, *_: orthogonalised(grad, own)):
        weight, momentum = _torch_muon(rows, columns, 0.02)
    engine = _engine(rows, columns, own)
    (owned,) = engine.owned_ranges()
    assert torch.equal(owned.tensors[MOMENTUM].view(rows, columns), momentum)
    largest_step = 0.02 * own.lr_scale(rows, columns) * 1.3
    bound = STEPS * 6 * U32 * (float(_matrix(rows, columns, 0).abs().max()) + STEPS * largest_step)
    assert (engine.full_weights()["weight"] - weight).abs().max() <= bound


@pytest.mark.parametrize(("rows", "columns"), [(24, 40), (40, 24)])
def test_what_torch_s_own_iteration_differs_by_is_the_norm_in_bf16(rows, columns):
    """Show that the norm in BF16 is the whole difference. torch divides the BF16 matrix by a norm rounded to BF16; the
    engine's norm is FP32. After that the bits are the same.
    """
    own, matrix = Muon(lr=0.02), _matrix(rows, columns, 9)
    theirs = _muon._zeropower_via_newtonschulz(matrix, own.ns_coefficients, own.ns_steps, 1e-7)
    small = matrix.bfloat16() if rows <= columns else matrix.bfloat16().T
    divided = small / small.norm().clamp(min=1e-7)
    same = iterated(divided if rows <= columns else divided.T.contiguous(), own)
    assert torch.equal(same, theirs)
    gap = (orthogonalised(matrix.bfloat16(), own) - theirs).float().abs().max()
    assert 0 < gap < 0.05  # directions have elements of about 0.15


@pytest.mark.parametrize(("rows", "columns"), [(24, 40), (40, 24)])
def test_the_iteration_is_its_polynomial_of_the_singular_values(rows, columns):
    """Compare in FP64 with the singular values themselves.

    Each of an iteration's three products of n numbers rounds by about sqrt(n) u of results of at most some units, 3
    sqrt(n) 10 u in all. An iteration makes an error at most 3.4445 times as large. So 5 iterations add up to 3.4445^5 *
    1.41 times the error of one.
    """
    own, matrix = Muon(lr=0.02, ns_dtype=torch.float32), _matrix(rows, columns, 5)
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.square().sum().sqrt()
    a, b, c = own.ns_coefficients
    for _ in range(own.ns_steps):
        values = a * values + b * values**3 + c * values**5
    want = left @ values.diag() @ right
    bound = 3.4445**5 * 1.41 * 3 * math.sqrt(max(rows, columns)) * 10 * U32
    assert (orthogonalised(matrix, own) - want).abs().max() <= bound < 0.03
    assert ((values > 0.6) & (values < 1.3)).all()
    in_bf16 = torch.linalg.svdvals(orthogonalised(matrix.bfloat16(), own).float())
    assert ((in_bf16 > 0.5) & (in_bf16 < 1.4)).all()


def test_zeros_stay_zeros_and_nan_is_everywhere():
    own = Muon(lr=0.02)
    assert not orthogonalised(torch.zeros(8, 16, dtype=torch.bfloat16), own).any()
    spoilt = _matrix(8, 16, 2).bfloat16()
    spoilt[3, 4] = torch.inf
    assert orthogonalised(spoilt, own).isnan().all()


def test_batched_matrices_have_nearly_the_directions_of_single_ones():
    """Allow other roundings of BF16 alone; directions have elements of about 0.15."""
    own = Muon(lr=0.02)
    matrices = torch.stack([_matrix(24, 40, seed) for seed in range(3)]).bfloat16()
    single = torch.stack([orthogonalised(matrix, own) for matrix in matrices])
    assert (orthogonalised(matrices, own) - single).float().abs().max() < 0.05


MATRICES = [
    ("blocks.0.up.weight", (40, 24), (40,)),
    ("blocks.0.up.bias", (40,), ()),
    ("blocks.0.qkv.weight", (40, 24), (24, 8, 8)),
    ("blocks.0.experts", (3, 40, 24), (40, 40, 40)),
    ("blocks.0.conv.weight", (40, 24, 3, 3), ()),
    ("blocks.0.conv1d.weight", (40, 1, 4), ()),
    ("blocks.0.multihead.query.weight", (24, 24), (24,)),
    ("embedding.weight", (100, 24), ()),
    ("transformer.wte.weight", (100, 24), ()),
    ("lm_head.weight", (100, 24), ()),
    ("shared.weight", (100, 24), ()),
    ("score.weight", (4, 24), ()),
    ("model.classifier.weight", (4, 24), ()),
    ("emb.weight", (100, 24), ()),
    ("tok_emb.weight", (100, 24), ()),
    ("pos_emb", (1, 50, 24), ()),
    ("head.special", (24, 24), (24,)),
    ("blocks.0.router.weight", (4, 24), ()),
]


@pytest.mark.parametrize(("name", "shape", "rows"), MATRICES)
def test_shape_and_name_say_what_a_matrix_is(name, shape, rows):
    patterns = {"matrix": ["head.special"], "adamw": ["*.router.*"], "fused": {"*.qkv.weight": (24, 8, 8)}}
    own = Muon(lr=0.02, adamw_lr_factor=0.5, groups=(ParamGroup(pattern="blocks.*", lr_factor=3.0),), **patterns)
    assert own.matrices(name, shape) == rows
    assert [*own.states(name, shape)] == ([MOMENTUM] if rows else ["exp_avg", "exp_avg_sq"])
    factor = 3.0 if name.startswith("blocks") else 1.0
    assert own.group_of(name, shape).lr_factor == (factor if rows else 0.5 * factor)


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"momentum": 1.0}, "momentum of Muon must be less than 1"),
        ({"ns_coefficients": (1.0, 2.0)}, "ns_coefficients of Muon must be 3 numbers"),
        ({"ns_coefficients": (1.0, 2.0, math.nan)}, "ns_coefficients of Muon must be finite"),
        ({"ns_table": ((1.0, 2.0, 3.0), (1.0, 2.0))}, "ns_table of Muon must be 3 numbers"),
        ({"ns_table": 1.0}, r"ns_table of Muon must be a list, got 1.0; leave it out for \(\)"),
        ({"ns_table": ((1.0, 2.0, 3.0),) * 6}, "for 6 turns, but ns_steps is 5; write ns_steps=6"),
        ({"row_beta2": 1.0}, "row_beta2 of Muon must be less than 1"),
        ({"ns_steps": 0}, "ns_steps of Muon must be at least 1, got 0; leave it out for 5"),
        ({"ns_dtype": torch.float16}, r"ns_dtype of Muon must be torch\.float32 or torch\.bfloat16"),
        ({"adjust_lr": "none"}, "adjust_lr of Muon must be 'match_rms_adamw' or 'original' or 'spectral_norm'"),
        ({"adamw_lr_factor": -1.0}, "adamw_lr_factor of Muon must be at least 0"),
        ({"ns_coefficients": 3.0}, "must be 3 numbers, got 3.0"),
        ({"ns_coefficients": ("3", 2.0, 1.0)}, "must be 3 numbers"),
        ({"betas": 0.9}, r"betas of Muon must be 2 numbers, got 0.9; leave it out for \(0.9, 0.95\)"),
        ({"betas": ("0.9", 0.95)}, "betas of Muon must be 2 numbers"),
    ],
)
def test_wrong_settings_are_named(setting, named):
    with pytest.raises(ValueError, match=named):
        Muon(lr=0.02, **setting)


class _Odd(nn.Module):
    """Parameters whose names say nothing, or the wrong thing; `tied` is a map that shares a table's weight."""

    def __init__(self):
        super().__init__()
        self.parts = nn.Sequential(
            nn.Embedding(16, 8), nn.EmbeddingBag(16, 8), nn.Conv1d(8, 8, 3), nn.LayerNorm((4, 8))
        )
        self.tied, self.plain = nn.Linear(8, 16, bias=False), nn.Linear(8, 8)
        self.tied.weight = self.parts[0].weight
        self.first = nn.Linear(8, 12, bias=False)  # its name comes before the table that shares its weight
        self.rows = nn.Embedding(12, 8)
        self.rows.weight = self.first.weight
        self.experts = nn.Parameter(torch.zeros(3, 8, 4))
        self.layers = nn.ModuleList(nn.MultiheadAttention(8, 2) for _ in range(2))


def _matrices_of(model, **settings):
    engine = ShardedEngine(model, Muon(lr=0.02, **settings), Precision(torch.float32), compile_update=False)
    slots = (slot for bucket in engine.buckets for slot in bucket.plan.slots)
    return sorted(slot.spec.name for slot in slots if slot.spec.matrices)


def test_modules_types_say_what_no_matrix_is(caplog):
    """Find no matrices in embeddings, convolutions and norms, whatever they are called; log other parameters that only
    look like matrices.
    """
    attention = [f"layers.{layer}.{name}" for layer in (0, 1) for name in ("in_proj_weight", "out_proj.weight")]
    assert _matrices_of(_Odd()) == sorted(["experts", "plain.weight", *attention])
    doubts = [record.getMessage().partition(". ")[0] for record in caplog.records]
    assert doubts == [
        "Muon makes experts, [3, 8, 4], orthogonal as 3 matrix(es)",
        "Muon makes layers.*.in_proj_weight, [24, 8], orthogonal as 1 matrix(es)",
    ]
    assert all("adamw=['" in record.getMessage() for record in caplog.records)
    assert "fused={'layers.*.in_proj_weight': (rows, rows, rows)}" in caplog.text


def test_patterns_of_the_user_come_before_types(caplog):
    settings = {"matrix": ["parts.0.*", "experts"], "adamw": ["*.in_proj_weight"], "tables": ["plain.*"]}
    out = [f"layers.{layer}.out_proj.weight" for layer in (0, 1)]
    assert _matrices_of(_Odd(), **settings) == ["experts", *out, "parts.0.weight"]
    assert not caplog.records


class _Stacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.query_key_value, self.up = (nn.Linear(8, 24) for _ in range(3))


def test_patterns_without_a_parameter_and_fused_ones_without_rows_are_warned_of(caplog):
    """Warn of no others: biases beside fused matrices are no matrices."""
    _matrices_of(_Stacked(), adamw=["*.rooter.*"], fused={"qkv.weight": (8, 8, 8)})
    assert [record.getMessage().partition(".")[0] for record in caplog.records] == [
        "adamw of Muon has the pattern '*", "Muon makes query_key_value",
    ]  # fmt: skip


def test_tables_of_the_user_that_match_nothing_are_named(caplog):
    """Name neither the usual names, which no model has all of, nor the names that for_model adds."""
    _matrices_of(_Odd())
    caplog.clear()
    settings = {"matrix": ["experts"], "adamw": ["*.in_proj_weight"]}
    _matrices_of(_Odd(), tables=["plain.*", "lokup.*"], **settings)
    assert [record.getMessage() for record in caplog.records] == [
        "tables of Muon has the pattern 'lokup.*', which matches no parameter of the model"
    ]


NUMBERS = "must be a number, or a sequence with one for each update"


@pytest.mark.parametrize(
    ("make", "setting", "said"),
    [
        (Muon, {"momentum": "0.9"}, f"momentum of Muon {NUMBERS}, got '0.9'; leave it out for 0.95"),
        (Muon, {"momentum": True}, f"momentum of Muon {NUMBERS}, got True; leave it out for 0.95"),
        (Muon, {"nesterov": "no"}, "nesterov of Muon must be True or False, got 'no'; leave it out for True"),
        (Muon, {"equal_rows": 1}, "equal_rows of Muon must be True or False, got 1; leave it out for False"),
        (Muon, {"ns_steps": 5.0}, "ns_steps of Muon must be a whole number, got 5.0; leave it out for 5"),
        (Muon, {"adamw_lr_factor": None}, "adamw_lr_factor of Muon must be a number, got None; leave it out for 1.0"),
        (AdamW, {"eps": "1e-8"}, "eps of AdamW must be a number, got '1e-8'; leave it out for 1e-08"),
        (NAG, {"decoupled_weight_decay": "no"}, "decoupled_weight_decay of NAG must be True or False, got 'no'; leave"),
        (Muon, {"adamw": None}, "adamw takes a list of patterns, got None; write adamw=['*.router.weight']"),
        (Muon, {"matrix": [3]}, "matrix takes a list of patterns, got [3]; write matrix=['*.router.weight']"),
        (Muon, {"fused": ["*.qkv.weight"]}, "fused takes each matrix's rows by pattern, got ['*.qkv.weight']; "),
        (Muon, {"fused": {"*.qkv.weight": 3}}, "got {'*.qkv.weight': 3}; write fused={'*.qkv.weight': (512, 128,"),
        (Muon, {"fused": {"*.qkv.weight": (8.0, 8, 8)}}, "got {'*.qkv.weight': (8.0, 8, 8)}; write fused={"),
    ],
)  # fmt: skip
def test_settings_of_another_kind_are_told_with_what_to_write(make, setting, said):
    """Refuse wrong kinds: otherwise "no" would count as true, and a quoted number would fail in the first step."""
    with pytest.raises(TypeError, match=re.escape(said)):
        make(lr=0.02, **setting)


@pytest.mark.parametrize("declared", [float, "float"])
def test_settings_of_an_optimizer_of_one_s_own_are_looked_at_too(declared):
    kinds = {"size": declared, "other": float | None, "pair": tuple[float, float]}
    settings = [(key, kind, None) for key, kind in kinds.items()]
    own = dataclasses.make_dataclass("Own", settings, bases=(_NoMuon,), frozen=True, kw_only=True)
    with pytest.raises(TypeError, match="size of Own must be a number, got None"):
        own(lr=0.1)
    own(lr=0.1, size=1)


@pytest.mark.parametrize("key", ["tables", "matrix", "adamw"])
def test_a_pattern_alone_is_not_taken_for_its_letters(key):
    with pytest.raises(TypeError, match=rf"got '\*.router.\*'; write {key}=\['\*.router.weight'\]"):
        Muon(lr=0.02, **{key: "*.router.*"})


class _NoMuon(Optimizer):
    def states(self, name, shape):
        return {}

    def matrices(self, name, shape):
        return shape[:1]


def test_matrices_that_nothing_would_move_are_refused():
    with pytest.raises(TypeError, match="_NoMuon has matrices, but only Muon updates matrices"):
        ShardedEngine(nn.Linear(4, 4, bias=False), _NoMuon(lr=0.1), compile_update=False)


def test_a_number_for_a_parameter_is_no_matrix():
    model = nn.Linear(4, 4)
    model.scale = nn.Parameter(torch.tensor(1.0))
    engine = ShardedEngine(model, Muon(lr=0.1), Precision(torch.float32), compile_update=False)
    engine.backward((model(torch.ones(4)) * model.scale).sum())
    engine.step()
    assert float(model.scale.detach()) != 1.0


def test_rows_that_do_not_add_up_are_named():
    with pytest.raises(ValueError, match=r"whose sum must be the 40 rows of blocks.0.qkv.weight"):
        Muon(lr=0.02, fused={"*.qkv.weight": (24, 8)}).matrices("blocks.0.qkv.weight", (40, 24))


def test_ranks_whose_blocks_hold_whole_matrices_know_of_those_that_are_cut():
    """Divide queries into two blocks, and keep keys and values in one. The ranks with keys and values have whole
    matrices, and must still take part.
    """
    specs = [
        ParamSpec(name="qkv", shape=(16, 8), full_shape=(64, 8), group=0, offset=(start, 0), matrices=(32, 16, 16))
        for start in range(0, 64, 16)
    ]
    assert [is_cut(spec) for spec in specs] == [True] * 4


@pytest.mark.parametrize("num_shards", [1, 2, 3, 16, 64])
def test_pieces_tile_every_matrix_and_have_a_home(num_shards):
    """Check 72 rows on 16 ranks, too, and matrices of a fused parameter that end within a row of 64 elements."""
    rows = {"a": (72,), "b": (5, 7, 13), "c": (3, 3, 3, 3)}
    shapes = {"a": (72, 20), "b": (25, 7), "c": (4, 3, 30)}
    specs = [
        ParamSpec(name=name, shape=shapes[name], full_shape=shapes[name], group=0, offset=(0,) * len(shapes[name]),
                  matrices=rows[name])
        for name in rows
    ]  # fmt: skip
    for bucket in build_layout(specs, [num_shards]).buckets:
        matrices = matrices_of(bucket)
        seen = [torch.zeros(matrix.rows, matrix.columns) for matrix in matrices]
        held = [[0] * num_shards for _ in matrices]
        for shard in range(num_shards):
            for piece in pieces_of(bucket, matrices, Place(shard)):
                seen[piece.matrix][piece.rows, piece.columns].view(-1)[piece.first : piece.first + piece.numel] += 1
                held[piece.matrix][shard] += piece.numel
        assert all(bool((one == 1).all()) for one in seen)
        homes = choose_homes([matrix.cost for matrix in matrices], held, num_shards)
        assert len(homes) == len(matrices)
        assert {*homes} <= {*range(num_shards)}


def test_homes_share_the_work():
    """Give one rank the most of each matrix: the others still take their share of the work."""
    homes = choose_homes([100] * 8, [[60, 20, 10, 10]] * 8, 4)
    assert [homes.count(rank) for rank in range(4)] == [2, 2, 2, 2]
    assert choose_homes([100] * 3, [[60, 0]] * 3, 2) == [0, 0, 0]  # whole matrices stay with their owner
    assert choose_homes([100] * 4, [[0, 60, 40], [50, 50, 0], [10, 20, 70], [30, 40, 30]], 3)[0] == 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Still(Muon):
    """An optimizer that does not move the parameters that AdamW moves."""

    def equation(self, grad, master, states, at):
        return (master, states) if "exp_avg" in states else super().equation(grad, master, states, at)


def test_an_equation_of_ones_own_counts_where_nothing_compiles_too():
    model = nn.Linear(8, 8)
    engine = ShardedEngine(model, _Still(lr=0.1), Precision(torch.float32), compile_update=False)
    before = engine.full_weights()
    engine.backward(model(torch.ones(2, 8)).square().sum())
    engine.step()
    after = engine.full_weights()
    assert torch.equal(before["bias"], after["bias"])
    assert not torch.equal(before["weight"], after["weight"])
