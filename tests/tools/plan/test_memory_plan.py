"""The planned memory equals what ranks hold, for five layouts and every `shard`: parameters, gradients, states and
buckets to the byte, each phase's peak within 5 %.
"""

from dataclasses import replace

import pytest
import torch

from megamix.builders.objects import build_training
from megamix.config import config_from_dict
from megamix.data.loader import Batch
from megamix.live_storage import LiveStorage
from megamix.model.transformer import Block, Transformer
from megamix.parallel.micro_batch_runner import MicroBatch
from megamix.parallel.pipeline_parallel import SCHEDULES
from megamix.tools.plan.memory_plan import EVALUATION, held_memory, plan_memory, plan_rank
from megamix.tools.plan.report import report_lines
from megamix.tools.verify.core.layout import parse_layout
from tests.conftest import FULL, also_wide
from tests.distributed import pipelines
from tests.storages import storage_bytes

BASE = {
    "model": {"vocab_size": 512, "seq_len": 96, "hidden_size": 128, "num_layers": 3, "num_heads": 4},
    "data": {"train": "none"},
    "optimizer": {"lr": 1e-3, "compile": False},
    "precision": {"dtype": "fp16"},
    "training": {"steps": 4, "micro_batch_size": 4, "global_batch_size": 16},
    "checkpoint": {"folder": "none"},
}

# Bytes: counters and loss scale, the tables of a rank with fewer pieces than the largest, and the table of the last
# agreement (192 bytes on two ranks), which Gloo's thread lets go of only some time after the ranks went on.
SCALARS = 500


def _config(**sections):
    return config_from_dict(BASE, sections)


def _pipeline(pp_schedule, pp_size=2):
    return {"pp_size": pp_size, "pp_schedule": pp_schedule}


