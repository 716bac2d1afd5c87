"""Experts compute what transformers' mixtures compute, and what each token's experts compute alone; their counts, their
balance, their recomputed steps and a GPU's padded products are exact. What does not go together is refused in one line.
"""

from functools import partial
from unittest import mock

import pytest
import torch
from transformers import DeepseekV3Config, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from megamix.config import ModelConfig
from megamix.model.experts import Experts, towards_mean
from megamix.model.family import flops_per_token, parameter_count
from megamix.model.ops import Groups, Ops, padded_places
from megamix.model.sizes import fewest_params
from megamix.model.transformer import Transformer
from tests.config.test_errors import changed, problems_of

EXPERTS = {"num_experts": 8, "top_k": 3, "ffn_hidden_size": 24}
GROUPS = {"score": "sigmoid", "scale": 2.5, "groups": {"count": 4, "top": 2}, "shared_ffn_hidden_size": 48}
SIZES = {
    "vocab_size": 61, "seq_len": 24, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "norm_eps": 1e-6,
}  # fmt: skip
THEIRS = {
    "hidden_size": 32, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "num_attention_heads": 4,
}  # fmt: skip
FAMILIES = {  # our keys, and transformers' block
    "qwen3_moe": ({}, Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**THEIRS, num_experts=8, norm_topk_prob=True))),
    "deepseek_v3": (
        GROUPS,
        DeepseekV3MoE(DeepseekV3Config(**THEIRS, n_group=4, topk_group=2, n_shared_experts=2, n_routed_experts=8)),
    ),
}


def section(experts=None, **changes):
    return ModelConfig(**(SIZES | {"experts": EXPERTS | (experts or {})} | changes))


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_weights_give_the_results_and_gradients_of_transformers(family):
    torch.manual_seed(3)
    changes, theirs = FAMILIES[family]
    config = section(changes)
    ours = Experts(config, config.experts, Ops())
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    given = dict(theirs.named_parameters())
    with torch.no_grad():
        ours.router.weight.copy_(given["gate.weight"])
        for mine, their in zip((ours.gate, ours.up), given["experts.gate_up_proj"].chunk(2, 1), strict=True):
            mine.weight.copy_(their)
        ours.down.weight.copy_(given["experts.down_proj"])
        if ours.shared is not None:
            for name in ("gate", "up", "down"):
                getattr(ours.shared, name).weight.copy_(given[f"shared_experts.{name}_proj.weight"])
            bias = torch.randn(8) * 0.1
            theirs.gate.e_score_correction_bias.copy_(bias)
            ours.router.balance.value.copy_(bias)
    tokens = torch.randn(2, 24, 32)
    # The second time all tokens go to the same experts, and five experts get none.
    for x in (tokens, tokens[:1, :1].expand(2, 24, 32)):
        found = []
        for block in (ours, theirs):
            block.zero_grad()
            given_x = x.clone().requires_grad_()
            out = block(given_x)
            out = out[0] if isinstance(out, tuple) else out
            out.view(2, 24, 32).square().sum().backward()
            found.append([out.detach().view(2, 24, 32), given_x.grad])
        found[0] += [ours.router.weight.grad, torch.cat((ours.gate.weight.grad, ours.up.weight.grad), 1)]
        found[1] += [given["gate.weight"].grad, given["experts.gate_up_proj"].grad]
        for one, other in zip(*found, strict=True):
            assert float((one - other).abs().max()) <= 5e-6 * float(other.abs().max())
    assert sorted(ours.router(x).counts.tolist()) == [0] * 5 + [48] * 3


def test_padded_products_are_those_of_each_group():
    torch.manual_seed(8)
    counts = torch.tensor([0, 3, 2, 0, 3, 1])
    x, grad = torch.randn(9, 5, dtype=torch.float64, requires_grad=True), torch.randn(9, 4, dtype=torch.float64)
    weight = torch.randn(6, 4, 5, dtype=torch.float64, requires_grad=True)
    found = []
    for places in (padded_places(counts, 3, 9), None):
        out = Ops(wide=False).grouped_linear(x, weight, Groups(None, counts.tolist(), places))
        found.append([out, *torch.autograd.grad(out, (x, weight), grad)])
    for padded, looped in zip(*found, strict=True):
        assert torch.allclose(padded, looped, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("counts", "padded"), [([2, 2, 1], True), ([0, 4, 2], True), ([0, 5, 1], False)])
def test_groups_are_padded_on_a_gpu_while_that_at_most_doubles_the_rows(counts, padded):
    rows = torch.empty(sum(counts), 4, dtype=torch.float16, device="meta")
    with mock.patch("megamix.model.ops.host_counts", lambda counts, total: counts.tolist()):
        groups = Ops(wide=False).groups(rows, torch.tensor(counts), 8, 8)
    assert (groups.places is not None) == padded
    assert groups.counts == counts


def test_the_loss_of_unequal_loads_is_that_of_each_sequence():
    torch.manual_seed(7)
    config = section({"balance_loss": 0.5, "z_loss": 0.25, "normalize": False})
    block = Experts(config, config.experts, Ops(wide=False)).double()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter)
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
    parameters = [*Transformer(config).parameters()]
    assert parameter_count(config) == sum(parameter.numel() for parameter in parameters)
    assert fewest_params(config) == sum(parameter.numel() for parameter in parameters if parameter.dim() > 1)
    dense = ModelConfig(**(SIZES | {"num_layers": 1}))
    more = flops_per_token(config) - flops_per_token(dense)
    attention = 6 * 4 * 32 * 32 + 12 * 24 * 32
    assert more == attention + 6 * 32 * (3 * (3 * 24 + 16) + 8)


def test_compiled_blocks_of_latent_attention_without_and_with_experts_are_repeated_in_backward(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    latent = {"kv_rank": 12, "query_rank": 20, "unrotated_dim": 8, "rotary_dim": 4, "value_dim": 10}
    changes = {"recompute": "full", "latent_attention": latent}
    models = [Transformer(section({"dense_layers": 1}, **changes, compile=compiles)) for compiles in (False, True)]
    models[1].load_state_dict(models[0].state_dict())
    tokens = torch.randint(61, (2, 24), generator=torch.Generator().manual_seed(1))
    for model in models:
        for _ in range(2):
            model(tokens, tokens.roll(1, 1)).backward()
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert (other.grad - one.grad).norm() <= 1e-5 * one.grad.norm()
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("experts", "said"),
    [
        ({"top_k": 9}, "top_k: got 9, but a token can choose among 8 experts; write top_k = 8"),
        ({"groups": {"count": 3}}, "groups.count: got 3, must divide num_experts 8; write count = 2"),
        ({"groups": {"count": 2, "top": 3}}, "groups.top: got 3, must be at most count 2; write top = 2"),
        ({"groups": {"count": 4}}, "top_k: got 3, but a token can choose among 2 experts; write top_k = 2"),
        ({"dense_layers": 2}, "dense_layers: got 2, but num_layers is 2, so no layer would have experts; write dense_"),
    ],
)
def test_what_does_not_go_together_is_told_in_a_line(experts, said):
    (problem,) = problems_of(changed(model={"experts": EXPERTS | experts, "num_layers": 2}))
    assert problem.startswith(f"model.experts.{said}")


def test_experts_have_no_biases():
    (problem,) = problems_of(changed(model={"experts": EXPERTS, "mlp_bias": True}))
    assert problem.startswith("model.mlp_bias: got true, but experts have no biases; write mlp_bias = false or leave")
