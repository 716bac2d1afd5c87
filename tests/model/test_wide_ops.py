"""Half operations computed wide round FP32 results once and keep half tensors."""

import pytest
import torch
import torch.nn.functional as F

from megamix.machine import CPU_HALVES, half_units, native_halves
from megamix.model import ops, wide
from tests.model.rounding import ALL_WIDE, NATIVE, U32, assert_rounds_once, forward_and_grads, randn, saved_bytes

HIDDEN, FFN, ROWS = 48, 64, 24
EPS = 1e-5
TOKENS = torch.randint(7, (ROWS,), generator=torch.Generator().manual_seed(3))

# name: (wide operation, the same in torch, its inputs)
CASES = {
    "linear": (
        lambda x, w: ALL_WIDE.linear(x, w, None),
        F.linear,
        [randn(2, ROWS, HIDDEN), randn(FFN, HIDDEN, seed=1)],
    ),
    "linear with bias": (
        ALL_WIDE.linear,
        F.linear,
        [randn(ROWS, HIDDEN), randn(FFN, HIDDEN, seed=1), randn(FFN, seed=2)],
    ),
    "embedding": (lambda w: ALL_WIDE.embedding(TOKENS, w), lambda w: F.embedding(TOKENS, w), [randn(7, HIDDEN)]),
    "rms_norm": (
        lambda x, w: ALL_WIDE.rms_norm(x, w, EPS),
        lambda x, w: F.rms_norm(x, w.shape, w, EPS),
        [randn(2, ROWS, HIDDEN), randn(HIDDEN, seed=1)],
    ),
    "layer_norm": (
        lambda x, w, b: ALL_WIDE.layer_norm(x, w, b, EPS),
        lambda x, w, b: F.layer_norm(x, w.shape, w, b, EPS),
        [randn(2, ROWS, HIDDEN), randn(HIDDEN, seed=1), randn(HIDDEN, seed=2)],
    ),
    "layer_norm without bias": (
        lambda x, w: ALL_WIDE.layer_norm(x, w, None, EPS),
        lambda x, w: F.layer_norm(x, w.shape, w, None, EPS),
        [randn(ROWS, HIDDEN), randn(HIDDEN, seed=1)],
    ),
    "swiglu": (ALL_WIDE.swiglu, lambda gate, up: F.silu(gate) * up, [randn(ROWS, FFN), randn(ROWS, FFN, seed=1)]),
    "gelu": (ALL_WIDE.gelu, F.gelu, [randn(ROWS, FFN)]),
}


HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])


@HALVES
@pytest.mark.parametrize("case", CASES)
def test_forward_is_the_fp32_result_rounded_once(case, dtype):
    wide_op, plain_op, inputs = CASES[case]
    inputs = [x.to(dtype) for x in inputs]
    assert torch.equal(wide_op(*inputs), plain_op(*(x.float() for x in inputs)).to(dtype))


@HALVES
@pytest.mark.parametrize("case", CASES)
def test_backward_is_fp32_autograd_rounded_once(case, dtype):
    wide_op, plain_op, inputs = CASES[case]
    inputs = [x.to(dtype) for x in inputs]
    got = forward_and_grads(wide_op, inputs)[1:]
    # `to` rounds the gradient of the output to the dtype, in which it comes to the wide operation.
    want = forward_and_grads(lambda *xs: plain_op(*xs).to(dtype).float(), [x.float() for x in inputs])[1:]
    for wide_grad, fp32_grad in zip(got, want, strict=True):
        if case == "rms_norm":
            # Its terms are added in another order than autograd's: FP32 apart by a few units, so the roundings may fall
            # on neighbours.
            rounded = fp32_grad.to(dtype)
            neighbour = rounded.abs().nextafter(torch.tensor(torch.inf, dtype=dtype)) - rounded.abs()
            assert ((wide_grad.float() - rounded.float()).abs() <= neighbour.float()).all()
        else:
            assert torch.equal(wide_grad, fp32_grad.to(dtype))


def fp64(case):
    """Return the wide results of a case, and the exact ones."""
    wide_op, plain_op, inputs = CASES[case]
    return forward_and_grads(wide_op, inputs), forward_and_grads(plain_op, [x.double() for x in inputs])


def out_grad(*shape):
    """Return the FP64 absolute value of the gradient that forward_and_grads sends back."""
    return randn(*shape, seed=99).double().abs()


def test_linear_stays_within_the_bound_of_fp32_dot_products():
    got, exact = fp64("linear with bias")
    x, w, b = (t.double().abs() for t in CASES["linear with bias"][2])
    grad = out_grad(ROWS, FFN)
    # A dot product of n terms is off by at most n units of the sum of absolute values.
    sizes = [(HIDDEN + 1, x @ w.T + b), (FFN, grad @ w), (ROWS, grad.T @ x), (ROWS, grad.sum(0))]
    for result, truth, (terms, absolute) in zip(got, exact, sizes, strict=True):
        assert_rounds_once(result, truth, terms * U32 * absolute)


