"""What is planned is what ranks hold: parameters, gradients, states and buckets to the byte, the peak within 5 %."""

from __future__ import annotations

import pytest
import torch

from megamix.config import Config, config_from_dict, grad_accum_steps
from megamix.live_storage import LiveStorage
from megamix.model.transformer import Transformer
from megamix.train.build import build_engine
from megamix.train.memory_plan import plan_memory

BASE = {
    "model": {"vocab_size": 512, "seq_len": 96, "hidden_size": 128, "num_layers": 3, "num_heads": 4},
    "data": {"train": "none"},
    "optimizer": {"lr": 1e-3, "compile": False},
    "precision": {"dtype": "fp16"},
    "training": {"steps": 4, "micro_batch_size": 4, "global_batch_size": 16},
    "checkpoint": {"folder": "none"},
}

SCALARS = 300  # bytes: counters and loss scale, and the tables of a rank with fewer pieces than the largest


def _config(**sections: dict) -> Config:
    return config_from_dict({name: {**BASE.get(name, {}), **sections.get(name, {})} for name in {*BASE, *sections}})


GPT = {
    "norm": "layernorm", "activation": "gelu_tanh", "position": "learned", "bias": True, "hidden_size": 64,
    "vocab_size": 2048,
}  # fmt: skip
CONFIGS = {
    "llama fp16, one rank": (1, {}),
    "gpt bf16, two ranks": (2, {"model": GPT, "precision": {"dtype": "bf16"}}),
    "llama with few kv heads, untied, fp32 sums, two ranks": (
        2,
        {
            "model": {"num_kv_heads": 2, "tie_embeddings": False, "num_layers": 6},
            "precision": {"reduce_dtype": "half_fp32_sum"},
            "parallelism": {"bucket_size": 100_000},
        },
    ),
    "wide vocabulary, fp32 gradients, four ranks": (
        4,
        {
            "model": {"vocab_size": 8192, "hidden_size": 64, "num_layers": 2, "seq_len": 32},
            "precision": {"dtype": "bf16", "grad_dtype": "fp32"},
            "training": {"micro_batch_size": 2},
        },
    ),
    "fp32, nag, four ranks": (4, {"precision": {"dtype": "fp32"}, "optimizer": {"name": "nag"}}),
}


def _measured(config: Config, dp_size: int) -> tuple[dict[str, int], dict[str, int], int]:
    """Of one rank that takes two steps: bytes by category, the most of each phase, and what lives between steps."""
    phases: dict[str, int] = {}
    with LiveStorage() as tracker:

        def ends(phase: str) -> None:
            phases[phase] = max(phases.get(phase, 0), tracker.peak_bytes)
            tracker.peak_bytes = tracker.live_bytes

        model = Transformer(config.model)
        engine = build_engine(config, model, [*model.blocks], grad_accum_steps(config, dp_size))
        ends("build")
        for _ in range(2):
            for _ in range(engine.grad_accum_steps):
                shape = (2, config.training.micro_batch_size, config.model.seq_len)
                loss = engine(*torch.zeros(shape, dtype=torch.int64).unbind())
                ends("forward")
                engine.backward(loss)
                del loss  # as in a job, where no name is given to it
                ends("backward")
            engine.step()
            ends("step")
        engine.param_gather.wait_all()
        live = tracker.live_bytes
    held = {
        "half parameters": engine.half_params.flat,
        "half gradients": engine.half_grads.flat,
        "FP32 masters": engine.master_shard.master,
        "optimizer states": [state for states in engine.master_shard.states for state in states],
        "exchange scratch": [engine.owners[0].scratch] if dp_size > 1 else [],
        "model buffers": [*model.buffers()],
    }
    return {name: sum(tensor.nbytes for tensor in tensors) for name, tensors in held.items()}, phases, live


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_planned_is_what_ranks_hold(run_ranks, name: str) -> None:
    dp_size, sections = CONFIGS[name]
    config = _config(**sections)
    plan = plan_memory(config, dp_size, "cpu")
    planned = {phase: plan.phases[phase] for phase in ("build", "forward", "backward")}
    planned["step"] = max(plan.phases["statistics"], plan.phases["update"])
    ranks = [_measured(config, 1)] if dp_size == 1 else run_ranks(_measured, dp_size, config, dp_size)
    for held, phases, live in ranks:
        assert {category: plan.held[category] for category in held} == held
        assert live == pytest.approx(plan.resident, abs=SCALARS)
        assert plan.peak == pytest.approx(max(phases.values()), abs=SCALARS)
        assert planned == pytest.approx(phases, rel=0.05)
