"""The planned memory equals what ranks hold, for five layouts and every `shard`: parameters, gradients, states and
buckets to the byte, each phase's peak within 5 %. A model of 500 M parameters trains in 3 GiB a rank. A run's
line of memory has the planned and the measured, and warns if they differ by 10 % or more.
"""

import gc
import resource
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from megamix.base.live_storage import LiveStorage
from megamix.data.loader import Batch
from megamix.model.transformer import Block, Transformer
from megamix.parallel.micro_batch_runner import MicroBatch
from megamix.parallel.pipeline_parallel import SCHEDULES
from megamix.tools.plan import memory_plan
from megamix.tools.plan.memory_plan import EVALUATION, held_memory, memory_line, plan_memory, plan_rank
from megamix.tools.plan.report import report_lines
from megamix.tools.ranks import RankPool
from megamix.tools.verify.core.layout import parse_layout
from megamix.train.engine import build_training
from tests.builders import tiny_job
from tests.conftest import FULL, also_wide
from tests.distributed import pipelines
from tests.storages import storage_bytes

BASE = {
    "model": {"vocab_size": 512, "seq_len": 96, "hidden_size": 128, "num_layers": 3, "num_heads": 4},
    "data": {"valid": None},
    "training": {"steps": 4, "micro_batch_size": 4, "global_batch_size": 16, "eval_interval": 0},
}

# Bytes: counters and loss scale, the tables of a rank with fewer pieces than the largest, and the table of the last
# agreement (192 bytes on two ranks), which Gloo's thread lets go of only some time after the ranks went on.
SCALARS = 500


def _config(*layers, **settings):
    return tiny_job(Path("none"), BASE, *layers, **settings)


def _pipeline(schedule, size=2):
    return {"pipeline": {"size": size, "schedule": schedule}}


