"""Head and loss are computed in FP32 and rounded once, without memory for full logits."""

import pytest
import torch
import torch.nn.functional as F

from megamix.base import constants
from megamix.base.live_storage import LiveStorage
from megamix.data.loader import IGNORE
from megamix.model.cross_entropy import linear_cross_entropy
from tests.model.rounding import U32, UNIT, randn, saved_bytes

ROWS, HIDDEN, VOCAB = 30, 20, 50
TARGETS = torch.randint(VOCAB, (3, ROWS // 3), generator=torch.Generator().manual_seed(5))


def inputs(dtype):
    """hidden (3, 10, HIDDEN) and weight (VOCAB, HIDDEN)."""
    shapes = [(3, ROWS // 3, HIDDEN), (VOCAB, HIDDEN)]
    return [randn(*shape, seed=seed, dtype=dtype).requires_grad_() for seed, shape in enumerate(shapes)]


@pytest.mark.parametrize("chunk_rows", [7, ROWS])
@pytest.mark.parametrize(("dtype", "units"), [(torch.float16, 1), (torch.bfloat16, 8), (torch.float32, 32)])
def test_loss_and_gradients_are_those_of_fp64_but_for_few_roundings(monkeypatch, dtype, units, chunk_rows):
    """FP16 computes in FP32 and rounds its gradients once. BF16 rounds logits and slopes, too, as its products do. A
    sum of FP32 has as many roundings as terms, of which most cancel.
    """
    monkeypatch.setattr(constants, "LOSS_ROWS", chunk_rows)
    monkeypatch.setattr(constants, "LOSS_CHUNK", (1, 1))
    monkeypatch.setattr(constants, "LOSS_PART", (3 * VOCAB, 1))
    leaves, targets = inputs(dtype), TARGETS.clone()
    targets[0, 4] = targets[2] = IGNORE
    loss = linear_cross_entropy(*leaves, targets)
    exact_leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    logits = (exact_leaves[0] @ exact_leaves[1].t()).flatten(0, -2)
    exact = F.cross_entropy(logits, targets.flatten(), reduction="sum", ignore_index=IGNORE) / targets.numel()
    assert (loss.dtype, loss.shape) == (torch.float32, ())
    assert loss.item() == pytest.approx(exact.item(), rel=8 * UNIT[dtype] if dtype == torch.bfloat16 else 32 * U32)
    scale = torch.tensor(2.0**10)
    want = torch.autograd.grad(exact, exact_leaves, scale.double())
    for result, truth in zip(torch.autograd.grad(loss, leaves, scale), want, strict=True):
        assert result.dtype == dtype
        assert (result.double() - truth).norm() <= units * UNIT[dtype] * truth.norm()
    assert linear_cross_entropy(*leaves, torch.full_like(TARGETS, IGNORE)).item() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_its_peak_is_its_two_gradients_in_fp32_and_no_logits(monkeypatch, dtype):
    rows, hidden_size, vocab_size, chunk_rows = 2048, 16, 1024, 32
    monkeypatch.setattr(constants, "LOSS_ROWS", chunk_rows)
    monkeypatch.setattr(constants, "LOSS_CHUNK", (1, 1))
    monkeypatch.setattr(constants, "LOSS_PART", (8 * vocab_size, 1))
    hidden = randn(rows, hidden_size, dtype=dtype).requires_grad_()
    weight = randn(vocab_size, hidden_size, seed=1, dtype=dtype).requires_grad_()
    targets = torch.zeros(rows, dtype=torch.int64)
    with LiveStorage() as storage:
        loss = linear_cross_entropy(hidden, weight, targets)
        torch.autograd.grad(loss, [hidden, weight])
    numel = (rows + vocab_size) * hidden_size
    own = 2 * numel + 8 * rows  # the inputs
    grads = (4 + 2) * numel  # in FP32, and what is handed out
    widened = 4 * numel if dtype == torch.float16 else 0  # the weight, and a chunk of hidden
    chunk = 4 * chunk_rows * vocab_size + 4 * 4 * 8 * vocab_size + 8 * rows  # logits; a part's FP32; per row
    assert storage.peak_bytes <= own + grads + widened + chunk
    assert storage.peak_bytes < 2 * rows * vocab_size / 4  # a quarter of the logits in half


def test_nothing_but_the_gradients_is_kept_and_they_serve_twice():
    leaves = inputs(torch.float16)
    with saved_bytes() as kept:
        loss = linear_cross_entropy(*leaves, TARGETS)
    assert kept == {torch.float32: 4 * (ROWS + VOCAB) * HIDDEN}
    once = torch.autograd.grad(loss, leaves, retain_graph=True)
    assert all(torch.equal(*pair) for pair in zip(once, torch.autograd.grad(loss, leaves), strict=True))
    with torch.no_grad(), LiveStorage() as storage:
        assert torch.equal(linear_cross_entropy(*leaves, TARGETS), loss)
    assert storage.peak_bytes < 6 * (ROWS + VOCAB) * HIDDEN + 4 * 4 * ROWS * VOCAB


def test_a_loss_scale_that_fits_the_gradients_overflows_nothing_on_the_way():
    hidden, weight = (torch.full((rows, 4), 2.0**-8, dtype=torch.float16, requires_grad=True) for rows in (1, 2))
    # Slopes of 1/2 times 2**20 are inf in FP16; the weight's gradient is 2**19 * 2**-8. The search for the largest
    # scale ends where the gradient does.
    for scale, want in ((2.0**20, 2048.0), (2.0**26, torch.inf)):
        loss = linear_cross_entropy(hidden, weight, torch.tensor([0]))
        (grad_weight,) = torch.autograd.grad(loss, weight, torch.tensor(scale))
        assert torch.equal(grad_weight, torch.tensor([[-want], [want]]).half().expand(2, 4))


def test_extreme_logits_give_a_finite_loss_and_inf_does_not():
    hidden = torch.eye(2, dtype=torch.float16)
    weight = torch.zeros(4, 2, dtype=torch.float16)
    weight[1, 0], weight[2, 1] = 65504.0, -65504.0
    loss = linear_cross_entropy(hidden, weight, torch.tensor([1, 2]))
    assert loss.item() == pytest.approx((0 + 65504 + torch.tensor(3.0).log().item()) / 2)
    hidden[0, 0] = torch.inf  # an overflow in the last block must reach the gradients, where the engine looks for it
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    grads = torch.autograd.grad(linear_cross_entropy(*leaves, torch.tensor([1, 2])), leaves)
    assert all(grad.isnan().any() for grad in grads)


def test_under_autocast_gradients_are_those_of_the_rounded_products():
    leaves = inputs(torch.float32)
    want = torch.autograd.grad(linear_cross_entropy(*leaves, TARGETS), leaves)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(*leaves, TARGETS)
    for got, exact in zip(torch.autograd.grad(loss, leaves), want, strict=True):
        # Logits, slopes and the products of both are rounded to BF16, each by a unit of its own size.
        assert (got - exact).norm() <= 8 * UNIT[torch.bfloat16] * exact.norm()