GPT = {
    "norm": "layernorm", "activation": "gelu_tanh", "position": "learned", "bias": True, "hidden_size": 64,
    "vocab_size": 2048,
}  # fmt: skip
LARGE = {"tie_embeddings": False, "num_layers": 4, "vocab_size": 2048}
CONFIGS = {  # the layout, and the settings that differ from BASE
    "gpt bf16, two ranks": ("dp2", {"model": GPT, "precision": {"dtype": "bf16"}}),
    "gpt bf16, positions divided": ("cp2", {"model": GPT, "precision": {"dtype": "bf16"}}),
    "fp16, heads divided in attention": ("cp2", {"parallelism": {"cp_size": 2, "cp_method": "heads"}}),
    "bf16, heads divided in attention, recompute": (
        "cp2",
        {
            "model": GPT | {"recompute": "full"},
            "precision": {"dtype": "bf16"},
            "parallelism": {"cp_size": 2, "cp_method": "heads"},
        },
    ),
    "windows in some layers, bf16, positions divided": (
        "cp2",
        {"model": {"windows": [16, 0], "num_layers": 4}, "precision": {"dtype": "bf16"}},
    ),
    "fp16, capped scores and logits, gates and the norms of Gemma": (
        "dp2",
        {
            "model": {
                "windows": [16, 0],
                "num_layers": 4,
                "attention_softcap": 5.0,
                "logit_softcap": 5.0,
                "norm": "rmsnorm_1p",
                "norm_place": "both",
                "attention_gate": True,
                "activation": "geglu",
                "z_loss": 1e-4,
            }
        },
    ),
    "fp32, positions divided, recompute": ("cp2", {"model": {"recompute": "full"}, "precision": {"dtype": "fp32"}}),
    "llama with few kv heads, untied, fp32 sums, divided": (
        "tp2sp",
        {
            "model": {"num_kv_heads": 2, "tie_embeddings": False, "num_layers": 6},
            "precision": {"reduce_dtype": "half_fp32_sum"},
            "parallelism": {"bucket_size": 100_000},
        },
    ),
    "wide vocabulary, fp32 gradients, two stages": (
        "pp2",
        {
            "model": {"vocab_size": 8192, "hidden_size": 64, "num_layers": 4, "seq_len": 32},
            "precision": {"dtype": "bf16", "grad_dtype": "fp32"},
            "training": {"micro_batch_size": 2},
        },
    ),
    "fp32, nag, whole activations, interleaved stages": (
        "tp2pp2",
        {
            "model": {"num_layers": 4},
            "precision": {"dtype": "fp32"},
            "optimizer": {"name": "nag"},
            "parallelism": _pipeline("interleaved_1f1b"),
        },
    ),
    "gpt fp16, backward in halves, two of each": (
        "dp2tp2pp2sp",
        {"model": {**GPT, "num_layers": 6}, "parallelism": _pipeline("zbv_zero_bubble")},
    ),
}
MUON = {
    "muon, whole": ("dp2", {"optimizer": {"name": "muon"}, "model": {"hidden_size": 256, "num_layers": 4}}),
    "muon in fp32, divided": (
        "dp2tp2",
        {"optimizer": {"name": "muon", "muon": {"ns_dtype": "fp32", "row_beta2": 0.9}},
         "model": {"hidden_size": 256},
         "parallelism": {"bucket_size": 100_000}},
    ),
}  # fmt: skip
SHARDED = {  # with the micro-batches of a step; gradients of one micro-batch are temporary
    "gradients, fp32 sums, averaged": (
        "dp2",
        {"precision": {"reduce_dtype": "half_fp32_sum"}, "parallelism": {"shard": "gradients"},
         "training": {"average": {"decay": 0.9}}},
        1,
    ),
    "parameters, untied": ("dp2", {"model": LARGE, "parallelism": {"shard": "parameters"}}, 1),
    "parameters, gpt bf16, full recompute": (
        "dp2",
        {"model": GPT | {"recompute": "full"}, "precision": {"dtype": "bf16"},
         "parallelism": {"shard": "parameters", "bucket_size": 20_000}},
        1,
    ),
    "parameters, gradients kept over micro-batches": ("dp2", {"parallelism": {"shard": "parameters"}}, 3),
    "parameters, owners add up": ("dp2", {"parallelism": {"shard": "parameters", "accumulate": "owner"}}, 3),
    "parameters, muon whose matrices travel": (
        "dp2",
        {"optimizer": {"name": "muon"}, "model": {"hidden_size": 256, "vocab_size": 64},
         "training": {"micro_batch_size": 1}, "parallelism": {"shard": "parameters", "bucket_size": 100_000}},
        1,
    ),
}  # fmt: skip
MORE_SHARDED = {
    "gradients, fp32": (
        "dp2", {"precision": {"dtype": "fp32"}, "model": LARGE, "parallelism": {"shard": "gradients"}}, 1,
    ),
    "parameters, fp32": (
        "dp2", {"precision": {"dtype": "fp32"}, "model": LARGE, "parallelism": {"shard": "parameters"}}, 1,
    ),
    "gradients, two stages": ("dp2pp2", {"model": GPT, "parallelism": {"shard": "gradients"}}, 4),
    "parameters, divided": ("dp2tp2", {"model": LARGE, "parallelism": {"shard": "parameters"}}, 1),
    "parameters, bf16 moments": (
        "dp2",
        {"model": LARGE, "optimizer": {"adamw": {"state_dtype": "bf16"}}, "parallelism": {"shard": "parameters"}},
        1,
    ),
    "parameters, one rank, fp32 sums": (
        "dp1",
        {"model": LARGE, "precision": {"reduce_dtype": "half_fp32_sum"}, "parallelism": {"shard": "parameters"}},
        1,
    ),
}  # fmt: skip
LATENT = {"kv_rank": 24, "query_rank": 40, "unrotated_dim": 16, "rotary_dim": 8, "value_dim": 20}
MORE = {
    "llama fp16, one rank": ("dp1", {}),
    "llama, full recompute, divided": ("tp2", {"model": {"recompute": "full"}}),
    "first layers again, two stages": ("pp2", {"model": {"num_layers": 4, "recompute": {"full": 1}}}),
    "latent attention, divided": ("tp2", {"model": {"latent_attention": LATENT, "recompute": "selective"}}),
    "gpt fp16, two stages": ("pp2", {"model": GPT | {"num_layers": 5}}),
    "interleaved": ("pp2", {"model": {"num_layers": 5}, "parallelism": _pipeline("interleaved_1f1b")}),
    "interleaved, halves": (
        "pp2", {"model": {"num_layers": 4}, "parallelism": _pipeline("interleaved_zero_bubble")},
    ),
    "on a V, untied": (
        "pp2",
        {"model": {"num_layers": 7, "tie_embeddings": False}, "parallelism": _pipeline("zbv_zero_bubble")},
    ),
    "four stages": ("pp4", {"model": {"num_layers": 5}}),
    "four on a V": ("pp4", {"model": {"num_layers": 9}, "parallelism": _pipeline("zbv_zero_bubble", 4)}),
}  # fmt: skip
ALL = {
    name: case
    for name, case in (CONFIGS | MUON | MORE | SHARDED | MORE_SHARDED).items()
    if case[1].get("parallelism", {}).get("pp_schedule", "1f1b") in pipelines.SCHEDULES
}
SOME = [name for name in (*[*CONFIGS][::2], *MUON, *[*SHARDED][::2]) if name in ALL]


