"""Half operations computed wide, with attention and rotary positions, round FP32 results once and keep half tensors."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from megamix.base.machine import CPU_HALVES, half_units, native_halves
from megamix.model import ops, wide
from tests.model.rounding import ALL_WIDE, NATIVE, UNIT, forward_and_grads, randn, saved_bytes

HIDDEN, FFN, ROWS = 48, 64, 24
BATCH, HEADS, KV_HEADS, POSITIONS, HEAD_DIM = 2, 4, 2, 40, 16
EPS = 1e-5
TOKENS = torch.randint(7, (ROWS,), generator=torch.Generator().manual_seed(3))
HALF = torch.float16, torch.bfloat16
VECTOR, OTHER_VECTOR = randn(HIDDEN, seed=1), randn(HIDDEN, seed=2)
ROW, OTHER_ROW = randn(ROWS, FFN), randn(ROWS, FFN, seed=1)
X, TWO, WEIGHT = randn(ROWS, HIDDEN), randn(2, ROWS, HIDDEN), randn(FFN, HIDDEN, seed=1)


def plain_layer_norm(x, weight, bias=None):
    return F.layer_norm(x, weight.shape, weight, bias, EPS)


# name: (wide operation, the same in torch, its inputs)
CASES = {
    "linear": (lambda x, w: ALL_WIDE.linear(x, w, None), F.linear, [TWO, WEIGHT]),
    "linear with bias": (ALL_WIDE.linear, F.linear, [X, WEIGHT, randn(FFN, seed=2)]),
    "embedding": (lambda w: ALL_WIDE.embedding(TOKENS, w), lambda w: F.embedding(TOKENS, w), [randn(7, HIDDEN)]),
    "rms_norm": (partial(ALL_WIDE.rms_norm, eps=EPS), lambda x, w: F.rms_norm(x, w.shape, w, EPS), [TWO, VECTOR]),
    "layer_norm": (partial(ALL_WIDE.layer_norm, eps=EPS), plain_layer_norm, [TWO, VECTOR, OTHER_VECTOR]),
    "layer_norm without bias": (partial(ALL_WIDE.layer_norm, bias=None, eps=EPS), plain_layer_norm, [X, VECTOR]),
    "swiglu": (ALL_WIDE.swiglu, lambda gate, up: F.silu(gate) * up, [ROW, OTHER_ROW]),
    "gelu": (ALL_WIDE.gelu, F.gelu, [ROW]),
}


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_are_those_of_fp32_rounded_once(case, dtype):
    wide_op, plain_op, inputs = CASES[case]
    inputs = [x.to(dtype) for x in inputs]
    assert torch.equal(wide_op(*inputs), plain_op(*(x.float() for x in inputs)).to(dtype))
    got = forward_and_grads(wide_op, inputs)[1:]
    # `to` rounds the gradient of the output to the dtype, in which it comes to the wide operation.
    want = forward_and_grads(lambda *xs: plain_op(*xs).to(dtype).float(), [x.float() for x in inputs])[1:]
    for wide_grad, fp32_grad in zip(got, want, strict=True):
        rounded = fp32_grad.to(dtype)
        if case == "rms_norm":
            # Its terms are added in another order than autograd's: FP32 apart by a few units, so the roundings may fall
            # on neighbours.
            neighbour = rounded.abs().nextafter(torch.tensor(torch.inf, dtype=dtype)) - rounded.abs()
            assert ((wide_grad.float() - rounded.float()).abs() <= neighbour.float()).all()
        else:
            assert torch.equal(wide_grad, rounded)


@pytest.mark.parametrize("case", CASES)
def test_backward_keeps_half_tensors_and_no_fp32_copy_of_them(case):
    wide_op, _, inputs = CASES[case]
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    with saved_bytes() as kept:
        wide_op(*leaves)
    assert kept.get(torch.float16, 0) <= sum(x.untyped_storage().nbytes() for x in leaves)
    assert kept.get(torch.float32, 0) <= 4 * 2 * 2 * ROWS  # at most two statistics for each row


def heads(num_heads, seed):
    """Return FP16 (B, heads, T, head_dim), strided as a transposed projection is."""
    return randn(BATCH, POSITIONS, num_heads, HEAD_DIM, seed=seed).transpose(1, 2)


def plain_attention(query, key, value):
    """Return attention by the textbook's formula, in the inputs' dtype."""
    key, value = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in (key, value))
    scores = query @ key.mT / math.sqrt(HEAD_DIM)
    causal = torch.ones(POSITIONS, POSITIONS, dtype=torch.bool).tril()
    return scores.masked_fill(~causal, -torch.inf).softmax(-1) @ value


@pytest.mark.parametrize("operator", [wide.FLASH, "_one_that_was_removed_from_torch"])
@pytest.mark.parametrize("kv_heads", [HEADS, KV_HEADS, 1])
def test_attention_is_the_fp32_kernel_rounded_once_and_within_two_units_of_its_formula(monkeypatch, kv_heads, operator):
    monkeypatch.setattr(wide, "FLASH", operator)
    inputs = [heads(HEADS, 0), heads(kv_heads, 1), heads(kv_heads, 2)]
    got = forward_and_grads(ALL_WIDE.attention, inputs)
    fp32 = F.scaled_dot_product_attention(*(x.float() for x in inputs), is_causal=True, enable_gqa=True)
    assert torch.equal(got[0], fp32.half())
    # One rounding of each result, and in backward one of the output that forward keeps.
    for result, truth in zip(got, forward_and_grads(plain_attention, [x.double() for x in inputs]), strict=True):
        assert result.dtype == torch.float16
        assert (result.double() - truth).norm() <= 2 * UNIT[torch.float16] * truth.norm()


def test_attention_keeps_half_tensors_and_the_logsumexp_alone():
    with saved_bytes() as kept:
        ALL_WIDE.attention(*(heads(number, 0).requires_grad_() for number in (HEADS, KV_HEADS, KV_HEADS)))
    rows = BATCH * POSITIONS
    assert kept == {torch.float16: 2 * rows * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS), torch.float32: 4 * rows * HEADS}


def turned(x, cos, sin):
    """Return pairs of FP64 turned by their angles, as complex numbers."""
    pairs = torch.complex(*x.chunk(2, -1)) * torch.complex(cos.double(), sin.double()).unsqueeze(-2)
    return torch.cat((pairs.real, pairs.imag), -1)


@pytest.mark.parametrize("own", [ALL_WIDE, NATIVE], ids=["wide", "native"])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_rotary_turns_pairs_by_their_angle_and_gradients_back(own, dtype):
    angles = torch.arange(POSITIONS)[:, None] * 100.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos, sin = angles.cos(), angles.sin()
    x, grad = (randn(BATCH, POSITIONS, HEADS, HEAD_DIM, seed=seed).to(dtype) for seed in (0, 99))
    out, grad_x = forward_and_grads(lambda x: own.rotary(x, cos, sin), [x])
    for result, source, turns in ((out, x.double(), sin), (grad_x, grad.double(), -sin)):
        truth = turned(source, cos, turns)
        assert result.dtype == dtype
        assert (result - truth).norm() <= 2 * UNIT[dtype] * truth.norm()
    # FP64 stays FP64, as `verify` needs it: at most three roundings of two products that are no larger than x.
    gap = own.rotary(x.double(), cos, sin) - turned(x.double(), cos, sin)
    assert gap.abs().max() <= 8 * 2.0**-53 * x.double().abs().max()


@pytest.mark.parametrize("dtype", HALF)
def test_a_token_seen_2000_times_gets_all_its_gradient(dtype):
    weight = torch.zeros(2, 4, dtype=dtype, requires_grad=True)
    out = ALL_WIDE.embedding(torch.zeros(2000, dtype=torch.int64), weight)
    (grad_weight,) = torch.autograd.grad(out, weight, torch.full((2000, 4), 0.25, dtype=dtype))
    assert torch.equal(grad_weight, torch.tensor([[500.0], [0.0]], dtype=dtype).expand(2, 4))


def test_products_too_large_for_one_slice_are_cut_without_cutting_a_sum(monkeypatch):
    # Small whole numbers: every sum is exact in FP32, so any cut has to give the same bits.
    shapes = (50, 16), (24, 16), (24,), (50, 24)
    *leaves, upstream = ((4 * randn(*shape, seed=seed)).round().requires_grad_() for seed, shape in enumerate(shapes))
    found = []
    for most in (wide.MAX_WIDE_ELEMENTS, 7 * 24):
        monkeypatch.setattr(wide, "row_slices", partial(wide.row_slices, max_elements=most))
        out = ALL_WIDE.linear(*leaves)
        found.append([out, *torch.autograd.grad(out, leaves, upstream)])
    assert len(list(wide.row_slices(50, 24))) == 8
    assert all(map(torch.equal, *found))


def test_gradients_nobody_asked_for_are_not_computed():
    x, w, b = randn(4, 8), randn(8, 8, seed=1), randn(8, seed=2)
    for wanted in (x, w, b):
        leaves = [t.clone().requires_grad_(t is wanted) for t in (x, w, b)]
        ALL_WIDE.linear(*leaves).sum().backward()
        assert [leaf.grad is not None for leaf in leaves] == [t is wanted for t in (x, w, b)]


@pytest.mark.parametrize("native", [[], [torch.float16], [torch.bfloat16], HALF])
def test_only_half_tensors_of_a_cpu_are_widened_where_it_lacks_arithmetic(native):
    x, w = randn(4, 8, dtype=torch.float32), randn(8, 8, seed=1, dtype=torch.float32)
    own = ops.Ops(native=frozenset(native))
    for dtype in (*HALF, torch.float32):
        leaf, weight = x.to(dtype).requires_grad_(), w.to(dtype)
        widens = dtype != torch.float32 and dtype not in native
        assert (own.rms_norm(leaf, weight[0], EPS).grad_fn.name() == "WideRMSNormBackward") == (dtype != torch.float32)
        assert own.linear(leaf, weight, None).grad_fn.name() == ("WideLinearBackward" if widens else "MmBackward0")
        assert NATIVE.linear(leaf, weight, None).grad_fn.name() == "MmBackward0"
        assert own.linear(leaf.to("meta"), weight.to("meta"), None).grad_fn.name() == "MmBackward0"


@pytest.mark.parametrize(
    ("capabilities", "way", "native"),
    [
        ({"avx512_fp16": True, "amx_fp16": False, "avx512_bf16": True}, "", {*HALF}),
        ({"amx_fp16": True, "amx_bf16": True}, "", {*HALF}),
        ({"neon": True, "fp16_arith": True, "bf16": False}, "", {torch.float16}),
        ({"neon": True, "fp16_arith": False, "bf16": True}, "", {torch.bfloat16}),
        ({"avx2": True, "avx512_bf16": False, "f16c": True}, "", set()),
        ({}, "native", {*HALF}),
        ({"avx512_fp16": True}, "wide", set()),
    ],
)
def test_the_machine_or_one_variable_decides_how_halves_are_multiplied(monkeypatch, capabilities, way, native):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    monkeypatch.setenv(CPU_HALVES, way)
    half_units.cache_clear()
    try:
        assert native_halves() == ops.Ops().native == native
    finally:
        half_units.cache_clear()  # the patched machine's answer must not outlive the patch


def test_any_other_way_is_refused(monkeypatch):
    monkeypatch.setenv(CPU_HALVES, "fast")
    with pytest.raises(ValueError, match=r"MEGAMIX_CPU_HALVES: got 'fast', must be \"native\" or \"wide\"; unset it"):
        ops.Ops()
