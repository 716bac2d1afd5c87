"""FP16 attention computed wide rounds FP32 results once and keeps half tensors."""

import math

import pytest
import torch
import torch.nn.functional as F

from megamix.model import wide
from tests.model.rounding import FP16_WIDE, NATIVE, U32, UNIT, assert_rounds_once, forward_and_grads, randn, saved_bytes

BATCH, HEADS, KV_HEADS, POSITIONS, HEAD_DIM = 2, 4, 2, 40, 16
# torch's CPU kernel takes a short exponential; its error is far below FP16's 2**-11.
KERNEL = 2.0**-18


def heads(num_heads, seed):
    """Return FP16 (B, heads, T, head_dim), strided as a transposed projection is."""
    return randn(BATCH, POSITIONS, num_heads, HEAD_DIM, seed=seed).transpose(1, 2)


def plain_attention(query, key, value):
    """Return attention by the textbook's formula, in the inputs' dtype."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.transpose(-1, -2) / math.sqrt(HEAD_DIM)
    causal = torch.ones(POSITIONS, POSITIONS, dtype=torch.bool).tril()
    return scores.masked_fill(~causal, -torch.inf).softmax(-1) @ value


@pytest.mark.parametrize("kv_heads", [HEADS, KV_HEADS, 1])
def test_attention_stays_within_the_bound_of_its_rounded_output(kv_heads):
    inputs = [heads(HEADS, 0), heads(kv_heads, 1), heads(kv_heads, 2)]
    got = forward_and_grads(FP16_WIDE.attention, inputs)
    exact = forward_and_grads(plain_attention, [x.double() for x in inputs])
    query, key, value = (x.double() for x in inputs)
    group = HEADS // kv_heads
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    causal = torch.ones(POSITIONS, POSITIONS, dtype=torch.bool).tril()
    scores = (query @ key.transpose(-1, -2) / math.sqrt(HEAD_DIM)).masked_fill(~causal, -torch.inf)
    weights, grad = scores.softmax(-1), randn(*got[0].shape, seed=99).double().abs()
    # Scores are off by (HEAD_DIM + 2) units of their absolute sums; a score's error is a relative error of its weight.
    score_error = (HEAD_DIM + 2) * U32 * (query.abs() @ key.abs().transpose(-1, -2)).amax(-1, keepdim=True)
    relative = 2 * score_error + 2 * KERNEL + POSITIONS * U32
    assert_rounds_once(got[0], exact[0], relative * (weights @ value.abs()))

    # backward: d score = weight * (grad . value - grad . out), and `out` was kept in FP16.
    kept = UNIT[torch.float16] * (grad * exact[0].abs()).sum(-1, keepdim=True)
    products = grad @ value.abs().transpose(-1, -2) + (grad * exact[0].abs()).sum(-1, keepdim=True)
    score_slack = weights * (kept + 4 * (relative + HEAD_DIM * U32) * products) / math.sqrt(HEAD_DIM)
    slacks = [
        score_slack @ key.abs(),
        score_slack.transpose(-1, -2) @ query.abs(),
        ((relative + POSITIONS * U32) * weights).transpose(-1, -2) @ grad,
    ]
    sum_groups = [slacks[0], *(s.unflatten(1, (kv_heads, group)).sum(2) for s in slacks[1:])]
    for result, truth, slack in zip(got[1:], exact[1:], sum_groups, strict=True):
        assert_rounds_once(result, truth, slack + 2 * U32 * group * truth.abs())


def test_attention_is_the_fp32_kernel_rounded_once():
    query, key, value = heads(HEADS, 0), heads(HEADS, 1), heads(HEADS, 2)
    fp32 = F.scaled_dot_product_attention(query.float(), key.float(), value.float(), is_causal=True)
    assert torch.equal(FP16_WIDE.attention(query, key, value), fp32.half())


def test_no_position_sees_a_later_one():
    query, key, value = heads(HEADS, 0), heads(KV_HEADS, 1), heads(KV_HEADS, 2)
    before = FP16_WIDE.attention(query, key, value)
    key[:, :, 30:] = 7.0
    value[:, :, 30:] = 7.0
    after = FP16_WIDE.attention(query, key, value)
    assert torch.equal(before[:, :, :30], after[:, :, :30])
    assert not torch.equal(before[:, :, 30:], after[:, :, 30:])


def test_attention_keeps_half_tensors_and_the_logsumexp_alone():
    leaves = [heads(HEADS, 0), heads(KV_HEADS, 1), heads(KV_HEADS, 2)]
    with saved_bytes() as kept:
        FP16_WIDE.attention(*(x.requires_grad_() for x in leaves))
    rows = BATCH * POSITIONS
    assert kept == {torch.float16: 2 * rows * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS), torch.float32: 4 * rows * HEADS}


@pytest.mark.parametrize("kv_heads", [HEADS, KV_HEADS])
def test_a_torch_without_the_private_operators_gives_the_same_within_a_unit(monkeypatch, kv_heads):
    inputs = [heads(HEADS, 0), heads(kv_heads, 1), heads(kv_heads, 2)]
    with_operators = forward_and_grads(FP16_WIDE.attention, inputs)
    monkeypatch.setattr(wide, "FLASH", "_an_operator_that_was_removed")
    without = forward_and_grads(FP16_WIDE.attention, inputs)
    assert torch.equal(without[0], with_operators[0])
    for one, other in zip(without[1:], with_operators[1:], strict=True):
        assert one.dtype == torch.float16
        assert (one - other).float().norm() <= 2 * UNIT[torch.float16] * other.float().norm()


def tables(theta=100.0):
    angles = torch.arange(POSITIONS)[:, None] * theta ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    return angles.cos(), angles.sin()


def test_rotary_stays_within_a_few_units_of_fp32():
    cos, sin = tables()
    x = randn(BATCH, POSITIONS, HEADS, HEAD_DIM)
    got = forward_and_grads(lambda x: FP16_WIDE.rotary(x, cos, sin), [x])
    exact = forward_and_grads(lambda x: rotate_as_complex_numbers(x, cos, sin), [x.double()])
    for result, truth, source in zip(got, exact, [x, randn(*x.shape, seed=99)], strict=True):
        size = source.double().abs()
        assert_rounds_once(result, truth, 4 * U32 * (size + size.roll(HEAD_DIM // 2, -1)))
    # FP64 stays FP64, as `verify` needs it: at most three roundings of two products that are no larger than x.
    gap = NATIVE.rotary(x.double(), cos, sin) - rotate_as_complex_numbers(x.double(), cos, sin)
    assert gap.abs().max() <= 8 * 2.0**-53 * x.double().abs().max()


def rotate_as_complex_numbers(x, cos, sin):
    first, second = x.chunk(2, -1)
    turned = torch.complex(first, second) * torch.complex(cos.double(), sin.double()).unsqueeze(-2)
    return torch.cat((turned.real, turned.imag), -1)


@pytest.mark.parametrize("ops", [FP16_WIDE, NATIVE], ids=["wide", "native"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rotary_turns_pairs_by_their_angle_in_every_dtype(ops, dtype):
    cos, sin = tables()
    x = randn(BATCH, POSITIONS, HEADS, HEAD_DIM, dtype=dtype)
    got, exact = ops.rotary(x, cos, sin), rotate_as_complex_numbers(x.double(), cos, sin)
    size = x.double().abs()
    assert got.dtype == dtype
    assert_rounds_once(got, exact, 4 * U32 * (size + size.roll(HEAD_DIM // 2, -1)))
