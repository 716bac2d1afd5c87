"""Experts compute what transformers' mixtures compute, and what each token's experts compute alone; their counts, their
balance, their recomputed steps and a GPU's padded products are exact. What does not go together is refused in one line.
"""

from functools import partial
from unittest import mock

import pytest
import torch
from transformers import DeepseekV3Config, MixtralConfig, OlmoeConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from megamix.config import ModelConfig
from megamix.model.experts import Experts, towards_mean
from megamix.model.family import flops_per_token, parameter_count
from megamix.model.ops import Groups, Ops, padded_places
from megamix.model.sizes import fewest_params
from megamix.model.transformer import Transformer
from tests.config.test_errors import changed, problems_of

EXPERTS = {"num_experts": 8, "top_k": 3, "ffn_hidden_size": 24}
GROUPS = {"score": "sigmoid", "scale": 2.5, "num_groups": 4, "top_groups": 2, "shared_ffn_hidden_size": 48}
SIZES = {
    "vocab_size": 61, "seq_len": 24, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "norm_eps": 1e-6,
}  # fmt: skip
THEIRS = {
    "hidden_size": 32, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "intermediate_size": 24,
    "num_attention_heads": 4, "num_local_experts": 8,
}  # fmt: skip
FAMILIES = {  # our keys, and transformers' block
    "qwen3_moe": ({}, Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**THEIRS, norm_topk_prob=True))),
    "qwen3_moe, not normalised": (
        {"normalize": False},
        Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**THEIRS, norm_topk_prob=False)),
    ),
    "mixtral": ({}, MixtralSparseMoeBlock(MixtralConfig(**THEIRS))),
    "olmoe": ({"normalize": False}, OlmoeSparseMoeBlock(OlmoeConfig(**{**THEIRS, "num_experts": 8}))),
    "deepseek_v3": (
        GROUPS,
        DeepseekV3MoE(DeepseekV3Config(**THEIRS, n_group=4, topk_group=2, n_shared_experts=2, n_routed_experts=8)),
    ),
}


def section(experts=None, **changes):
    return ModelConfig(**(SIZES | {"experts": EXPERTS | (experts or {})} | changes))


def block_of(config, ops=None):
    assert config.experts is not None
    block = Experts(config, config.experts, ops or Ops())
    for name, parameter in block.named_parameters():
        torch.nn.init.normal_(parameter, 0.0, 1.0 if "router" in name else 0.3)
    return block


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_weights_give_the_results_and_gradients_of_transformers(family):
    torch.manual_seed(3)
    changes, theirs = FAMILIES[family]
    ours = block_of(section(changes))
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    given = dict(theirs.named_parameters())
    gate, up = given["experts.gate_up_proj"].detach().chunk(2, 1)
    with torch.no_grad():
        ours.router.weight.copy_(given["gate.weight"])
        ours.gate.weight.copy_(gate)
        ours.up.weight.copy_(up)
        ours.down.weight.copy_(given["experts.down_proj"])
        if ours.shared is not None:
            for name in ("gate", "up", "down"):
                getattr(ours.shared, name).weight.copy_(given[f"shared_experts.{name}_proj.weight"])
            bias = torch.randn(8) * 0.1
            theirs.gate.e_score_correction_bias.copy_(bias)
            ours.router.balance.value.copy_(bias)
    x = torch.randn(2, 24, 32)
    results, of_inputs = [], []
    for block in (ours, theirs):
        given_x = x.clone().requires_grad_()
        out = block(given_x)
        out = out[0] if isinstance(out, tuple) else out
        out.view(2, 24, 32).square().sum().backward()
        results.append(out.detach().view(2, 24, 32))
        of_inputs.append(given_x.grad)
    for one, other in (results, of_inputs, (ours.router.weight.grad, given["gate.weight"].grad)):
        assert float((one - other).abs().max()) <= 5e-6 * float(other.abs().max())
    both = torch.cat((ours.gate.weight.grad, ours.up.weight.grad), 1), given["experts.gate_up_proj"].grad
    assert float((both[0] - both[1]).abs().max()) <= 5e-6 * float(both[1].abs().max())


