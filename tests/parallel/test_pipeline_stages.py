"""No other split of the layers has a cheaper most expensive stage; a rank's part has the whole model's names and
initial weights.
"""

import itertools

import pytest
import torch

from megamix.comm.topology import Topology
from megamix.config import ModelConfig, ParallelismConfig
from megamix.mixed_precision.flat_layout import ParamSpec
from megamix.model.family import flops_per_token, parameter_count
from megamix.model.transformer import Transformer
from megamix.parallel.build import build_model, drawn
from megamix.parallel.stages import Stage, describe_stages, plan_stages

MODELS = {
    "gpt": {"norm": "layernorm", "rope": False, "activation": "gelu", "bias": True},
    "llama": {"num_kv_heads": 2, "qk_norm": "head"},
}


def _config(model, tied, num_layers=7, vocab_size=50):
    sizes = {"vocab_size": vocab_size, "seq_len": 8, "hidden_size": 16, "num_heads": 4, "num_layers": num_layers}
    return ModelConfig(**sizes, tie_embeddings=tied, **MODELS[model])


@pytest.mark.parametrize(
    ("num_layers", "vocab_size", "num_stages"), [*itertools.product((4, 7, 9), (20, 500), (1, 2, 4))]
)
def test_no_split_has_a_cheaper_dearest_stage(num_layers, vocab_size, num_stages):
    config = _config("llama", False, num_layers, vocab_size)
    plans = plan_stages(config, num_stages, 1)
    assert [layer for plan in plans for layer in plan.layers] == [*range(num_layers)]
    assert sum(plan.flops for plan in plans) == flops_per_token(config)
    assert sum(plan.params for plan in plans) == parameter_count(config)
    head = 6 * vocab_size * 16
    block = (flops_per_token(config) - head) // num_layers
    splits = (
        counts for counts in itertools.product(range(1, num_layers + 1), repeat=num_stages) if sum(counts) == num_layers
    )
    cheapest = min(max([*(n * block for n in counts[:-1]), counts[-1] * block + head]) for counts in splits)
    assert max(plan.flops for plan in plans) == cheapest


def test_a_large_head_leaves_the_last_stage_fewer_blocks_and_the_log_says_so():
    plans = plan_stages(_config("llama", True, 7, vocab_size=500), 4, 1)
    assert [len(plan.layers) for plan in plans] == [2, 2, 2, 1]
    assert "stage 3 on pp rank 3: blocks 6..6, 33% of the operations" in describe_stages(plans)


@pytest.mark.parametrize(("v_shaped", "ranks"), [(False, [0, 1, 2, 0, 1, 2]), (True, [0, 1, 2, 2, 1, 0])])
def test_stages_are_dealt_in_turn_or_on_a_v(v_shaped, ranks):
    assert [plan.rank for plan in plan_stages(_config("gpt", True), 3, 2, v_shaped=v_shaped)] == ranks


def test_more_stages_than_blocks_are_refused():
    with pytest.raises(
        ValueError, match="8 pipeline stages need a block each, but model.num_layers is 7; take at most"
    ):
        plan_stages(_config("gpt", True), 4, 2)


@pytest.mark.parametrize(("model", "tied", "v_shaped"), [*itertools.product(MODELS, (True, False), (True, False))])
def test_parts_have_the_whole_model_s_names_and_weights_and_compute_its_loss(model, tied, v_shaped):
    config = _config(model, tied)
    torch.manual_seed(3)
    whole = Transformer(config)
    expected = dict(whole.named_parameters())
    plans = plan_stages(config, 3, 2, v_shaped=v_shaped)
    parts, seen = [], set()
    for rank in range(3):
        here = Topology.place(rank, pp=3)
        part, placements = build_model(config, ParallelismConfig(), here, torch.device("cpu"), plans)
        parts.append(part)
        own = dict(part.named_parameters())
        for name, param in own.items():
            values = torch.empty(param.numel())
            drawn(part, seed=3)(ParamSpec.whole(name, tuple(param.shape), 0), 0, values)
            param.data = values.view(param.shape)
            assert torch.equal(param, expected[name])
        across = tied and not v_shaped and rank != 1
        assert placements["embedding.weight"].owners.size == (2 if across else 1)
        seen |= own.keys()
    assert seen == expected.keys()
    tokens = torch.randint(50, (2, 8))
    x = tokens
    for plan in plans:
        x = Stage(parts[plan.rank], plan.layers)(x, tokens)
    assert torch.equal(x, whole(tokens, tokens))
