"""Products in FP8: codes and scales are torchao's, bit for bit; a CPU, too, refuses sums of lengths that no GPU takes;
results are the products of the codes; an input of several layers is quantised once; an overflow shows.
"""

import importlib
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch
import torch.distributed._functional_collectives  # before torchao's file asks for it and is dropped again

from megamix.config import FP8Config, ModelConfig
from megamix.model import fp8
from megamix.model.fp8 import E4M3, E5M2, FP8Product, in_words, product, quantise, use_fp8
from megamix.model.ops import Ops
from megamix.model.transformer import Transformer
from tests.conftest import FULL
from tests.model.rounding import forward_and_grads, randn, saved_bytes

BF16 = torch.bfloat16
RECIPES = "rowwise", "tensorwise"
LLAMA = ModelConfig(
    vocab_size=64, seq_len=16, hidden_size=64, num_layers=4, num_heads=4, num_kv_heads=2, ffn_hidden_size=96
)


def fp8_ops(**keys):
    return Ops(product=FP8Product(FP8Config(**keys), Ops().product))


def operand(rows, summed, seed=0, spread=4.0):
    """Rows whose sizes differ by powers of ten, as those of gradients do."""
    sizes = torch.logspace(-spread, spread / 2, rows).unsqueeze(1)
    return (randn(rows, summed, seed=seed, dtype=torch.float32) * sizes).to(BF16)


def torchao_utils():
    """torchao's file of scales and casts alone: the whole package takes 5 s to import, and registers operators."""
    root = Path(str(find_spec("torchao").origin)).parent
    with mock.patch.dict(sys.modules):
        for name, path in (("torchao", root), ("torchao.float8", root / "float8")):
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__path__ = [str(path)]
        return importlib.import_module("torchao.float8.float8_utils")


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_codes_and_scales_are_those_of_torchao(recipe, dtype):
    theirs, by_row = torchao_utils(), recipe == "rowwise"
    kind = theirs.ScalingGranularity.AXISWISE if by_row else theirs.ScalingGranularity.TENSORWISE
    small, zeros = torch.full((16, 32), 1e-20, dtype=BF16), torch.zeros(16, 32, dtype=BF16)
    for x in (operand(48, 32), operand(48, 32).half(), operand(32, 48, spread=30.0), small, zeros):
        for one in (x, x.t()):
            scale = theirs.tensor_to_scale(one, dtype, scaling_granularity=kind, axiswise_dim=1 if by_row else None)
            codes = theirs.to_fp8_saturated(one.float() * scale, dtype)
            ours = quantise(one, dtype, by_row)
            assert ours.values.is_contiguous()
            assert torch.equal(ours.values.view(torch.uint8), codes.contiguous().view(torch.uint8))
            assert torch.equal(ours.factors, scale.reciprocal().view(-1))


def test_a_sum_of_a_length_that_a_cpu_takes_and_a_gpu_does_not_is_refused():
    """A user whose program has a micro-batch with a number of tokens that a GPU cannot sum over."""
    a, b = (quantise(operand(rows, 24), E4M3, True) for rows in (16, 32))
    with pytest.raises(ValueError, match="sums over 24 numbers, must be a multiple of 16"):
        product(a, b, BF16)


def decoded(x, dtype, by_row):
    """The numbers that the codes stand for, FP64."""
    found = quantise(x, dtype, by_row)
    return found.values.double() * found.factors.double().unsqueeze(1)