BF16, FP32, HALF_SUMS = {"dtype": "bf16"}, {"dtype": "fp32"}, {"reduce_dtype": "half_fp32_sum"}
GPT = {
    "norm": "layernorm", "activation": "gelu_tanh", "rope": False, "bias": True, "hidden_size": 64,
    "vocab_size": 2048,
}  # fmt: skip
LARGE = {"tie_embeddings": False, "num_layers": 4, "vocab_size": 2048}
HEADS = {"context": {"size": 2, "method": "heads"}}
AGAIN = {"recompute": "full"}
GRADIENTS, PARAMETERS = {"shard": "gradients"}, {"shard": "parameters"}
MUON = {"optimizer": {"name": "muon"}, "hidden_size": 256}
WHOLE_MUON = MUON | {"num_layers": 4}
MUON_FP32 = {"optimizer": {"name": "muon", "muon": {"ns_dtype": "fp32", "row_beta2": 0.9}}}
LATENT = {"kv_rank": 24, "query_rank": 40, "unrotated_dim": 16, "rotary_dim": 8, "value_dim": 20}
# The layout, the settings that differ from BASE, and the micro-batches of a step.
SOME = {
    "gpt bf16, two ranks": ("dp2", GPT | BF16),
    "fp16, heads divided in attention": ("cp2", HEADS),
    "windows in some layers, fp32, positions divided, recompute": (
        "cp2", {"window": {"sizes": [16, 0]}, "num_layers": 4} | AGAIN | FP32,
    ),
    "wide vocabulary, fp32 gradients, two stages": (
        "pp2",
        {"vocab_size": 8192, "hidden_size": 64, "num_layers": 4, "seq_len": 32, "grad_dtype": "fp32",
         "micro_batch_size": 2} | BF16,
    ),
    "gpt fp16, backward in halves, two stages": ("dp2pp2", GPT | {"num_layers": 4} | _pipeline("zbv_zero_bubble")),
    "muon, whole": ("dp2", WHOLE_MUON),
    "muon in fp32, divided": ("dp2tp2sp", MUON_FP32 | {"bucket_size": 100_000}),
    "gradients, fp32 sums, averaged": ("dp2", GRADIENTS | HALF_SUMS | {"average": {"decay": 0.9}}, 1),
    "parameters, gpt bf16, full recompute": ("dp2", PARAMETERS | GPT | AGAIN | BF16 | {"bucket_size": 20_000}, 1),
    "parameters, owners add up": ("dp2", PARAMETERS | {"accumulate": "owner"}, 3),
}  # fmt: skip
MORE = {
    "bf16, heads divided in attention, recompute": ("cp2", GPT | AGAIN | BF16 | HEADS),
    "fp16, capped scores and logits, gates and the norms of Gemma": (
        "dp2",
        {"window": {"sizes": [16, 0]}, "num_layers": 4, "attention_softcap": 5.0, "logit_softcap": 5.0,
         "norm": "rmsnorm_1p", "norm_place": "both", "attention_gate": True, "activation": "geglu", "z_loss": 1e-4},
    ),
    "llama with few kv heads, untied, fp32 sums, divided": (
        "tp2sp", {"num_kv_heads": 2, "tie_embeddings": False, "num_layers": 6, "bucket_size": 100_000} | HALF_SUMS,
    ),
    "fp32, nag, whole activations, interleaved stages": (
        "tp2pp2", {"num_layers": 4, "name": "nag"} | FP32 | _pipeline("interleaved_1f1b"),
    ),
    "llama, full recompute, divided": ("tp2", AGAIN),
    "first layers again, two stages": ("pp2", {"num_layers": 4, "recompute": {"full": 1}}),
    "latent attention, divided": ("tp2", {"latent_attention": LATENT, "recompute": "selective"}),
    "on a V, untied": ("pp2", {"num_layers": 7, "tie_embeddings": False} | _pipeline("zbv_zero_bubble")),
    "four on a V": ("pp4", {"num_layers": 9} | _pipeline("zbv_zero_bubble", 4)),
    "parameters, gradients kept over micro-batches": ("dp2", PARAMETERS, 3),
    "parameters, muon whose matrices travel": (
        "dp2", PARAMETERS | MUON | {"vocab_size": 64, "micro_batch_size": 1, "bucket_size": 100_000}, 1,
    ),
    "gradients, fp32": ("dp2", GRADIENTS | LARGE | FP32, 1),
    "parameters, fp32": ("dp2", PARAMETERS | LARGE | FP32, 1),
    "gradients, two stages": ("dp2pp2", GRADIENTS | GPT, 4),
    "parameters, divided": ("dp2tp2", PARAMETERS | LARGE, 1),
    "parameters, bf16 moments": ("dp2", PARAMETERS | LARGE | {"optimizer": {"adamw": {"state_dtype": "bf16"}}}, 1),
    "parameters, one rank, fp32 sums": ("dp1", PARAMETERS | LARGE | HALF_SUMS, 1),
}  # fmt: skip
CASES = {
    name: case
    for name, case in (SOME | MORE if FULL else SOME).items()
    if case[1].get("pipeline", {}).get("schedule", "1f1b") in pipelines.SCHEDULES
}


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


