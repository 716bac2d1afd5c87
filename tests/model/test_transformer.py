"""Every variant of the model computes its equations, is causal, has the right initial values, and has one compiled
graph for all blocks.
"""

import functools
import math

import pytest
import torch
import torch.nn.functional as F

from megamix.config import ModelConfig
from megamix.model.layers import RotaryTable, RotaryTables
from megamix.model.ops import Ops
from megamix.model.transformer import Block, Transformer
from tests.model.rounding import FP16_WIDE, UNIT

VOCAB, SEQ_LEN = 97, 12
SIZES = {"vocab_size": VOCAB, "seq_len": SEQ_LEN, "hidden_size": 32, "num_layers": 2, "num_heads": 4}


def config_of(**changes):
    return ModelConfig(**{**SIZES, **changes})


def model_of(dtype=torch.float32, ops=None, **changes):
    torch.manual_seed(0)
    return cast(Transformer(config_of(**changes), ops), dtype)


def cast(model, dtype):
    """Cast a model as the engine does: other storage for each parameter's data, buffers unchanged."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def batch(num_positions=SEQ_LEN):
    tokens = torch.randint(VOCAB, (3, num_positions + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


VARIANTS = [
    {},
    {"norm": "layernorm", "position": "learned", "activation": "gelu", "bias": True, "tie_embeddings": False},
    {"num_kv_heads": 2, "norm": "layernorm", "bias": False},
    {"num_kv_heads": 1, "bias": True, "ffn_hidden_size": 40},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("changes", VARIANTS)
def test_every_variant_gives_logits_in_its_dtype_an_fp32_loss_and_all_gradients(changes, dtype):
    model, (tokens, targets) = model_of(dtype, **changes), batch()
    logits = model(tokens)
    assert (logits.dtype, logits.shape) == (dtype, (3, SEQ_LEN, VOCAB))
    loss = model(tokens, targets)
    assert (loss.dtype, loss.shape) == (torch.float32, ())
    # The loss does not round its logits to half; these are.
    want = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()).item()
    assert loss.detach() == pytest.approx(want, rel=1e-6, abs=2 * UNIT[dtype] * logits.abs().max().item())
    (loss * 1024).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == dtype
        assert parameter.grad.any() or name.endswith("key.bias"), name
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("changes", VARIANTS)
def test_fp16_computed_wide_follows_fp32(changes):
    tokens, targets = batch()
    half, full = model_of(torch.float16, FP16_WIDE, **changes), model_of(**changes)
    cast(cast(full, torch.float16), torch.float32)  # the same weights, to the bit
    losses = [half(tokens, targets), full(tokens, targets)]
    assert losses[0].item() == pytest.approx(losses[1].item(), abs=2e-3)
    for loss in losses:
        (loss * 1024).backward()
    for (name, one), other in zip(half.named_parameters(), full.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        if name.endswith("key.bias"):
            continue  # shifts all scores of a row alike: without rotary its gradient is 0, and what is seen is rounding
        # About 30 roundings of 2**-11 lie between loss and embedding, at random.
        assert (one.grad.float() - other.grad).norm() <= 30 * 2.0**-11 * other.grad.norm(), name


def test_the_loss_of_a_new_model_is_that_of_a_uniform_guess():
    assert model_of()(*batch()).item() == pytest.approx(math.log(VOCAB), abs=0.05)


def test_initial_values_follow_the_seed_the_config_and_the_depth():
    model = model_of(hidden_size=256, num_layers=8, bias=True, norm="layernorm", init_std=0.05, position="learned")
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            branch = name.endswith(("attention.out.weight", "feed_forward.down.weight"))
            want = 0.05 / math.sqrt(2 * 8) if branch else 0.05
            assert parameter.std().item() == pytest.approx(want, rel=0.1), name
            assert abs(parameter.mean().item()) < 0.2 * want, name
    again = model_of(hidden_size=256, num_layers=8, bias=True, norm="layernorm", init_std=0.05, position="learned")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    torch.manual_seed(1)
    model.reset_parameters()
    assert not torch.equal(model.embedding.weight, again.embedding.weight)


def test_a_model_on_the_meta_device_is_filled_by_to_empty_and_reset():
    with torch.device("meta"):
        model = Transformer(config_of())
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.reset_parameters()
    assert torch.equal(model(*batch()), model_of()(*batch()))


def test_rotary_tables_are_fp32_on_the_meta_device_too():
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            tables = RotaryTable(8, 4, 1e4)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {tables.cos.dtype, tables.sin.dtype} == {torch.float32}


@pytest.mark.parametrize("changes", VARIANTS)
def test_no_position_sees_a_later_one(changes):
    model, (tokens, _) = model_of(**changes), batch()
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % VOCAB
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7:], after[:, 7:])


@pytest.mark.parametrize("position", ["rotary", "learned"])
def test_the_order_of_earlier_tokens_matters(position):
    # Two layers: with one, attention without positions could not tell orders apart and would still pass.
    model, (tokens, _) = model_of(position=position, init_std=0.2), batch()
    swapped = tokens[:, [1, 0, *range(2, SEQ_LEN)]]
    assert not torch.allclose(model(tokens)[:, -1], model(swapped)[:, -1])


def test_rotary_attention_depends_on_distance_and_not_on_place():
    model = model_of(num_layers=1, init_std=0.2, seq_len=40)
    assert model.rotary is not None
    x = torch.randn(1, 8, 32)
    cos, sin, _ = model.rotary(40)
    block = model.blocks[0]
    rows = (RotaryTables(cos[start : start + 8], sin[start : start + 8]) for start in (0, 32))
    here, there = (block(x, tables, None, None) for tables in rows)
    torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-5)


def test_grouped_queries_equal_full_heads_with_repeated_keys_and_values():
    grouped, full = model_of(num_kv_heads=2), model_of()
    weights = grouped.state_dict()
    for name, weight in weights.items():
        if name.endswith(("key.weight", "value.weight")):
            weights[name] = weight.unflatten(0, (2, 8)).repeat_interleave(2, 0).flatten(0, 1)
    full.load_state_dict(weights)
    torch.testing.assert_close(grouped(*batch()), full(*batch()))


def test_a_tied_head_is_the_embeddings_parameter_and_adds_both_gradients():
    tied, untied = model_of(), model_of(tie_embeddings=False)
    assert tied.head.weight is tied.embedding.weight
    assert [name for name, _ in tied.named_parameters() if "head" in name] == []
    untied.load_state_dict(tied.state_dict())
    for model in (tied, untied):
        model(*batch()).backward()
    assert tied.embedding.weight.grad is not None
    assert untied.embedding.weight.grad is not None
    both = untied.embedding.weight.grad + untied.head.weight.grad
    torch.testing.assert_close(tied.embedding.weight.grad, both)


def test_new_storage_for_a_parameter_is_used_by_the_next_forward():
    model = model_of()
    before = model(*batch())
    for parameter in model.parameters():
        flat = torch.zeros(parameter.numel() + 64)
        parameter.data = flat[64:].view(parameter.shape)
    assert model(*batch()).item() == pytest.approx(math.log(VOCAB))
    assert before.item() != pytest.approx(math.log(VOCAB), abs=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dropout_zeroes_its_share_keeps_the_mean_and_rests_outside_training(dtype):
    torch.manual_seed(0)
    x = torch.full((1000, 100), 3.0, dtype=dtype)
    dropped = Ops().dropout(x, 0.25)
    assert (dropped == 0).double().mean() == pytest.approx(0.25, abs=5 * (0.25 * 0.75 / 1e5) ** 0.5)
    assert dropped[dropped != 0].unique().tolist() == [4.0]  # exactly 3 / 0.75, rounded once
    model = model_of(dtype, dropout=0.5)
    tokens = torch.zeros(1, 5, dtype=torch.int64)
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_rotary_tables_stay_fp32_whatever_the_model_is_cast_to():
    model, fresh = model_of(rope_theta=50.0), model_of(rope_theta=50.0)
    model.half().bfloat16().double()
    assert model.rotary is not None
    assert fresh.rotary is not None
    assert model.rotary.cos.dtype == model.rotary.sin.dtype == torch.float32
    assert model.rotary.cos[5].tolist() == pytest.approx([math.cos(5 * 50 ** (-i / 8)) for i in (0, 2, 4, 6)])
    assert model.rotary.sin[5].tolist() == pytest.approx([math.sin(5 * 50 ** (-i / 8)) for i in (0, 2, 4, 6)])
    assert torch.equal(model.rotary.cos, fresh.rotary.cos)
    assert torch.equal(model.rotary.sin, fresh.rotary.sin)
    assert not [name for name in model.state_dict() if "rotary" in name]


def test_blocks_are_the_units_and_can_be_recomputed():
    model, (tokens, targets) = model_of(torch.float16, FP16_WIDE), batch()
    assert all(isinstance(block, Block) for block in model.blocks)
    assert len(model.blocks) == 2
    model(tokens, targets).mul(1024).backward()
    plain = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    for block in model.blocks:
        block.forward = functools.partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False)
    model(tokens, targets).mul(1024).backward()
    assert all(torch.equal(a, b.grad) for a, b in zip(plain, model.parameters(), strict=True))


@pytest.mark.uncounted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_one_compiled_graph_serves_all_blocks_and_one_the_loss(monkeypatch, dtype):
    graphs = []

    def collect(graph, inputs, **_):
        graphs.append(graph)
        return graph.forward

    # Traced as for Inductor, but run as it is: no C++ compiler needed.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=collect))
    torch._dynamo.reset()
    eager, compiled = model_of(dtype, FP16_WIDE, num_layers=3), model_of(dtype, FP16_WIDE, num_layers=3, compile=True)
    losses = [model(*batch()) for model in (eager, compiled, compiled)]
    assert len(graphs) == 2
    assert losses[1].item() == losses[2].item() == pytest.approx(losses[0].item(), abs=1e-6)
    for loss in losses[:2]:
        loss.backward()
    for one, other in zip(eager.parameters(), compiled.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        # The compiled loss rounds its gradient from another FP32 value: now and then to the neighbour.
        assert (other.grad - one.grad).norm() <= 16 * UNIT[dtype] * one.grad.norm()
    torch._dynamo.reset()


def test_a_sequence_longer_than_the_model_is_refused_with_the_way_out():
    tokens, _ = batch(SEQ_LEN + 1)
    with pytest.raises(ValueError, match=r"13 positions, but model.seq_len is 12: pass at most tokens\[:, -12:\]"):
        model_of()(tokens)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 30}, "hidden_size: got 30, must divide by num_heads 4; write hidden_size = 32"),
        ({"hidden_size": 20}, "head size of 5, but rotary positions turn pairs and need an even one; write position ="),
        ({"num_kv_heads": 3}, "num_kv_heads: got 3, must divide num_heads 4; write num_kv_heads = 2"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        model_of(**changes)