@pytest.mark.parametrize("weight_grad", ["half", "fp8"])
@pytest.mark.parametrize("grad_kind", ["e5m2", "e4m3"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_forward_and_backward_are_the_products_of_the_codes(recipe, grad_kind, weight_grad):
    by_row, kind = recipe == "rowwise", E5M2 if grad_kind == "e5m2" else E4M3
    x, weight, bias = operand(32, 48), operand(64, 48, seed=1, spread=1.0), operand(1, 64, seed=2)[0]
    ops = fp8_ops(recipe=recipe, grad=grad_kind, weight_grad=weight_grad)
    got = forward_and_grads(ops.linear, [x.view(2, 16, 48), weight, bias])
    grad = randn(2, 16, 64, seed=99).to(BF16).view(32, 64)
    out = decoded(x, E4M3, by_row) @ decoded(weight, E4M3, by_row).t() + bias.double()
    of_x = decoded(grad, kind, by_row) @ decoded(weight.t(), E4M3, by_row).t()
    if weight_grad == "half":
        of_weight = grad.double().t() @ x.double()
    else:
        of_weight = decoded(grad.t(), kind, by_row) @ decoded(x.t(), E4M3, by_row).t()
    for mine, exact in zip(got, (out.view(2, 16, 64), of_x.view(2, 16, 48), of_weight), strict=False):
        size = exact.abs().amax(-1, keepdim=True)  # of a row, for each has a size of its own
        assert ((mine.double() - exact).abs() <= 2.0**-7 * size).all()
    assert torch.equal(got[3], grad.float().sum(0).to(BF16))


@pytest.mark.real_gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < fp8.FP8_CAPABILITY, reason="no GPU with FP8"
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gpu_has_the_same_codes_and_near_products(recipe):
    by_row, x, weight = recipe == "rowwise", operand(256, 512), operand(128, 512, seed=1, spread=1.0)
    here = [quantise(one, E4M3, by_row) for one in (x, weight)]
    there = [quantise(one.cuda(), E4M3, by_row) for one in (x, weight)]
    for mine, its in zip(here, there, strict=True):
        assert torch.equal(mine.values.view(torch.uint8), its.values.cpu().view(torch.uint8))
        assert torch.equal(mine.factors, its.factors.cpu())
    exact = product(here[0], here[1], BF16).float()
    for fast in (False, True):
        found = product(there[0], there[1], BF16, fast=fast).cpu().float()
        assert ((found - exact).abs() <= 2.0**-6 * exact.abs().amax(1, keepdim=True)).all()


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("recipe", RECIPES)
def test_an_overflow_shows_in_every_product(recipe, bad):
    """A bare cast would make 448 of an inf."""
    for weight_grad in ("half", "fp8"):
        ops = fp8_ops(recipe=recipe, weight_grad=weight_grad)
        x, weight = operand(32, 48).requires_grad_(), operand(64, 48, seed=1).requires_grad_()
        out = ops.linear(x, weight, None)
        grad = torch.ones_like(out)
        grad[3, 5] = bad
        for found in torch.autograd.grad(out, (x, weight), grad):
            assert not found.isfinite().all()
        with torch.no_grad():
            x[3, 5] = bad
            assert not ops.linear(x, weight, None)[3].isfinite().any()


def fp8_model(**keys):
    torch.manual_seed(0)
    model = Transformer(LLAMA).to(BF16)
    return model, use_fp8(model, FP8Config(**keys))


def test_layers_are_chosen_by_place_and_by_name():
    _, names = fp8_model(recipe="rowwise", but=("blocks.0.*", "blocks.[23].*", "*.down", "blocks.*.attention.out"))
    parts = ["attention.query", "attention.key", "attention.value", "feed_forward.gate", "feed_forward.up"]
    assert names == [f"blocks.1.{part}" for part in parts]
    # A rank of a pipeline has some of the layers, by their numbers in the whole model.
    part = Transformer.part(LLAMA, [2, 3])
    use_fp8(part, FP8Config(recipe="rowwise", but=("blocks.3.*",)))
    in_fp8 = (part.blocks[layer].feed_forward.up.ops.product for layer in (2, 3))
    assert [isinstance(found, FP8Product) for found in in_fp8] == [True, False]


def test_a_choice_of_no_layer_and_a_pattern_of_none_are_refused():
    for but, message in (
        ("*.dwn", r'precision.fp8.but: got "\*.dwn", the name of no linear layer of the blocks; .* blocks.0.att'),
        ("*", 'precision.fp8.recipe: got "rowwise", but all linear layers are left out'),
    ):
        with pytest.raises(ValueError, match=message):
            fp8_model(recipe="rowwise", but=(but,))


def test_the_log_names_the_layers():
    section = FP8Config(recipe="tensorwise", but=("blocks.0.*", "*.down", "blocks.2.feed_forward.up", "*.v*", "*.k*"))
    assert in_words(Transformer(LLAMA), section, on_cpu=True) == (
        "products in FP8, tensorwise, emulated on this CPU | attention.query, attention.out, feed_forward.gate of "
        "layers 1 to 3; feed_forward.up of layers 1, 3 | the head, experts and all others stay half"
    )
    alone = FP8Config(recipe="rowwise", but=("blocks.[012].*", "*.attention.*"))
    told = in_words(Transformer(LLAMA), alone, on_cpu=False)
    assert "| feed_forward.gate, feed_forward.up, feed_forward.down of layer 3 |" in told


def test_an_input_of_several_layers_is_quantised_once():
    model, names = fp8_model(recipe="rowwise")
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
    with mock.patch.object(fp8, "quantise", side_effect=quantise) as seen:
        loss = model(tokens, tokens)
        inputs = len(seen.mock_calls) - len(names)  # each layer's weight beside them
    assert inputs == 4 * 4  # of query, key and value; of out; of gate and up; of down
    loss.backward()
    assert all(param.grad.isfinite().all() for param in model.parameters())


def test_codes_of_an_input_that_has_changed_are_not_taken_again():
    ops = fp8_ops(recipe="tensorwise")
    x, weight = operand(16, 32), operand(32, 32, seed=1)
    before = ops.linear(x, weight, None)
    x.mul_(2)
    assert torch.equal(ops.linear(x, weight, None), 2 * before)


def test_inference_mode_has_the_same_products():
    model, _ = fp8_model(recipe="rowwise")
    tokens = torch.arange(32).view(2, 16)
    with torch.inference_mode():  # its tensors have no version
        found = model(tokens)
    assert torch.equal(found, model(tokens))


@pytest.mark.skipif(not FULL, reason="--full: compiles for half a minute")
@pytest.mark.parametrize("weight_grad", ["half", "fp8"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_products_have_the_same_bits(recipe, weight_grad):
    linear = partial(fp8_ops(recipe=recipe, weight_grad=weight_grad).linear, bias=None)
    inputs = [operand(32, 48), operand(64, 48, seed=1, spread=1.0)]
    assert all(map(torch.equal, forward_and_grads(linear, inputs), forward_and_grads(torch.compile(linear), inputs)))


def test_backward_keeps_codes_where_it_multiplies_no_other_numbers():
    x, weight = operand(32, 48).requires_grad_(), operand(64, 48, seed=1).requires_grad_()
    for recipe, weight_grad, codes in (("rowwise", "fp8", 0), ("tensorwise", "half", 0), ("tensorwise", "fp8", 1536)):
        with saved_bytes() as kept:
            fp8_ops(recipe=recipe, weight_grad=weight_grad).linear(x, weight, None)
        assert kept.get(E4M3, 0) == codes
        assert kept[BF16] == 2 * (weight.numel() + (0 if codes else x.numel()))


def test_compiled_the_codes_of_a_weight_are_made_in_backward_and_not_kept_until_then():
    x, weight = operand(32, 48).requires_grad_(), operand(64, 48, seed=1).requires_grad_()
    linear = partial(fp8_ops(recipe="tensorwise", weight_grad="fp8").linear, bias=None)
    with saved_bytes() as kept:  # Inductor's choice, without its C++
        torch.compile(linear, backend="aot_eager_decomp_partition", dynamic=False)(x, weight)
    assert kept[E4M3] == x.numel()


def test_other_dtypes_compute_as_before_and_odd_sizes_are_refused_with_the_layer():
    model, tokens = Transformer(LLAMA), torch.arange(32).view(2, 16)
    before = model(tokens, tokens)
    use_fp8(model, FP8Config(recipe="rowwise"))
    assert torch.equal(model(tokens, tokens), before)  # FP32
    with pytest.raises(ValueError, match=r'feed_forward.gate is \[40, 64\].*but = \["\*.feed_forward.gate"\]'):
        use_fp8(Transformer(LLAMA.model_copy(update={"ffn_hidden_size": 40})), FP8Config(recipe="rowwise"))
