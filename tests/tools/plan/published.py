"""Published rows as jobs of the time model."""

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from megamix.config import ModelConfig
from megamix.model import sizes
from megamix.model.family import flops_per_token
from megamix.tools.plan.time_hardware import Hardware, load_hardware
from megamix.tools.plan.time_work import Recompute, TimedJob, Traffic

ROWS = Path(__file__).with_name("published_rows.toml")
# Share of the dense peak, forward and backward, of kernels that the rows' programs ran.
ATTENTION = {"flash2": (0.38, 0.31), "triton": (0.27, 0.18), "cudnn": (0.60, 0.48)}
# What a row does not say, and what it says by the name that a job has for it.
UNSAID = {
    "tp": 1, "pp": 1, "cp": 1, "stages": 1, "tp_overlap": False, "fused_projections": False, "fp8": False,
    "cast_bytes": 0.0, "unpublished": False,
}  # fmt: skip
SAME = ("micro_batch", "global_batch", "tp", "pp", "cp", "tp_overlap", "stages", "kernels", "fused_projections")
SENT = ("gather_bytes", "reduce_bytes", "update_bytes", "cast_bytes")


@dataclass(frozen=True)
class PublishedRow:
    """One published throughput."""

    stack: str
    model: str
    job: TimedJob
    hardware: Hardware
    note: str  # settings that the other columns of a table do not show
    seconds: float  # of a step
    fitted: bool  # whether the constants of the time model were fitted to it
    unpublished: bool  # whether settings that matter are unknown

    @property
    def memory_share(self):
        """Return the share of a device's memory that a trainer with FP32 parameters needs, roughly.

        States of 16 bytes a parameter, one gathered block and the table, 28 bytes of activations for each element of a
        layer's width, and logits.
        """
        job, model = self.job, self.job.model
        width, layers, params = model.hidden_size, model.num_layers, sizes.fewest_params(model)
        tokens, each = job.micro_batch * model.seq_len, 12 * width + 4 * sizes.ffn_hidden_size(model)
        kept = 2 * width * layers + each if job.recompute.products else each * layers
        sharded = job.traffic.gathers > job.micro_batches
        states = params * (16 / job.dp if sharded else 12 / job.dp + 4)
        table = model.vocab_size * width
        gathered = 12 * (params - table) / layers + 4 * table
        needed = states + gathered + tokens * (kept + 6 * model.vocab_size)
        return needed / (job.tp * job.pp) / self.hardware.memory_bytes


def settings_of(row):
    """Return the jobs that a row may mean: its own, or, where settings are unknown, micro-batches of 1 to 4 sequences
    and 1 to 16 stages on a rank.
    """
    if not row.unpublished:
        return [row.job]
    layers = row.job.model.num_layers // row.job.pp
    stages = [count for count in (1, 2, 4, 8, 16) if layers % count == 0 and (count == 1 or row.job.pp > 1)]
    sizes = [size for size in (1, 2, 4) if row.job.global_batch % (size * row.job.dp) == 0]
    return [replace(row.job, micro_batch=size, stages=count) for size in sizes for count in stages]


@cache
def published_rows(stacks="stacks"):
    data = tomllib.loads(ROWS.read_text(encoding="utf-8"))
    return [
        _row(UNSAID | stack | dict(zip(stack["columns"], values, strict=True)), data["models"], kind == "fitted_rows")
        for stack in data[stacks]
        for kind in ("fitted_rows", "kept_rows")
        for values in stack.get(kind, ())
    ]


def _row(row, models, fitted):
    layers, hidden, heads, kv_heads, ffn, gated, vocab, tied = models[row["model"]]["shape"]
    model = ModelConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        ffn_hidden_size=ffn,
        activation="swiglu" if gated else "gelu",
        rope={} if gated else False,
        vocab_size=vocab,
        tie_embeddings=tied,
        seq_len=row["seq"],
    )
    ranks = row["gpus"] // (row["tp"] * row["pp"] * row["cp"])
    replicas = ranks // 8 if row["shard"] == "hybrid" else 1
    job = TimedJob(
        model=model,
        dp=ranks // replicas,
        replicas=replicas,
        schedule="1f1b" if row["stages"] == 1 else "interleaved_1f1b",
        fp8=float(row["fp8"]),
        fp8_weights=row["fp8"],
        recompute=_recompute(row["recompute"]),
        traffic=_traffic(row, row["global_batch"] // (row["micro_batch"] * ranks), layers // row["pp"] + 1),
        **{name: row[name] for name in SAME},
    )
    kernel = row.get("attention", "triton" if row["name"] == "mosaic" else "flash2")
    forward, backward = ATTENTION[kernel]
    of_node = {name: row[name] for name in ("node_size", "node_bytes_per_s") if name in row}
    hardware = replace(
        load_hardware(row["hardware"]), attention_forward=forward, attention_backward=backward, **of_node
    )
    tokens_per_s = row["tflops"] * 1e12 / flops_per_token(job.model) if "tflops" in row else row["tokens_per_s"]
    return PublishedRow(
        stack=row["name"],
        model=row["model"],
        job=job,
        hardware=hardware,
        note=_note(row),
        seconds=job.step_tokens / tokens_per_s / row["gpus"],
        fitted=fitted,
        unpublished=row["unpublished"],
    )


def _note(row):
    recompute = {"none": "", "full": "recompute", "selective_op": "recompute half"}
    parts = [
        row["shard"],
        recompute.get(row["recompute"], "recompute 0.87"),
        "eager" if row["kernels"] == "eager" else "",
        "FP8" if row["fp8"] else "",
        f"tp {row['tp']}{' overlapped' if row['tp_overlap'] else ''}" if row["tp"] > 1 else "",
        f"pp {row['pp']}" if row["pp"] > 1 else "",
        f"stages {row['stages']}" if row["stages"] > 1 and not row["unpublished"] else "",
        f"cp {row['cp']}" if row["cp"] > 1 else "",
    ]
    return ", ".join(filter(None, parts))


def _recompute(name):
    if name == "selective_op":  # every second product is kept, and attention's result
        return Recompute(products=0.5, between=1.0)
    share = float({"none": 0, "full": 1}.get(name, name.removeprefix("blocks_")))
    return Recompute(products=share, attention=share, between=share)


def _traffic(row, count, pieces):
    """Return what FSDP and Megatron-Core send: FSDP gathers and reduces in every micro-batch."""
    sharded = {"full": (2 * count, count), "hybrid": (2 * count, count), "grad": (count, count)}
    gathers, reductions = sharded.get(row["shard"], (1, 1))
    return Traffic(
        gathers=gathers,
        reductions=reductions,
        pieces=pieces,
        hidden_by=count if gathers > 1 else 1,
        **{name: row[name] for name in SENT},
    )
