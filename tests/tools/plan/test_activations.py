"""Activations counted on fake tensors equal those of forward and backward, to the byte."""

import pytest
import torch

from megamix.base import constants
from megamix.base.live_storage import LiveStorage
from megamix.config import FP8Config, ModelConfig
from megamix.model import cross_entropy
from megamix.model.fp8 import use_fp8
from megamix.model.transformer import Transformer
from megamix.tools.plan.activations import TracedWork, trace_stage
from megamix.tools.plan.stand_ins import GpuShapes
from tests.model.kept_bytes import kept_bytes_per_token

SMALL = {"vocab_size": 300, "seq_len": 40, "hidden_size": 48, "num_heads": 4}
VARIANTS = {
    "llama": {"num_kv_heads": 2, "qk_norm": "head", "tie_embeddings": False},
    "gpt": {"norm": "layernorm", "activation": "gelu", "rope": False, "bias": True, "dropout": 0.1},
    "selective recompute": {"recompute": "selective", "num_kv_heads": 2},
    "full recompute": {"recompute": "full", "tie_embeddings": False},
    "full recompute of the first layers": {"recompute": {"full": 3}},
    "full recompute of a share": {"recompute": {"full": 0.25}, "dropout": 0.1},
    "wide vocabulary": {"vocab_size": 9000, "hidden_size": 16, "num_heads": 2},
}


BATCH = (3, SMALL["seq_len"])


def _counted(part, shape=BATCH):
    """Return the bytes kept at the end of forward, and the peaks of forward and of backward, beside the batch."""
    batch = [torch.zeros(shape, dtype=torch.int64) for _ in range(2)]
    for param in part.parameters():
        param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
    with LiveStorage() as tracker:
        for tensor in (*part.parameters(), *part.buffers(), *batch):
            tensor.detach()
        held = tracker.live_bytes
        loss = part(*batch)
        kept, forward = tracker.live_bytes - held, tracker.peak_bytes - held
        tracker.peak_bytes = tracker.live_bytes
        loss.backward()
        return kept, forward, tracker.peak_bytes - held


def _traced(model, dtype=torch.bfloat16, **work):
    """Trace a stage of all layers."""
    work = {"batch": BATCH, "machine": "cpu"} | work
    return trace_stage(TracedWork(model=model, dtype=dtype, **work), range(model.num_layers))


def _model(variant, **sizes):
    return ModelConfig(**{**SMALL, **VARIANTS[variant], "num_layers": 4, **sizes})


OTHERS = [(variant, dtype) for variant in ("llama", "gpt") for dtype in (torch.float16, torch.float32)]


@pytest.mark.parametrize(("variant", "dtype"), [*((variant, torch.bfloat16) for variant in VARIANTS), *OTHERS])
def test_traced_is_counted(variant, dtype):
    model = _model(variant)
    traced = _traced(model, dtype)
    assert (traced.kept, traced.forward, traced.backward) == _counted(Transformer(model).to(dtype))


FP8 = {
    "rowwise": FP8Config(recipe="rowwise", but=("blocks.0.*",)),
    "tensorwise": FP8Config(recipe="tensorwise", weight_grad="fp8", but=("blocks.2.*", "*.down")),
}
IN_FP8 = {"hidden_size": 32, "seq_len": 16, "ffn_hidden_size": 96}


@pytest.mark.parametrize(("recipe", "recompute"), [("rowwise", "selective"), ("tensorwise", "none")])
def test_traced_is_counted_in_fp8(recipe, recompute):
    model = _model("llama", **IN_FP8, recompute=recompute)
    traced, part = _traced(model, batch=(3, 16), fp8=FP8[recipe]), Transformer(model).to(torch.bfloat16)
    use_fp8(part, FP8[recipe])
    assert (traced.kept, traced.forward, traced.backward) == _counted(part, (3, 16))


def test_on_a_gpu_codes_take_the_place_of_inputs():
    """Of query, key and value, of gate and up, and of down, a byte for two; attention keeps that of out in half."""
    half, codes = (
        _traced(_model("llama", **IN_FP8, compile=True), batch=(3, 16), machine="gpu", fp8=fp8).blocks
        for fp8 in (None, FP8Config(recipe="tensorwise", weight_grad="fp8"))
    )
    assert half - codes == 4 * (3 * 16 * (32 + 32 + 96 - 32) - 4 * torch.float32.itemsize)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_of_many_slices_of_the_loss_three_are_run_and_count_for_all(monkeypatch, dtype):
    sizes = {"LOSS_ROWS": 4, "LOSS_CHUNK": (4, 4), "LOSS_PART": (600, 600)}  # 30 chunks of 2 parts each
    for name, size in sizes.items():
        monkeypatch.setattr(constants, name, size)
    model = ModelConfig(**SMALL | {"vocab_size": 299, "num_layers": 2})
    counted = _counted(Transformer(model).to(dtype))
    calls, add_product = [], cross_entropy._add_product
    monkeypatch.setattr(cross_entropy, "_add_product", lambda *args: calls.append(1) or add_product(*args))
    traced = _traced(model, dtype)
    assert (traced.kept, traced.forward, traced.backward) == counted
    assert len(calls) == 2 * 3  # traced with one block and with two


def test_on_a_gpu_attention_and_norm_add_their_output_and_one_number_a_row():
    query, key = (torch.empty(2, heads, 32, 8, device="meta", dtype=torch.bfloat16) for heads in (4, 2))
    with LiveStorage(counts_meta=True) as tracker:
        query.requires_grad_().detach()
        out = GpuShapes().attention(query, key, key)
        assert (out.shape, tracker.live_bytes) == (query.shape, 2 * 2 * query.numel() + 4 * 2 * 4 * 32)
    with LiveStorage(counts_meta=True) as tracker:
        weight = torch.empty(8, device="meta", dtype=torch.bfloat16, requires_grad=True)
        out = GpuShapes().rms_norm(query, weight, 1e-5)
        assert tracker.live_bytes == 2 * (2 * query.numel() + weight.numel()) + 4 * 2 * 4 * 32


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_on_a_gpu_a_compiled_block_keeps_what_the_formula_says(family, recompute):
    """Two counts must agree: tests/model/kept_bytes.py counts from the sizes, this one from the code."""
    changes = {"dropout": 0.0, "recompute": recompute, "tie_embeddings": True, "compile": True}
    model = _model(family, **changes)
    assert _traced(model, machine="gpu").blocks == 4 * 3 * 40 * kept_bytes_per_token(model)
