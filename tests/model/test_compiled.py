"""Compiled, each autograd function and the blocks of each configuration have the gradients that they have without a
compiler, also where halves are computed as on a GPU. A compiler that loses gradients says nothing.
"""

import inspect
import json
from pathlib import Path

import pytest
import torch

from megamix.base import added_loss
from megamix.base.machine import CPU_HALVES
from megamix.config import FP8Config, load_config
from megamix.model import cross_entropy, experts, fp8, wide
from megamix.model.cross_entropy import linear_cross_entropy
from megamix.model.family import family_of
from megamix.model.ops import Ops
from megamix.model.wide import apply
from tests.conftest import FULL
from tests.model.rounding import UNIT, forward_and_grads, randn

ROOT = Path(__file__).resolve().parents[2]
HALVES = [torch.bfloat16]  # FP16 takes the same branches
ALL = [torch.float32, *HALVES]

ROWS = experts.SortedRows.sorted_by(torch.tensor([[0, 1], [1, 2], [2, 0], [1, 0]]))
PLACES, TOKENS = torch.tensor([0, 1, 2, 4, 5]), torch.arange(16)
MASK = torch.ones(8, 8, dtype=torch.bool).tril()
TABLES = randn(8, 4, dtype=torch.float32), randn(8, 4, seed=1, dtype=torch.float32)
HEADS = [(2, 4, 8, 8), (2, 2, 8, 8), (2, 2, 8, 8)]
FP8 = fp8.FP8Product(FP8Config(recipe="tensorwise"), lambda ops, x, weight, bias: x)

# name of the function: (a call, the shapes of its inputs, their dtypes)
CASES = {
    "WideLinear": (lambda *x: apply(wide.WideLinear, *x), [(2, 8, 16), (12, 16), (12,)], HALVES),
    "WideScores": (lambda *x: apply(wide.WideScores, *x), [(2, 8, 16), (12, 16)], HALVES),
    "GroupedLinear": (lambda x, w: apply(wide.GroupedLinear, x, w, [3, 5], x.dtype), [(8, 16), (2, 12, 16)], ALL),
    "PaddedLinear": (lambda x, w: apply(wide.PaddedLinear, x, w, PLACES, 4), [(5, 16), (2, 12, 16)], ALL),
    "Crossing of a table": (lambda w: wide.embedding(TOKENS, w), [(16, 16)], HALVES),
    "WideRMSNorm": (lambda x, w: apply(wide.WideRMSNorm, x, w, 1e-5), [(2, 8, 16), (16,)], HALVES),
    "WideLayerNorm": (lambda *x: apply(wide.WideLayerNorm, *x, 1e-5), [(2, 8, 16), (16,), (16,)], HALVES),
    "SwiGLU": (lambda gate, up: apply(wide.SwiGLU, gate, up, gate.dtype), [(2, 8, 16), (2, 8, 16)], ALL),
    "GELU": (lambda x: apply(wide.GELU, x, "none"), [(2, 8, 16)], ALL),
    "WideAttention": (lambda *x: apply(wide.WideAttention, *x), HEADS, HALVES),
    "CappedAttention": (lambda *x: apply(wide.CappedAttention, *x, MASK, 2.0), HEADS, ALL),
    "Crossing of a rotation": (lambda x: wide.rotary(x, *TABLES), [(2, 8, 4, 8)], ALL),
    "Crossing": (lambda x: apply(wide.Crossing, ROWS.spread(x), ROWS.join, ROWS.spread), [(4, 16)], HALVES),
    "LinearCrossEntropy": (lambda *x: linear_cross_entropy(*x, TOKENS.view(2, 8)), [(2, 8, 16), (32, 16)], ALL),
    "FP8Linear": (lambda x, w: FP8(Ops(), x, w, None), [(16, 32), (48, 32)], HALVES),
    "_AddedLoss": (lambda x: added_loss.add_loss(x, x.float().square().mean()), [(2, 8, 16)], HALVES),
}


def test_every_function_that_a_compiler_may_meet_has_a_case():
    for room in (wide, cross_entropy, fp8, experts, added_loss):
        for name, one in vars(room).items():
            if inspect.isclass(one) and issubclass(one, torch.autograd.Function):
                assert name in CASES


@pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for name, case in CASES.items() for dtype in case[2]])
def test_a_compiled_function_has_the_gradients_of_the_plain_one(name, dtype):
    call, shapes, _ = CASES[name]
    inputs = [randn(*shape, seed=number, dtype=dtype) for number, shape in enumerate(shapes)]

    def inside(*given):  # a graph has operations before and behind it
        return 2 * call(*(2 * x for x in given))

    torch._dynamo.reset()
    plain, compiled = (
        forward_and_grads(run, inputs) for run in (inside, torch.compile(inside, backend="aot_eager", dynamic=False))
    )
    for want, got in zip(plain, compiled, strict=True):
        # The same kernels; where the compiler makes two of an operation, one of FP32 rounds once more.
        assert (got.double() - want.double()).norm() <= UNIT[dtype] * want.double().norm()


def _shrunken(path):
    """Return the configuration's model with small numbers in place of its own; everything else stays."""
    model, layers = load_config(path).model, 2 if FULL else 1
    small = {"vocab_size": 64, "seq_len": 16, "hidden_size": 32, "num_heads": 4, "compile": True}
    small |= {"num_layers": layers, "ffn_hidden_size": 48, "head_dim": 16}
    if model.num_kv_heads is not None:
        small["num_kv_heads"] = max(1, 4 * model.num_kv_heads // model.num_heads)
    if model.window:
        small |= {"window.sizes": [8, 0][:layers]}
    if model.experts is not None:
        small |= {"experts.num_experts": 4, "experts.top_k": 2, "experts.ffn_hidden_size": 24}
    alone = [f"parallelism.{name}=false" for name in ("tensor", "pipeline", "context", "expert")]
    return load_config(path, [*alone, *(f"model.{key}={json.dumps(value)}" for key, value in small.items())]).model


FAMILIES = sorted((ROOT / "configs").glob("*.toml"))
IN_SHORT = [ROOT / "configs/llama-1.3b.toml", ROOT / "configs/nanochat-d24.toml"]


@pytest.mark.parametrize("path", FAMILIES if FULL else IN_SHORT, ids=lambda path: path.stem)
@pytest.mark.parametrize("dtype", ALL if FULL else [torch.bfloat16])
def test_compiled_blocks_have_the_gradients_of_plain_ones(monkeypatch, path, dtype):
    monkeypatch.setenv(CPU_HALVES, "native")
    config = _shrunken(path)
    torch.manual_seed(0)
    model = family_of(config)(config).to(dtype)
    tokens, reduced = torch.randint(config.vocab_size, (2, 17)), []

    def gradients():
        model.zero_grad()
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        return {name: param.grad.double() for name, param in model.named_parameters()}

    torch._dynamo.reset()
    # Whether the compiler may fuse sums over rows with sums over columns, of which some were wrong on GPUs.
    inductor = torch._inductor.config
    with inductor.patch(joint_custom_pre_pass=lambda graph: reduced.append(inductor.triton.mix_order_reduction)):
        compiled = gradients()
    assert {*reduced} == {False}
    for module in model.modules():
        module._compiled_call_impl = None
    plain = gradients()
    for name, want in plain.items():
        if name.endswith("attention.key.bias"):
            continue  # it moves all scores of a query alike, so its gradient is 0 but for roundings
        # A fused kernel rounds less often than its parts, a few times in each layer.
        bound = 16 * UNIT[dtype] * want.norm()
        assert (compiled[name] - want).norm() <= bound, name
        assert compiled[name].any(), name