def alone(block, x):
    """Return the output of each token from its experts, one token after the other, in FP64."""
    top_k, out = block.router.experts.top_k, torch.zeros_like(x)
    for number, token in enumerate(x):
        scores = (block.router.weight @ token).softmax(0)
        chosen = scores.topk(top_k).indices
        for expert in chosen:
            inner = torch.nn.functional.silu(block.gate.weight[expert] @ token) * (block.up.weight[expert] @ token)
            out[number] += scores[expert] / scores[chosen].sum() * (block.down.weight[expert] @ inner)
    return out


def test_each_token_gets_its_own_experts_and_no_other_token_matters():
    torch.manual_seed(4)
    block = block_of(section(), Ops(wide=False)).double()
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    assert torch.allclose(block(x).flatten(0, 1), alone(block, x.flatten(0, 1)), rtol=1e-12, atol=1e-12)
    # All tokens go to the same experts, and five experts get none.
    same = x[:1, :1].expand(2, 5, 32)
    assert torch.allclose(block(same).flatten(0, 1), alone(block, same.flatten(0, 1)), rtol=1e-12, atol=1e-12)
    assert sorted(block.router(same).counts.tolist()) == [0] * 5 + [10] * 3


def test_padded_products_are_those_of_each_group():
    torch.manual_seed(8)
    counts = torch.tensor([0, 3, 2, 0, 3, 1])
    x, grad = torch.randn(9, 5, dtype=torch.float64, requires_grad=True), torch.randn(9, 4, dtype=torch.float64)
    weight = torch.randn(6, 4, 5, dtype=torch.float64, requires_grad=True)
    places = padded_places(counts, 3, 9)
    assert places.tolist() == [3, 4, 5, 6, 7, 12, 13, 14, 15]
    ways = Groups(None, counts.tolist(), places), Groups(None, counts.tolist(), None)
    padded, looped = (Ops(wide=False).grouped_linear(x, weight, groups) for groups in ways)
    assert torch.allclose(padded, looped, rtol=1e-12, atol=1e-12)
    slopes = [torch.autograd.grad(out, (x, weight), grad) for out in (padded, looped)]
    for of_padded, of_looped in zip(*slopes, strict=True):
        assert torch.allclose(of_padded, of_looped, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("counts", "padded"), [([2, 2, 1], True), ([0, 4, 2], True), ([0, 5, 1], False)])
def test_groups_are_padded_on_a_gpu_while_that_at_most_doubles_the_rows(counts, padded):
    rows = torch.empty(sum(counts), 4, dtype=torch.float16, device="meta")
    with mock.patch("megamix.model.ops.host_counts", lambda counts, total: counts.tolist()):
        groups = Ops(wide=False).groups(rows, torch.tensor(counts), 8, 8)
    assert (groups.places is not None) == padded
    assert groups.counts == counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_that_of_one_operation_after_the_other(dtype):
    torch.manual_seed(5)
    config = section(GROUPS | {"z_loss": 0.01, "balance_loss": 0.1})
    half, exact = Transformer(config).to(dtype), Transformer(config, Ops(wide=False)).double()
    for ours, wide in zip(half.parameters(), exact.parameters(), strict=True):
        wide.data = ours.data.double()
    tokens = torch.randint(61, (2, 25))
    losses = [model(tokens[:, :-1], tokens[:, 1:]) for model in (half, exact)]
    for loss in losses:
        loss.backward()
    unit = torch.finfo(dtype).eps
    assert abs(losses[0].item() - losses[1].item()) < 8 * unit
    for (name, ours), wide in zip(half.named_parameters(), exact.parameters(), strict=True):
        off = float((ours.grad.double() - wide.grad).norm() / wide.grad.norm())
        assert off < 32 * unit, name


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_steps_are_the_same_bit_for_bit(recompute):
    steps = []
    for how in ("none", recompute):
        torch.manual_seed(6)
        model = Transformer(section(GROUPS | {"z_loss": 0.01, "balance_loss": 0.1}, recompute=how)).half()
        tokens = torch.randint(61, (2, 25), generator=torch.Generator().manual_seed(1))
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        steps.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*steps, strict=True))


