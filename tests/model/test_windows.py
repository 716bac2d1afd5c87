"""Windows, capped scores, capped logits and the z-loss are their equations, with gradients, in packed documents, in
generation and with a GPU's kernels.
"""

import math
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from megamix.config import ModelConfig
from megamix.data.loader import IGNORE
from megamix.model import decoder
from megamix.model.context import Documents
from megamix.model.ops import AttentionRule, Ops
from megamix.model.transformer import Transformer
from tests.model.flash import stand_in
from tests.model.rounding import U32

T = 24
SIZES = {"vocab_size": 32, "seq_len": T, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
LENGTHS = (3, 9, 12)


def _attention(query, key, value, seen, cap):
    """Return attention by its definition."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    scores = cap * (scores / cap).tanh() if cap else scores
    return scores.masked_fill(~seen, -math.inf).softmax(-1) @ value


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rule", [AttentionRule(5), AttentionRule(1), AttentionRule(0, 2.0), AttentionRule(7, 2.0)])
def test_attention_is_its_equation_with_its_gradients(rule, packed):
    torch.manual_seed(1)
    *leaves, upstream = (torch.randn(1, heads, T, 8, dtype=torch.float64).requires_grad_() for heads in (4, 2, 2, 4))
    lengths = LENGTHS if packed else (T,)
    numbers, place = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)), torch.arange(T)
    behind = place[:, None] - place
    mask = (numbers[:, None] == numbers) & (behind >= 0)
    seen = mask & (behind < (rule.window or T))
    for given in (Documents(lengths=lengths) if packed else None, Documents(mask=mask)):
        outs = [Ops().attention(*leaves, given, rule), _attention(*leaves, seen, rule.softcap)]
        grads = [torch.autograd.grad(out, leaves, upstream) for out in outs]
        for got, want in zip((outs[0], *grads[0]), (outs[1], *grads[1]), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("more", [{"window": {"sizes": [5, 0]}}, {"window": {"sizes": [5]}, "attention_softcap": 2.0}])
def test_a_document_is_alone_in_a_packed_sequence_and_in_generation(more):
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**SIZES, **more))
    tokens = torch.randint(32, (1, T))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    with torch.no_grad():
        alone = model(tokens[:, 12:])
        packed = model(tokens, positions=positions)[:, 12:]
        cache = model.new_cache(12)
        steps = [model(tokens[:, 12:18], cache=cache), *(model(tokens[:, [at]], cache=cache) for at in range(18, T))]
        # FP32 sums of at most 128 terms, in another order: a machine's kernels depend on the shape.
        for got, want in ((packed, alone), (torch.cat(steps, 1), alone[:, 5:])):
            torch.testing.assert_close(got, want, rtol=128 * U32, atol=128 * U32)


def test_a_gpu_s_kernels_get_the_window():
    """On a GPU in half, whole sequences with windows are borders, too."""
    torch.manual_seed(0)
    model, whole = (Transformer(ModelConfig(**SIZES, window=window)).bfloat16() for window in ({"sizes": [5, 0]}, None))
    whole.load_state_dict(model.state_dict())
    tokens = torch.randint(32, (2, T))
    with torch.no_grad():
        want, other = model(tokens), whole(tokens)
        with stand_in() as calls, mock.patch.object(decoder, "takes_borders", lambda *_: True):
            got = model(tokens)
    assert calls["forward"] == 2
    # Two layers round eight results each to BF16, of logits below 1.
    bound = 16 * 2**-9 * want.abs().max()
    assert (got - want).abs().max() <= bound < (other - want).abs().max()


@pytest.mark.parametrize(("cap", "z_loss"), [(2.0, 0.0), (None, 0.05), (2.0, 0.05)])
def test_the_loss_is_its_equation_with_its_gradients(cap, z_loss):
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**SIZES, tie_embeddings=False, logit_softcap=cap, z_loss=z_loss, init_std=0.5))
    tokens, targets = torch.randint(32, (2, 2, T))
    targets[0, :5] = IGNORE
    logits = model(tokens).flatten(0, 1)
    assert cap is None or cap / 2 < logits.abs().max() < cap
    shares = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE, reduction="sum")
    squares = logits.logsumexp(-1)[targets.flatten() != IGNORE].square().sum()
    loss = model(tokens, targets)
    found = [
        [each, *torch.autograd.grad(each, [*model.parameters()])]
        for each in (loss, (shares + z_loss * squares) / targets.numel())
    ]
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * want.abs().max().item())
    assert not z_loss or model.eval()(tokens, targets) < loss


@torch._dynamo.config.patch(recompile_limit=8)
def test_each_kind_of_layer_has_room_for_its_compiled_graphs():
    """Dynamo counts the graphs of all blocks together, and leaves those beyond its limit uncompiled."""
    Transformer(ModelConfig(**SIZES, compile=True))
    assert torch._dynamo.config.recompile_limit == 8
    Transformer(ModelConfig(**SIZES | {"num_layers": 4}, window={"sizes": [5, 0, 7]}, compile=True))
    assert torch._dynamo.config.recompile_limit == 3 * 8


@pytest.mark.parametrize("activation", ["geglu", "relu2"])
def test_a_gate_and_the_activations_are_their_equations(activation):
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**SIZES, attention_gate=True, activation=activation, init_std=0.3)).double()
    block = model.blocks[0]
    x, rotary = torch.randn(1, T, 32, dtype=torch.float64), model.rotary(T)
    part = block.feed_forward
    inner = part.up(x).relu().square() if part.gate is None else F.gelu(part.gate(x), approximate="tanh") * part.up(x)
    torch.testing.assert_close(part(x), part.down(inner), rtol=1e-12, atol=1e-12)
    attention = block.attention
    seen = []
    attention.out.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    attention(x, rotary, None, None)
    gate, attention.gate = attention.gate, None
    attention(x, rotary, None, None)
    torch.testing.assert_close(seen[0], seen[1] / (1 + (-gate(x)).exp()), rtol=1e-12, atol=1e-12)
