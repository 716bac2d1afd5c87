"""Recompute gives every gradient the same bits and keeps as many bytes as the formula says."""

import pytest
import torch

from megamix.base.live_storage import LiveStorage
from megamix.config import ModelConfig
from megamix.model.transformer import Transformer
from tests.model.kept_bytes import kept_bytes_per_token
from tests.model.rounding import FP16_WIDE, saved_bytes

BATCH, SEQ_LEN, VOCAB = 2, 24, 61
SIZES = {"vocab_size": VOCAB, "seq_len": SEQ_LEN, "hidden_size": 32, "num_layers": 2, "num_heads": 4}
TOKENS = torch.randint(VOCAB, (BATCH, SEQ_LEN + 1), generator=torch.Generator().manual_seed(1))
POSITIONS = torch.cat((torch.arange(7), torch.arange(SEQ_LEN - 7))).expand(BATCH, -1)
LATENT = {"kv_rank": 12, "query_rank": 20, "unrotated_dim": 8, "rotary_dim": 4, "value_dim": 10}
FAMILIES = {
    "gpt2": {"norm": "layernorm", "rope": False, "activation": "gelu_tanh", "bias": True, "dropout": 0.1},
    "llama": {"num_kv_heads": 2, "ffn_hidden_size": 72},
    "latent": {"latent_attention": LATENT},
    "qwen3": {"num_kv_heads": 1, "qk_norm": "head", "head_dim": 16, "dropout": 0.2},
}


EXPERTS = {
    "num_experts": 8,
    "top_k": 3,
    "ffn_hidden_size": 24,
    "score": "sigmoid",
    "scale": 2.5,
    "groups": {"count": 4, "top": 2},
}
EXPERTS |= {"shared_ffn_hidden_size": 48, "z_loss": 0.01, "balance_loss": 0.1}


def model_of(dtype, ops=None, **changes):
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**SIZES | changes), ops)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def gradients(model, positions):
    torch.manual_seed(7)  # the seed of dropout
    loss = model(TOKENS[:, :-1], TOKENS[:, 1:], positions)
    torch.rand(3)  # a draw in between must not change which elements backward drops again
    (loss * 1024).backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize("positions", [None, POSITIONS], ids=["one document", "packed"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", [*FAMILIES, "mixture"])
def test_gradients_are_the_same_bits(family, dtype, positions):
    changes = FAMILIES.get(family, {"experts": EXPERTS})
    plain = gradients(model_of(dtype, FP16_WIDE, **changes), positions)
    for recompute in ("selective", "full", {"full": 1}):
        again = gradients(model_of(dtype, FP16_WIDE, **changes, recompute=recompute), positions)
        assert all(torch.equal(*pair) for pair in zip(again, plain, strict=True)), recompute


@pytest.mark.parametrize("first", [2, 0.5])
def test_blocks_of_the_first_layers_alone_run_again(first):
    model, runs = model_of(torch.float32, num_layers=4, recompute={"full": first}), []
    for layer, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda *_, layer=layer: runs.append(layer))
    gradients(model, None)
    assert sorted(runs) == [0, 0, 1, 1, 2, 3]


def kept_bytes(num_layers, recompute, changes):
    """Return the bytes that are alive between forward and backward."""
    model = model_of(torch.float16, FP16_WIDE, **changes, num_layers=num_layers, recompute=recompute)
    with LiveStorage() as storage:
        with torch.no_grad():
            model(TOKENS[:, :-1])  # so that the weights are known
        before = storage.live_bytes
        logits = model(TOKENS[:, :-1])
        assert logits.requires_grad  # and is alive, with all that its backward will need
        return storage.live_bytes - before


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_keeps_the_bytes_of_the_formula(family, recompute):
    changes = FAMILIES[family]
    two_blocks = kept_bytes(3, recompute, changes) - kept_bytes(1, recompute, changes)
    config = ModelConfig(**SIZES | changes, recompute=recompute)
    assert two_blocks == 2 * BATCH * SEQ_LEN * kept_bytes_per_token(config)


def test_what_is_computed_again_is_freed_when_all_have_used_it_and_serves_a_second_backward():
    model = model_of(torch.float16, FP16_WIDE, recompute="selective", qk_norm="head")
    parameters = [*model.parameters()]
    with LiveStorage() as storage:
        loss = model(TOKENS[:, :-1], TOKENS[:, 1:])
        before = storage.live_bytes
        once = torch.autograd.grad(loss, parameters, retain_graph=True)
        assert storage.live_bytes - before == sum(grad.nbytes for grad in once)
    twice = torch.autograd.grad(loss, parameters)
    assert all(torch.equal(*pair) for pair in zip(once, twice, strict=True))


def test_a_compiled_block_keeps_no_more_than_the_formula():
    torch._dynamo.reset()
    model = model_of(torch.bfloat16, FP16_WIDE, recompute="selective", num_layers=1)
    # Inductor's choice of what to keep, without its C++.
    model.blocks[0].compile(dynamic=False, backend="aot_eager_decomp_partition")
    x, rotary = model.embedding(TOKENS[:, :-1]), model.rotary(SEQ_LEN)
    with saved_bytes() as kept:
        model.blocks[0](x, rotary, None, None)
    weights = sum(x.nbytes for x in (*model.blocks.parameters(), rotary.cos, rotary.sin))
    assert sum(kept.values()) - weights <= BATCH * SEQ_LEN * kept_bytes_per_token(model.config)
    torch._dynamo.reset()