def test_the_loss_of_unequal_loads_is_that_of_each_sequence():
    torch.manual_seed(7)
    block = block_of(section({"balance_loss": 0.5, "z_loss": 0.25, "normalize": False}), Ops(wide=False)).double()
    x = torch.randn(3, 24, 32, dtype=torch.float64)
    want = 0.0
    for sequence in x:  # DeepSeek-V3, equations 17 to 20, and ST-MoE, equation 5
        logits = sequence @ block.router.weight.T
        scores = logits.softmax(-1)
        chosen = scores.topk(3).indices
        frequencies = torch.stack([(chosen == expert).sum() for expert in range(8)]) * 8 / (3 * 24)
        want += (0.5 * (frequencies * scores.mean(0)).sum() + 0.25 * logits.logsumexp(-1).square().mean()) / 3
    loss = block.router(x).loss
    assert torch.allclose(loss, want, rtol=1e-12)
    (of_loss,) = torch.autograd.grad(loss, block.router.weight, retain_graph=True)
    (of_mean,) = torch.autograd.grad(block(x).sum() * 0, block.router.weight)  # hung on the hidden states
    assert torch.allclose(of_mean, of_loss, rtol=1e-12)
    block.eval()
    assert block.router(x).loss is None


def test_biases_move_towards_equal_counts_and_their_mean_stays():
    bias, counts = torch.tensor([0.5, 0.0, -0.25, 0.0]), torch.tensor([9.0, 1.0, 1.0, 5.0])
    moved = towards_mean(0.5, bias, counts)
    step = torch.tensor([-0.5, 0.5, 0.5, -0.5])
    assert moved.tolist() == (bias + step - step.mean()).tolist()
    assert torch.equal(towards_mean(0.5, bias, torch.full((4,), 7.0)), bias)


def test_costs_count_the_experts_that_a_token_passes():
    config = section({"dense_layers": 1, "shared_ffn_hidden_size": 16})
    model = Transformer(config)
    assert parameter_count(config) == sum(parameter.numel() for parameter in model.parameters())
    assert fewest_params(config) == sum(p.numel() for p in model.parameters() if p.dim() > 1)
    dense = ModelConfig(**(SIZES | {"num_layers": 1}))
    more = flops_per_token(config) - flops_per_token(dense)
    attention = 6 * 4 * 32 * 32 + 12 * 24 * 32
    assert more == attention + 6 * 32 * (3 * (3 * 24 + 16) + 8)


@pytest.mark.uncounted
def test_compiled_blocks_without_and_with_experts_are_repeated_in_backward(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    changes = {"num_layers": 3, "recompute": "full"}
    models = [Transformer(section({"dense_layers": 1}, **changes, compile=compiles)) for compiles in (False, True)]
    models[1].load_state_dict(models[0].state_dict())
    tokens = torch.randint(61, (2, 24), generator=torch.Generator().manual_seed(1))
    for model in models:
        for _ in range(2):
            model(tokens, tokens.roll(1, 1)).backward()
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert (other.grad - one.grad).norm() <= 1e-5 * one.grad.norm()
    torch._dynamo.reset()


def test_text_with_a_cache_is_that_without():
    torch.manual_seed(8)
    model = Transformer(section(GROUPS)).eval()
    tokens = torch.randint(61, (1, 12))
    cache = model.new_cache(12)
    with torch.no_grad():
        whole = model(tokens)[:, -1]
        for token in tokens.T:
            last = model(token.unsqueeze(1), cache=cache)[:, -1]
    assert torch.allclose(last, whole, atol=1e-6)


@pytest.mark.parametrize(
    ("experts", "model", "said"),
    [
        ({"top_k": 9}, {}, "model.experts.top_k: got 9, but a token can choose among 8 experts; write top_k = 8"),
        ({"num_groups": 3}, {}, "model.experts.num_groups: got 3, must divide num_experts 8; write num_groups = 2"),
        (
            {"num_groups": 2, "top_groups": 3},
            {},
            "model.experts.top_groups: got 3, must be at most num_groups; write top_groups = 2",
        ),
        ({"num_groups": 4}, {}, "model.experts.top_k: got 3, but a token can choose among 2 experts; write top_k = 2"),
        (
            {"dense_layers": 2},
            {},
            "model.experts.dense_layers: got 2, but num_layers is 2, so no layer would have experts; write "
            "dense_layers = 1 or leave [model.experts] out",
        ),
        (
            {},
            {"mlp_bias": True},
            "model.mlp_bias: got true, but experts have no biases; write mlp_bias = false or leave [model.experts] out",
        ),
    ],
)
def test_what_does_not_go_together_is_told_in_a_line(experts, model, said):
    assert problems_of(changed(model={"experts": EXPERTS | experts, "num_layers": 2} | model)) == (said,)
