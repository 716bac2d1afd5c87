"""Muon equals torch.optim.Muon up to rounding, its iteration is the polynomial of singular values, and shape, module
and name decide which parameters are matrices; settings of a wrong kind are refused.
"""

import math
import re
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import _muon

from megamix import Muon, Optimizer, ParamGroup
from megamix.mixed_precision.flat_layout import ParamSpec, build_layout
from megamix.mixed_precision.optim.matrix_layout import Place, choose_homes, is_cut, matrices_of, pieces_of
from megamix.mixed_precision.optim.muon import MOMENTUM, orthogonalised
from tests.builders import make_engine

U32 = 2.0**-24
STEPS = 6


def _matrix(rows, columns, seed):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("rows", "columns"), [(24, 40), (40, 24), (32, 32)])
def test_it_is_torch_s_but_for_roundings(rows, columns):
    """Compare one iteration in FP32.

    Both decays round the weight up to 2 times, both steps the direction up to 3 times and the weight once. So each step
    may add FP32's u times 6 of the largest weight and 6 of the largest step.
    """
    own = Muon(lr=0.02, ns_dtype=torch.float32)
    with mock.patch.object(_muon, "_zeropower_via_newtonschulz", lambda grad, *_: orthogonalised(grad, own)):
        weight = nn.Parameter(_matrix(rows, columns, 0))
        theirs = torch.optim.Muon([weight], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        for step in range(STEPS):
            weight.grad = _matrix(rows, columns, 1 + step)
            theirs.step()
    model = nn.Linear(columns, rows, bias=False)
    model.weight.data = _matrix(rows, columns, 0)
    engine = make_engine(model, own)
    for step in range(STEPS):
        engine.backward((model.weight * _matrix(rows, columns, 1 + step)).sum())
        engine.step()
    (owned,) = engine.owned_ranges()
    assert torch.equal(owned.tensors[MOMENTUM].view(rows, columns), theirs.state[weight]["momentum_buffer"])
    largest_step = 0.02 * own.lr_scale(rows, columns) * 1.3
    bound = STEPS * 6 * U32 * (float(_matrix(rows, columns, 0).abs().max()) + STEPS * largest_step)
    assert (engine.full_weights()["weight"] - weight).abs().max() <= bound


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
    assert own.group_of(name, shape).lr_factor == (factor if rows else 0.5 * factor,)


WRONG = [
    ({"ns_table": ((1.0, 2.0, 3.0),) * 6}, "for 6 turns, but ns_steps is 5; write ns_steps=6"),
    ({"ns_dtype": torch.float16}, "ns_dtype of Muon must be torch.float32 or torch.bfloat16"),
    ({"adamw": None}, "adamw takes a list of patterns, got None; write adamw=['*.router.weight']"),
    ({"matrix": [3]}, "matrix takes a list of patterns, got [3]; write matrix=['*.router.weight']"),
    ({"tables": "*.router.*"}, "got '*.router.*'; write tables=['*.router.weight']"),
    ({"fused": ["*.qkv.weight"]}, "fused takes each matrix's rows by pattern, got ['*.qkv.weight']; "),
    ({"fused": {"*.qkv.weight": 3}}, "got {'*.qkv.weight': 3}; write fused={'*.qkv.weight': (512, 128,"),
    ({"fused": {"*.qkv.weight": (8.0, 8, 8)}}, "got {'*.qkv.weight': (8.0, 8, 8)}; write fused={"),
]


@pytest.mark.parametrize(("setting", "said"), WRONG)
def test_wrong_settings_are_named(setting, said):
    with pytest.raises((TypeError, ValueError), match=re.escape(said)):
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
    engine = make_engine(model, Muon(lr=0.02, **settings))
    slots = (slot for bucket in engine.buckets for slot in bucket.plan.slots)
    return sorted(slot.spec.name for slot in slots if slot.spec.matrices)


def test_modules_types_say_what_no_matrix_is(caplog):
    """Find no matrices in embeddings, convolutions and norms, whatever they are called; log other parameters that only
    look like matrices.
    """
    attention = [f"layers.{layer}.{name}" for layer in (0, 1) for name in ("in_proj_weight", "out_proj.weight")]
    assert _matrices_of(_Odd()) == sorted(["experts", "plain.weight", *attention])
    doubts = [message.partition(". ")[0] for message in caplog.messages]
    assert doubts == [
        "Muon makes experts, [3, 8, 4], orthogonal as 3 matrix(es)",
        "Muon makes layers.*.in_proj_weight, [24, 8], orthogonal as 1 matrix(es)",
    ]
    assert caplog.text.count("adamw=['") == 2
    assert "fused={'layers.*.in_proj_weight': (rows, rows, rows)}" in caplog.text


def test_patterns_of_the_user_come_before_types(caplog):
    settings = {"matrix": ["parts.0.*", "experts"], "adamw": ["*.in_proj_weight"], "tables": ["plain.*"]}
    out = [f"layers.{layer}.out_proj.weight" for layer in (0, 1)]
    assert _matrices_of(_Odd(), **settings) == ["experts", *out, "parts.0.weight"]
    assert not caplog.records


def test_patterns_without_a_parameter_and_fused_ones_without_rows_are_warned_of(caplog):
    """Warn of no others: neither of biases beside fused matrices, nor of the usual tables, nor of names that for_model
    adds.
    """
    stacked = nn.ModuleDict({name: nn.Linear(8, 24) for name in ("qkv", "query_key_value", "up")})
    stacked["rows"] = nn.Embedding(12, 8)
    _matrices_of(stacked, tables=["up.*", "lokup"], adamw=["*.rooter"], fused={"qkv.weight": (8, 8, 8)})
    assert [message.partition(",")[0] for message in caplog.messages] == [
        "tables of Muon has the pattern 'lokup'", "adamw of Muon has the pattern '*.rooter'",
        "Muon makes query_key_value.weight",
    ]  # fmt: skip


def test_matrices_that_nothing_would_move_are_refused():
    class _NoMuon(Optimizer):
        def states(self, name, shape):
            return {}

        def matrices(self, name, shape):
            return shape[:1]

    with pytest.raises(TypeError, match="_NoMuon has matrices, but only Muon updates matrices"):
        make_engine(nn.Linear(4, 4, bias=False), _NoMuon(lr=0.1))


def test_a_number_for_a_parameter_is_no_matrix():
    model = nn.Linear(4, 4)
    model.scale = nn.Parameter(torch.tensor(1.0))
    engine = make_engine(model, Muon(lr=0.1))
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
    specs = [replace(ParamSpec.whole(name, shapes[name], 0), matrices=rows[name]) for name in rows]
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


class _Still(Muon):
    """An optimizer that does not move the parameters that AdamW moves."""

    def equation(self, grad, master, states, at):
        return (master, states) if "exp_avg" in states else super().equation(grad, master, states, at)


def test_an_equation_of_ones_own_counts_where_nothing_compiles_too():
    model = nn.Linear(8, 8)
    engine = make_engine(model, _Still(lr=0.1))
    before = engine.full_weights()
    engine.backward(model(torch.ones(2, 8)).square().sum())
    engine.step()
    after = engine.full_weights()
    assert torch.equal(before["bias"], after["bias"])
    assert not torch.equal(before["weight"], after["weight"])