def test_rms_norm_stays_within_the_bound_of_fp32_statistics():
    got, exact = fp64("rms_norm")
    x, w = (t.double() for t in CASES["rms_norm"][2])
    rstd = (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
    normed, grad = (x * rstd).abs(), out_grad(2, ROWS, HIDDEN)
    branch = (grad * w).abs()
    # The mean square is off by at most HIDDEN units, its root by half of that; a few units for the products beside it.
    statistic = (HIDDEN + 16) * U32
    along = normed * (branch * normed).mean(-1, keepdim=True)
    assert_rounds_once(got[0], exact[0], statistic * normed * w.abs())
    assert_rounds_once(got[1], exact[1], 2 * statistic * rstd * (branch + along))
    assert_rounds_once(got[2], exact[2], (statistic + 2 * ROWS * U32) * (grad * normed).sum((0, 1)))


def test_layer_norm_stays_within_the_bound_of_fp32_statistics():
    got, exact = fp64("layer_norm")
    x, w, b = (t.double() for t in CASES["layer_norm"][2])
    rstd = (x.var(-1, keepdim=True, unbiased=False) + EPS).rsqrt()
    # Subtracting the mean cancels: its error counts against |x| + mean |x|, not against the difference.
    normed = (x.abs() + x.abs().mean(-1, keepdim=True)) * rstd
    grad = out_grad(2, ROWS, HIDDEN)
    branch = (grad * w).abs()
    statistic = (HIDDEN + 16) * U32
    along = branch.mean(-1, keepdim=True) + normed * (branch * normed).mean(-1, keepdim=True)
    assert_rounds_once(got[0], exact[0], 2 * statistic * (normed * w.abs() + b.abs()))
    assert_rounds_once(got[1], exact[1], 4 * statistic * rstd * (branch + along))
    assert_rounds_once(got[2], exact[2], (2 * statistic + 2 * ROWS * U32) * (grad * normed).sum((0, 1)))
    assert_rounds_once(got[3], exact[3], 2 * ROWS * U32 * grad.sum((0, 1)))


def test_activations_stay_within_a_few_units_of_fp32():
    got, exact = fp64("swiglu")
    gate, up = (t.double().abs() for t in CASES["swiglu"][2])
    grad, few = out_grad(ROWS, FFN), 16 * U32
    for result, truth, absolute in zip(got, exact, [gate * up, grad * up * (1 + gate), grad * gate], strict=True):
        assert_rounds_once(result, truth, few * absolute)
    got, exact = fp64("gelu")
    x = CASES["gelu"][2][0].double().abs()
    for result, truth, absolute in zip(got, exact, [x, grad * (1 + x)], strict=True):
        assert_rounds_once(result, truth, few * absolute)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_token_seen_2000_times_gets_all_its_gradient(dtype):
    weight = torch.zeros(2, 4, dtype=dtype, requires_grad=True)
    out = ALL_WIDE.embedding(torch.zeros(2000, dtype=torch.int64), weight)
    (grad_weight,) = torch.autograd.grad(out, weight, torch.full((2000, 4), 0.25, dtype=dtype))
    assert torch.equal(grad_weight, torch.tensor([[500.0], [0.0]], dtype=dtype).expand(2, 4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", ["rms_norm", "layer_norm"])
def test_norms_keep_their_statistics_in_fp32_in_every_half_dtype(case, dtype):
    wide_op, plain_op, inputs = CASES[case]
    inputs = [x.to(dtype) for x in inputs]
    assert torch.equal(wide_op(*inputs), plain_op(*(x.float() for x in inputs)).to(dtype))
    with saved_bytes() as kept:
        wide_op(*(x.requires_grad_() for x in inputs))
    num_statistics = 1 if case == "rms_norm" else 2
    assert kept[torch.float32] == 4 * num_statistics * 2 * ROWS


def test_products_too_large_for_one_slice_are_cut_without_cutting_a_sum(monkeypatch):
    # Small whole numbers: every sum is exact in FP32, so any cut has to give the same bits.
    x, w, b = ((4 * randn(*shape, seed=seed)).round() for seed, shape in enumerate([(50, 16), (24, 16), (24,)]))
    want = forward_and_grads(lambda x, w, b: F.linear(x, w, b), [t.double() for t in (x, w, b)])
    grad = randn(50, 24, seed=99).double()
    monkeypatch.setattr(wide, "MAX_WIDE_ELEMENTS", 7 * 24)
    assert len(list(wide.row_slices(50, 24, 7 * 24))) == 8
    got = forward_and_grads(ALL_WIDE.linear, [x, w, b])
    assert torch.equal(got[0], want[0].half())
    for result, truth, absolute in zip(
        got[1:],
        want[1:],
        [grad.abs() @ w.double().abs(), grad.abs().T @ x.double().abs(), grad.abs().sum(0)],
        strict=True,
    ):
        assert_rounds_once(result, truth, 50 * U32 * absolute)


def test_gradients_nobody_asked_for_are_not_computed():
    x, w, b = randn(4, 8), randn(8, 8, seed=1), randn(8, seed=2)
    for wanted in (x, w, b):
        leaves = [t.clone().requires_grad_(t is wanted) for t in (x, w, b)]
        ALL_WIDE.linear(*leaves).sum().backward()
        assert [leaf.grad is not None for leaf in leaves] == [t is wanted for t in (x, w, b)]


def test_values_beyond_the_range_of_fp16_become_inf_as_on_a_gpu():
    big = torch.full((1, 64), 60_000.0, dtype=torch.float16)
    assert torch.equal(ALL_WIDE.linear(big, -torch.ones(1, 64).half(), None), torch.full((1, 1), -torch.inf).half())
    assert torch.isposinf(ALL_WIDE.swiglu(big, big)).all()
    assert torch.equal(ALL_WIDE.rms_norm(big, big[0], EPS), big)  # the squares would be inf in FP16
    assert torch.isposinf(ALL_WIDE.layer_norm(torch.arange(64).half(), big[0], None, EPS)[-1])
    leaf = torch.ones(1, 64, dtype=torch.float16, requires_grad=True)
    out = ALL_WIDE.linear(leaf, torch.ones(2, 64).half(), None)
    (grad,) = torch.autograd.grad(out, leaf, big[:, :2])
    assert torch.isposinf(grad).all()  # 60,000 + 60,000: finite in FP32, not in FP16
    weight = torch.ones(1, 4, dtype=torch.float16, requires_grad=True)
    rows = ALL_WIDE.embedding(torch.zeros(2, dtype=torch.int64), weight)
    (grad,) = torch.autograd.grad(rows, weight, torch.full((2, 4), 60_000.0).half())
    assert torch.isposinf(grad).all()


@pytest.mark.parametrize("case", CASES)
def test_backward_keeps_half_tensors_and_no_fp32_copy_of_them(case):
    wide_op, _, inputs = CASES[case]
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    with saved_bytes() as kept:
        wide_op(*leaves)
    assert kept.get(torch.float16, 0) <= sum(x.untyped_storage().nbytes() for x in leaves)
    assert kept.get(torch.float32, 0) <= 4 * 2 * 2 * ROWS  # at most two statistics for each row


@pytest.mark.parametrize("native", [set(), {torch.float16}, {torch.bfloat16}, {torch.float16, torch.bfloat16}])
def test_only_half_tensors_of_a_cpu_are_widened_where_it_lacks_arithmetic(native):
    x, w = randn(4, 8, dtype=torch.float32), randn(8, 8, seed=1, dtype=torch.float32)
    own = ops.Ops(native=frozenset(native))
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        leaf, weight = x.to(dtype).requires_grad_(), w.to(dtype)
        widens = dtype != torch.float32 and dtype not in native
        assert (node_of(own.rms_norm(leaf, weight[0], EPS)) == "WideRMSNormBackward") == (dtype != torch.float32)
        assert node_of(own.linear(leaf, weight, None)) == ("WideLinearBackward" if widens else "MmBackward0")
        assert node_of(NATIVE.linear(leaf, weight, None)) == "MmBackward0"
        assert node_of(own.linear(leaf.to("meta"), weight.to("meta"), None)) == "MmBackward0"


def node_of(x):
    assert x.grad_fn is not None
    return type(x.grad_fn).__name__


@pytest.mark.parametrize(
    ("capabilities", "native"),
    [
        ({"avx512_fp16": True, "amx_fp16": False, "avx512_bf16": True}, {torch.float16, torch.bfloat16}),
        ({"avx512_fp16": False, "amx_fp16": True, "amx_bf16": True}, {torch.float16, torch.bfloat16}),
        ({"neon": True, "fp16_arith": True, "bf16": False}, {torch.float16}),
        (
            {"avx512_f": True, "avx512_fp16": False, "amx_fp16": False, "avx512_bf16": True, "f16c": True},
            {torch.bfloat16},
        ),
        ({"neon": True, "fp16_arith": False, "bf16": True}, {torch.bfloat16}),
        ({"avx2": True, "avx512_bf16": False}, set()),
    ],
)
def test_the_machine_decides_how_halves_are_multiplied(monkeypatch, capabilities, native):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    monkeypatch.delenv(CPU_HALVES, raising=False)
    half_units.cache_clear()
    try:
        assert native_halves() == native
        assert ops.Ops().native == native
    finally:
        half_units.cache_clear()  # the patched machine's answer must not outlive the patch


@pytest.mark.parametrize(("way", "native"), [("native", {torch.float16, torch.bfloat16}), ("wide", set())])
def test_one_variable_says_how_a_cpu_computes_halves(monkeypatch, way, native):
    monkeypatch.setenv(CPU_HALVES, way)
    assert native_halves() == native
    assert ops.Ops().native == native


def test_any_other_way_is_refused(monkeypatch):
    monkeypatch.setenv(CPU_HALVES, "fast")
    with pytest.raises(ValueError, match=r"MEGAMIX_CPU_HALVES: got 'fast', must be \"native\" or \"wide\"; unset it"):
        ops.Ops()