def held_by(engine):
    """Return the bytes that an engine holds between steps, by the plan's categories."""
    buckets, sums = engine.buckets, [bucket.grad_sum for bucket in engine.buckets]
    states = [state for bucket in buckets for of_span in bucket.states for state in of_span.values()]
    states += [state for held in engine.held_states() for state in held.tensors.values()]
    owner_adds = engine.plan.sharding.accumulate == "owner" and engine.grad_accum_steps > 1
    held = {
        "half parameters": [flat for bucket in buckets for flat in (bucket.params, bucket.param_shard)],
        "half gradients": [*(bucket.grads for bucket in buckets), *([] if owner_adds else sums)],
        "FP32 sums of micro-batches": sums if owner_adds else [],
        "FP32 masters": [bucket.master for bucket in buckets],
        "FP32 average of the weights": [bucket.average for bucket in buckets if bucket.average is not None],
        "optimizer states": states,
    }
    return {name: storage_bytes(tensors) for name, tensors in held.items()}


def _measured(config):
    """Return measurements of one rank that takes two steps: its place, bytes by category, peak of each phase, and bytes
    that live between steps.
    """
    phases = {}
    with LiveStorage() as tracker:

        def ends(phase):
            phases[phase] = max(phases.get(phase, 0), tracker.peak_bytes)
            tracker._recount()
            tracker.peak_bytes = tracker.live_bytes

        runner = build_training(config, torch.device("cpu"))
        engine = runner.engine
        ends("build")
        for _ in range(2):
            runner.forward_backward(_batch(config) for _ in range(engine.grad_accum_steps))
            ends("passes")
            engine.step()
            ends("step")
        engine.wait()
        tracker._recount()
        live = tracker.live_bytes
    held = held_by(engine) | {"model buffers": storage_bytes(engine.module.buffers())}
    return replace(engine.topology, groups={}), held, phases, live


def _batch(config):
    shape = (config.training.micro_batch_size, config.model.seq_len)
    tokens, targets = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
    return MicroBatch(Batch(tokens, targets, None, targets.numel()))


