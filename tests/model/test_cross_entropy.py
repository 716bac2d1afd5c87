import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megamix.model import cross_entropy as module
from megamix.model.cross_entropy import cross_entropy, plain_cross_entropy
from tests.model.rounding import U32, assert_rounds_once, randn, saved_bytes

ROWS, VOCAB = 30, 50
TARGETS = torch.randint(VOCAB, (3, ROWS // 3), generator=torch.Generator().manual_seed(5))


def logits_of(dtype: torch.dtype) -> Tensor:
    return (4 * randn(3, ROWS // 3, VOCAB, dtype=torch.float32)).to(dtype).requires_grad_()


@pytest.mark.parametrize("slice_rows", [7, ROWS])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_loss_and_gradient_are_fp32_and_rounded_once(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, slice_rows: int
) -> None:
    monkeypatch.setattr(module, "CPU_CHUNK", slice_rows * VOCAB)
    logits, loss_scale = logits_of(dtype), 2.0**10
    loss = cross_entropy(logits, TARGETS)
    (got,) = torch.autograd.grad(loss, logits, torch.tensor(loss_scale))
    exact_logits = logits.detach().double().requires_grad_()
    exact = F.cross_entropy(exact_logits.flatten(0, 1), TARGETS.flatten())
    (want,) = torch.autograd.grad(exact, exact_logits, torch.tensor(loss_scale).double())
    assert loss.dtype == torch.float32
    assert loss.shape == ()
    # Each likelihood: VOCAB + 8 units of the sum of exponentials, a few of the logits; then a mean of ROWS terms.
    highest = exact_logits.abs().max()
    assert (loss - exact).abs() <= (VOCAB + ROWS + 16) * U32 * (2 * highest + exact)
    assert got.dtype == dtype
    assert_rounds_once(got, want, (VOCAB + 16 + 4 * highest) * U32 * (want.abs() + loss_scale / ROWS))


def test_it_agrees_with_the_form_that_is_compiled() -> None:
    logits = logits_of(torch.float16)
    both = [fn(logits, TARGETS) for fn in (cross_entropy, plain_cross_entropy)]
    assert (both[0] - both[1]).abs() <= 4 * U32 * both[1].abs()
    one, other = (torch.autograd.grad(loss, logits, torch.tensor(1024.0))[0].float() for loss in both)
    assert (one - other).abs().max() <= 2.0**-11 * other.abs().max()


def test_nothing_of_the_size_of_the_logits_is_kept_but_the_logits() -> None:
    logits = logits_of(torch.float16)
    with saved_bytes() as kept:
        cross_entropy(logits, TARGETS)
    assert kept == {torch.float16: 2 * ROWS * VOCAB, torch.int64: 8 * ROWS}


def test_extreme_logits_give_a_finite_loss_and_inf_logits_do_not() -> None:
    logits = torch.zeros(2, 4, dtype=torch.float16)
    logits[0, 1], logits[1, 2] = 65504.0, -65504.0
    targets = torch.tensor([1, 2])
    assert cross_entropy(logits, targets).item() == pytest.approx((0 + 65504 + torch.tensor(3.0).log().item()) / 2)
    logits[0, 1] = torch.inf  # an overflow in the head must reach the gradients, where the engine looks for it
    leaf = logits.requires_grad_()
    (grad,) = torch.autograd.grad(cross_entropy(leaf, targets), leaf)
    assert grad.isnan().any()
