"""Activations counted without memory are those of forward and backward, to the byte."""

import pytest
import torch
from torch import Tensor, nn

from megamix.config import ModelConfig
from megamix.live_storage import LiveStorage
from megamix.model.transformer import Transformer
from megamix.plan.activations import Batch, GpuShapes, kept_bytes_per_token, trace_activations

SMALL = {"vocab_size": 300, "seq_len": 40, "hidden_size": 48, "num_heads": 4}
VARIANTS = {
    "llama": {"num_kv_heads": 2, "qk_norm": True, "tie_embeddings": False},
    "gpt": {"norm": "layernorm", "activation": "gelu", "position": "learned", "bias": True, "dropout": 0.1},
    "selective recompute": {"recompute": "selective", "num_kv_heads": 2},
    "full recompute": {"recompute": "full", "tie_embeddings": False},
    "wide vocabulary": {"vocab_size": 9000, "hidden_size": 16, "num_heads": 2},
}


def _part(variant: str, num_layers: int) -> Transformer:
    return Transformer(ModelConfig(**{**SMALL, **VARIANTS[variant], "num_layers": num_layers}))


def _meta_part(variant: str, num_layers: int) -> Transformer:
    with torch.device("meta"):
        return _part(variant, num_layers)


def _run(part: nn.Module, device: torch.device) -> tuple[Tensor, Batch]:
    batch = tuple(torch.zeros(3, SMALL["seq_len"], dtype=torch.int64, device=device) for _ in range(2))
    return part(*batch), batch


def _counted(part: Transformer) -> tuple[int, int, int]:
    """Bytes kept at the end of forward, and the most of forward and of backward."""
    for param in part.parameters():
        param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
    with LiveStorage() as tracker:
        for tensor in (*part.parameters(), *part.buffers()):
            tensor.detach()
        held = tracker.live_bytes
        loss, batch = _run(part, torch.device("cpu"))
        kept, forward = tracker.live_bytes - held, tracker.peak_bytes - held
        tracker.peak_bytes = tracker.live_bytes
        loss.backward()
        del batch
        return kept, forward, tracker.peak_bytes - held


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_traced_is_counted(variant: str, dtype: torch.dtype) -> None:
    traced = trace_activations(lambda blocks: _meta_part(variant, blocks), _run, 4, dtype, "cpu")
    backward = max(traced.backward, traced.backward_end)
    assert (traced.blocks + traced.others, traced.forward, backward) == _counted(_part(variant, 4).to(dtype))


def test_on_a_gpu_attention_and_norm_add_their_output_and_one_number_a_row() -> None:
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
def test_on_a_gpu_a_compiled_block_keeps_what_the_formula_says(family: str, recompute: str) -> None:
    """The two ways to count: megamix/plan/activations.py from the sizes, this one from the code."""
    sizes = {**SMALL, **VARIANTS[family], "dropout": 0.0, "recompute": recompute, "tie_embeddings": True}

    def build(num_layers: int) -> Transformer:
        with torch.device("meta"):
            return Transformer(ModelConfig(**sizes, num_layers=num_layers))

    traced = trace_activations(build, _run, 4, torch.bfloat16, "gpu", compiled=True)
    assert traced.blocks == 4 * 3 * 40 * kept_bytes_per_token(ModelConfig(**sizes, num_layers=4))