@pytest.mark.uncounted
@pytest.mark.parametrize("name", also_wide(ALL if FULL else SOME, "gpt bf16, two ranks", "muon, whole"))
def test_what_is_planned_is_what_ranks_hold(run_ranks, name):
    layout_name, sections, *given = ALL[name]
    layout = parse_layout(layout_name)
    config = layout.apply(_config(**sections), *given or [4 if FULL else 2])
    size = layout.world_size
    ranks = [_measured(config)] if size == 1 else run_ranks(_measured, size, config)
    for topology, held, _, live in ranks:
        # The shards are this rank's own: with some optimizers not all parameters have the same states.
        own, _ = held_memory(config, layout.size("dp"), topology.world.rank, "cpu")
        assert {category: own[category] for category in held} == held
        spare = SCALARS if layout.size("pp") == 1 else 0.01 * live
        assert live == pytest.approx(sum(own.values()), abs=spare)
    for pp_rank in range(layout.size("pp")):
        plan = plan_rank(config, layout.size("dp"), pp_rank, "cpu")
        of_stage = [phases for topology, _, phases, _ in ranks if topology.pp.rank == pp_rank]
        most = {phase: max(phases[phase] for phases in of_stage) for phase in of_stage[0]}
        assert plan.resident >= max(live for topology, _, _, live in ranks if topology.pp.rank == pp_rank) - spare
        assert plan.peak == pytest.approx(max(most.values()), rel=0.05)
        planned = {
            "build": plan.phases["build"],
            "passes": max(plan.phases["forward"], plan.phases["backward"]),
            "step": max(plan.phases["statistics"], plan.phases["update"]),
        }
        assert planned == pytest.approx(most, rel=0.05)
        assert most["build"] < max(most["passes"], most["step"])


def test_how_many_matrices_travel_is_said():
    """The line also tells the bucket_size with which none would travel, if there is one.

    There are four blocks of four matrices of 256 x 256 and three of 256 x 704: 3,211,264 elements.
    """
    _, whole = MUON["muon, whole"]
    size = 2 * 256 * 704
    would = f"none would with parallelism.bucket_size = {size}; padding 0.0%"
    for size_given, dp_size, said in (
        (None, 1, "matrices: none of 28 travels, each is whole in one shard; padding 0.0%"),
        (None, 2, "matrices: none of 28 travels, each is whole in one shard; padding 3.8%"),
        # The smaller half of each matrix is sent, there and back.
        (1, 2, f"matrices: 28 of 28 travel, 3.1 MiB from each rank in a step, 2.00 bytes an element; {would}"),
        # No bucket has eight matrices: 4 (8 - 1) / 8 bytes at the most. No four buckets would be left.
        (1, 8, "matrices: 28 of 28 travel, 1.3 MiB from each rank in a step, 3.50 bytes an element; padding 0.1%"),
    ):
        config = _config(**whole, parallelism={"bucket_size": size_given}, training={"global_batch_size": 32})
        lines = [*report_lines(config, dp_size, "cpu", None, as_json=False)]
        assert lines[1] == said
    as_said = _config(**whole, parallelism={"bucket_size": size})
    assert "none of 28 travels" in str(plan_memory(as_said, 2, "cpu").matrices)
    divided = _config(**whole, parallelism={"tp_size": 2})  # no bucket_size puts blocks of one matrix into one shard
    assert "none would" not in str(plan_memory(divided, 1, "cpu").matrices)


@pytest.mark.parametrize(("dtype", "has_mask"), [("bf16", False), ("fp32", True)])
def test_packed_documents_take_a_mask_on_a_gpu_in_fp32_alone(dtype, has_mask):
    sections = {"precision": {"dtype": dtype}, "model": {"seq_len": 512, "vocab_size": 64}}
    packed, plain = (
        plan_memory(_config(**sections, data={"packing": packing}), 1, "gpu").phases
        for packing in ("documents", "none")
    )
    positions, mask = 8 * 4 * 512, 4 * 512 * 512  # bytes
    assert packed["backward"] >= plain["backward"] + positions
    assert (packed["forward"] >= plain["forward"] + positions + mask) == has_mask