def _measured(config, steps):
    """Return measurements of one rank that takes some steps: its place, bytes by category, peak of each phase, and
    bytes that live between steps.
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
        for _ in range(steps):
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


@pytest.mark.parametrize("name", also_wide(CASES, "gpt bf16, two ranks", "muon, whole"))
def test_what_is_planned_is_what_ranks_hold(run_ranks, name):
    layout_name, settings, *given = CASES[name]
    layout = parse_layout(layout_name)
    config = layout.apply(_config(**settings), *given or [4 if FULL else 2])
    size, steps = layout.world_size, 2 if FULL else 1
    ranks = [_measured(config, steps)] if size == 1 else run_ranks(_measured, size, config, steps)
    for topology, held, _, live in ranks:
        # The shards are this rank's own: with some optimizers not all parameters have the same states.
        own, _ = held_memory(config, layout.size("dp"), topology.world.rank, "cpu")
        assert {category: own[category] for category in held} == held
        spare = SCALARS if layout.size("pp") == 1 else 0.01 * live
        assert live == pytest.approx(sum(own.values()), abs=spare)
    for pp_rank in range(layout.size("pp")):
        plan = plan_rank(config, layout.size("dp"), pp_rank, "cpu")
        of_stage = [(phases, live) for topology, _, phases, live in ranks if topology.pp.rank == pp_rank]
        most = {phase: max(phases[phase] for phases, _ in of_stage) for phase in ("build", "passes", "step")}
        assert plan.resident >= max(live for _, live in of_stage) - spare
        assert plan.peak == pytest.approx(max(most.values()), rel=0.05)
        planned = {
            "build": plan.phases["build"],
            "passes": max(plan.phases["forward"], plan.phases["backward"]),
            "step": max(plan.phases["statistics"], plan.phases["update"]),
        }
        assert planned == pytest.approx(most, rel=0.05)
        assert most["build"] < max(most["passes"], most["step"])


def _planned_and_held(config):
    """Return (planned, held) by this rank of a job."""
    engine = build_training(config, torch.device("cpu")).engine
    planned, _ = held_memory(config, engine.topology.dp.size, engine.topology.world.rank, "cpu")
    held = held_by(engine)
    return {name: planned[name] for name in held}, held


def test_what_replicas_hold_is_planned(run_ranks):
    config = parse_layout("replicas2dp2").apply(_config(**HALF_SUMS, bucket_size=4000), 4)
    for planned, held in run_ranks(_planned_and_held, 4, config):
        assert planned == held


def test_how_many_matrices_travel_is_said():
    """The line also tells the bucket_size with which none would travel, if there is one.

    There are four blocks of four matrices of 256 x 256 and three of 256 x 704: 3,211,264 elements.
    """
    size = 2 * 256 * 704
    would = f"none would with parallelism.bucket_size = {size}; padding 0.0%"
    for bucket_size, dp_size, said in (
        (None, 1, "matrices: none of 28 travels, each is whole in one shard; padding 0.0%"),
        (None, 2, "matrices: none of 28 travels, each is whole in one shard; padding 3.8%"),
        # The smaller half of each matrix is sent, there and back.
        (1, 2, f"matrices: 28 of 28 travel, 3.1 MiB from each rank in a step, 2.00 bytes an element; {would}"),
        # No bucket has eight matrices: 4 (8 - 1) / 8 bytes at the most. No four buckets would be left.
        (1, 8, "matrices: 28 of 28 travel, 1.3 MiB from each rank in a step, 3.50 bytes an element; padding 0.1%"),
    ):
        config = _config(**WHOLE_MUON, bucket_size=bucket_size, global_batch_size=32)
        assert [*report_lines(config, dp_size, "cpu", None, as_json=False)][1] == said
    assert "none of 28 travels" in str(plan_memory(_config(**WHOLE_MUON, bucket_size=size), 2, "cpu").matrices)
    divided = _config(**WHOLE_MUON, tensor={"size": 2})  # no bucket_size puts blocks of one matrix into one shard
    assert "none would" not in str(plan_memory(divided, 1, "cpu").matrices)


@pytest.mark.parametrize(("dtype", "has_mask"), [("bf16", False), ("fp32", True)])
def test_packed_documents_take_a_mask_on_a_gpu_in_fp32_alone(dtype, has_mask):
    packed, plain, best_fit = (
        plan_memory(_config(dtype=dtype, seq_len=512, vocab_size=64, packing=packing), 1, "gpu").phases
        for packing in ("documents", "none", "best_fit")
    )
    assert best_fit == packed
    positions, mask = 8 * 4 * 512, 4 * 512 * 512  # bytes
    assert packed["backward"] >= plain["backward"] + positions
    assert (packed["forward"] >= plain["forward"] + positions + mask) == has_mask


@pytest.mark.parametrize(("data", "there"), [({}, False), ({"valid": "none"}, True), ({"split": [95, 5]}, True)])
def test_a_pipeline_that_evaluates_holds_the_buffers_for_it(data, there):
    config = parse_layout("pp2").apply(_config(data=data, eval_interval=len(data)), 4)
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
        return runner.engine.topology.pp.rank, tracker.live_bytes - before


@pytest.mark.parametrize(
    ("layout_name", "settings"),
    [
        ("pp2", _pipeline("interleaved_1f1b")),
        ("cp2pp2", {}),
        ("pp2", {}),
        ("pp2", _pipeline(pipelines.SCHEDULES[-1])),
        ("tp2pp2sp", {}),
    ][: None if FULL else 2],
)
def test_an_evaluation_in_parts_keeps_the_planned_buffers(run_ranks, layout_name, settings):
    layout = parse_layout(layout_name)
    config = layout.apply(_config(num_layers=4, micro_batch_size=1, valid="none", eval_interval=1, **settings), 16)
    tokens = 8 * config.model.seq_len * torch.int64.itemsize  # only ranks with the first stage keep them
    for pp_rank, held in run_ranks(_evaluation_bytes, layout.world_size, config):
        planned = plan_rank(config, 1, pp_rank, "cpu").held[EVALUATION]
        assert planned - tokens <= held <= planned + SCALARS, pp_rank


def test_the_ranks_of_a_pipeline_build_each_block_once_and_one_schedule():
    schedule = mock.Mock(side_effect=SCHEDULES["1f1b"])
    config = parse_layout("pp4").apply(_config(num_layers=9), 7)
    with (
        mock.patch.object(Transformer, "block", autospec=True, side_effect=Transformer.block) as block,
        mock.patch.dict(SCHEDULES, {"1f1b": schedule}),
    ):
        for rank in range(4):
            held_memory(config, 1, rank, "cpu")
    built = [layer for (_, _, layer), _ in block.call_args_list]
    assert sorted(filter(None, built)) == [*range(1, 9)]  # the first block is traced for the cost of a block
    schedule.assert_called_once()


def test_buffers_that_a_forward_moves_are_planned_twice(monkeypatch):
    """The engine copies such buffers. The size is used only here, for earlier traces are remembered."""
    build, forward = Block.__init__, Block.forward

    def counted(block, *args, **kwargs):
        build(block, *args, **kwargs)
        block.register_buffer("calls", torch.zeros(100), persistent=False)

    def moving(block, *args, **kwargs):
        block.calls += 1
        return forward(block, *args, **kwargs)

    assert "copies of buffers that move" not in plan_memory(_config(hidden_size=72), 1, "cpu").held
    monkeypatch.setattr(Block, "__init__", counted)
    monkeypatch.setattr(Block, "forward", moving)
    for pp_size in (1, 2):
        config = _config(hidden_size=80, pipeline={"size": pp_size})
        held = [plan_rank(config, 1, pp_rank, "cpu").held for pp_rank in range(pp_size)]
        assert sum(one["copies of buffers that move"] for one in held) == 3 * 400


def test_a_run_logs_what_is_planned_and_what_lives_of_which_every_storage_counts_once(monkeypatch):
    gc.collect()
    # Kept alive: memory of other tests and libraries that is freed meanwhile would hide new memory.
    kept = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]
    others = memory_plan._live_bytes()
    tensor, engine = torch.zeros(1 << 18), build_training(_config(), torch.device("cpu")).engine
    views = tensor[1:], torch.zeros(1 << 18)[1:]
    gc.collect()
    planned = sum(held_memory(_config(), 1, 0, "cpu")[0].values())
    assert memory_plan._live_bytes() - others == pytest.approx(planned + len(views) * tensor.nbytes, abs=SCALARS)
    del kept
    for extra, warns in ((0.08, False), (-0.08, False), (0.12, True), (-0.12, True)):
        monkeypatch.setattr(memory_plan, "_live_bytes", lambda extra=extra: int(planned * (1 + extra)))
        line = memory_line(_config(), engine)
        assert line.startswith("memory | held between steps: planned 10.78 MiB, measured ")
        assert f"({extra:+.1%})" in line
        assert ("WARNING" in line) == warns


def _train(config):
    """Return the loss of each step on one batch, and the peak of this rank's resident memory in bytes.

    malloc gives freed memory back here; that of a job on CPUs keeps it for speed.
    """
    torch.set_num_threads(1)
    runner, losses = build_training(config, torch.device("cpu")), []
    for _ in range(config.training.steps):
        runner.forward_backward(iter([_batch(config)]))
        losses.append(float(runner.engine.step().loss))
    return losses, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.skipif(not FULL, reason="--full: 4 ranks of 3 GiB, minutes")
def test_a_large_model_trains_in_what_was_planned():
    sizes = {"vocab_size": 16384, "seq_len": 128, "hidden_size": 1280, "num_layers": 24, "num_heads": 20}
    steps = {"steps": 10, "micro_batch_size": 1, "global_batch_size": 4, "lr": 1e-3}
    config = _config(**sizes, **steps, **BF16, **PARAMETERS, tie_embeddings=False)
    assert plan_memory(config, 4, "cpu").parameters > 500e6
    with RankPool(4, environment={"OMP_NUM_THREADS": "1"}, deadline_s=1500.0) as ranks:
        told = ranks.call(_train, config)
    for losses, resident in told:
        assert losses == told[0][0]
        assert losses[-1] < losses[0] - 1
        assert resident <= 3 * 2**30
