"""Every variant of the model computes its equations, is causal, has the right initial values, and has one compiled
graph for all blocks.
"""

import functools
import math
from typing import get_args

import pytest
import torch
import torch.nn.functional as F

from megamix.config import ModelConfig
from megamix.model.layers import NORMS, RotaryTable
from megamix.model.ops import Ops
from megamix.model.transformer import Transformer
from tests.model.rounding import FP16_WIDE, UNIT

VOCAB, SEQ_LEN = 97, 12
SIZES = {"vocab_size": VOCAB, "seq_len": SEQ_LEN, "hidden_size": 32, "num_layers": 2, "num_heads": 4}


def model_of(dtype=torch.float32, ops=None, **changes):
    torch.manual_seed(0)
    return cast(Transformer(ModelConfig(**SIZES | changes), ops), dtype)


def cast(model, dtype):
    """Cast a model as the engine does: other storage for each parameter's data, buffers unchanged."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def batch():
    tokens = torch.randint(VOCAB, (3, SEQ_LEN + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


VARIANTS = [
    {},
    {"norm": "layernorm", "rope": False, "activation": "gelu", "bias": True, "tie_embeddings": False},
    {"num_kv_heads": 2, "norm": "layernorm", "bias": False},
    {"num_kv_heads": 1, "bias": True, "ffn_hidden_size": 40},
    {"experts": {"num_experts": 4, "top_k": 4, "ffn_hidden_size": 24}},  # all, for in half a token may choose others
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("changes", VARIANTS)
def test_every_variant_gives_logits_in_its_dtype_an_fp32_loss_and_all_gradients_of_fp32(changes, dtype):
    model, (tokens, targets) = model_of(dtype, FP16_WIDE, **changes), batch()
    full = cast(cast(model_of(**changes), dtype), torch.float32)  # the same weights, to the bit
    logits = model(tokens)
    assert (logits.dtype, logits.shape) == (dtype, (3, SEQ_LEN, VOCAB))
    loss, exact = model(tokens, targets), full(tokens, targets)
    assert (loss.dtype, loss.shape) == (torch.float32, ())
    assert loss.item() == pytest.approx(exact.item(), abs=4 * UNIT[dtype])
    # The loss does not round its logits to half; these are.
    want = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()).item()
    assert loss.item() == pytest.approx(want, rel=1e-6, abs=2 * UNIT[dtype] * logits.abs().max().item())
    for each in (loss, exact):
        (each * 1024).backward()
    for (name, one), other in zip(model.named_parameters(), full.parameters(), strict=True):
        assert one.grad.dtype == dtype, name
        if name.endswith("key.bias"):
            continue  # shifts all scores of a row alike: without rotary its gradient is 0, and what is seen is rounding
        assert one.grad.any(), name
        # About 30 roundings lie between loss and embedding, at random.
        assert (one.grad.float() - other.grad).norm() <= 30 * UNIT[dtype] * other.grad.norm(), name


def test_the_loss_of_a_new_model_is_that_of_a_uniform_guess():
    assert model_of()(*batch()).item() == pytest.approx(math.log(VOCAB), abs=0.05)


def test_initial_values_follow_the_seed_the_config_and_the_depth():
    changes = {"num_layers": 8, "bias": True, "norm": "layernorm", "init_std": 0.05, "rope": False}
    model, again = (model_of(hidden_size=256, **changes) for _ in range(2))
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
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    torch.manual_seed(1)
    model.reset_parameters()
    assert not torch.equal(model.embedding.weight, again.embedding.weight)


def test_a_model_on_the_meta_device_is_filled_by_to_empty_and_reset():
    with torch.device("meta"):
        model = Transformer(ModelConfig(**SIZES))
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.reset_parameters()
    assert torch.equal(model(*batch()), model_of()(*batch()))


@pytest.mark.parametrize("changes", VARIANTS)
def test_no_position_sees_a_later_one(changes):
    model, (tokens, _) = model_of(**changes), batch()
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % VOCAB
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7:], after[:, 7:])


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
    model, fresh = model_of(rope={"theta": 50.0}), RotaryTable(SEQ_LEN, 8, 50.0)
    model.half().bfloat16().double()
    angles = [5 * 50 ** (-i / 8) for i in (0, 2, 4, 6)]
    for name, function in (("cos", math.cos), ("sin", math.sin)):
        table = getattr(model.rotary, name)
        assert table.dtype == torch.float32
        assert table[5].tolist() == pytest.approx([*map(function, angles)])
        assert torch.equal(table, getattr(fresh, name))
    assert not [name for name in model.state_dict() if "rotary" in name]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
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
        # The compiled loss rounds its gradient from another FP32 value: now and then to the neighbour.
        assert (other.grad - one.grad).norm() <= 16 * UNIT[dtype] * one.grad.norm()
    torch._dynamo.reset()


def test_a_sequence_longer_than_the_model_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"13 positions, but model.seq_len is 12: pass at most tokens\[:, -12:\]"):
        model_of()(torch.zeros(1, SEQ_LEN + 1, dtype=torch.int64))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 30}, "hidden_size: got 30, must divide by num_heads 4; write hidden_size = 32"),
        ({"hidden_size": 20}, "head size of 5, but rotary positions turn pairs and need an even one; write rope ="),
        ({"num_kv_heads": 3}, "num_kv_heads: got 3, must divide num_heads 4; write num_kv_heads = 2"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        model_of(**changes)


def test_each_norm_that_a_job_may_name_is_there():
    assert {*get_args(ModelConfig.model_fields["norm"].annotation)} == NORMS.keys()