@pytest.mark.parametrize(("data", "there"), [({}, False), ({"valid": "none"}, True), ({"split": [95, 5]}, True)])
def test_a_pipeline_that_evaluates_holds_the_buffers_for_it(data, there):
    config = parse_layout("pp2").apply(_config(data=data), 4)
    assert (EVALUATION in plan_rank(config, 1, 0, "cpu").held) == there


def _evaluation_bytes(config):
    """Return the rank of the pipeline, and the bytes that the first evaluation adds on it."""
    with LiveStorage() as tracker:
        runner = build_training(config, torch.device("cpu"))
        runner.engine.wait()
        tracker._recount()
        before = tracker.live_bytes
        runner.evaluate(_batch(config).batch for _ in range(runner.engine.grad_accum_steps))
        tracker._recount()
        added = tracker.live_bytes - before
    return runner.engine.topology.pp.rank, added


@pytest.mark.uncounted
@pytest.mark.parametrize(
    ("layout_name", "parallelism"),
    [
        ("pp2", _pipeline("interleaved_1f1b")),
        ("cp2pp2", {}),
        ("pp2", _pipeline("1f1b")),
        ("pp2", _pipeline(pipelines.SCHEDULES[-1])),
        ("tp2pp2", {"sequence_parallel": True}),
    ][: None if FULL else 2],
)
def test_an_evaluation_in_parts_keeps_the_planned_buffers(run_ranks, layout_name, parallelism):
    layout = parse_layout(layout_name)
    sections = {"model": {"num_layers": 4}, "parallelism": parallelism, "training": {"micro_batch_size": 1}}
    config = layout.apply(_config(**sections, data={"valid": "none"}), 16)
    tokens = 8 * config.model.seq_len * torch.int64.itemsize  # only ranks with the first stage keep them
    for pp_rank, held in run_ranks(_evaluation_bytes, layout.world_size, config):
        planned = plan_rank(config, 1, pp_rank, "cpu").held[EVALUATION]
        assert planned - tokens <= held <= planned + SCALARS, pp_rank


def test_the_ranks_of_a_pipeline_build_each_block_once_and_one_schedule(monkeypatch):
    built, scheduled, block, schedule = [], [], Transformer.block, SCHEDULES["1f1b"]

    def spy(model, config, layer):
        built.append(layer)
        return block(model, config, layer)

    monkeypatch.setattr(Transformer, "block", spy)
    monkeypatch.setitem(SCHEDULES, "1f1b", lambda *args: scheduled.append(args) or schedule(*args))
    config = parse_layout("pp4").apply(_config(model={"num_layers": 9}), 7)
    for rank in range(4):
        held_memory(config, 1, rank, "cpu")
    assert sorted(filter(None, built)) == [*range(1, 9)]  # the first block is traced for the cost of a block
    assert len(scheduled) == 1


def test_buffers_that_a_forward_moves_are_planned_twice(monkeypatch):
    """The engine copies such buffers. The size is used only here, for earlier traces are remembered."""
    build, forward = Block.__init__, Block.forward

    def counted(block, *args, **kwargs):
        build(block, *args, **kwargs)
        block.register_buffer("calls", torch.zeros(100), persistent=False)

    def moving(block, *args, **kwargs):
        block.calls += 1
        return forward(block, *args, **kwargs)

    config = _config(model={"hidden_size": 72})
    assert "copies of buffers that move" not in plan_memory(config, 1, "cpu").held
    monkeypatch.setattr(Block, "__init__", counted)
    monkeypatch.setattr(Block, "forward", moving)
    for sections in ({}, {"parallelism": _pipeline("1f1b")}):
        config = _config(model={"hidden_size": 80}, **sections)
        held = [plan_rank(config, 1, pp_rank, "cpu").held for pp_rank in range(config.parallelism.pp_size)]
        assert sum(one["copies of buffers that move"] for one in held) == 3 * 400
