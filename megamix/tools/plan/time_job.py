"""The work of a configured job, as the time model reads it. No torch is imported."""

from __future__ import annotations

from megamix.base.names import matches
from megamix.config import Config, ranks_along, stages_per_rank
from megamix.model import sizes
from megamix.tools.plan.time_work import Recompute, TimedJob, Traffic

# Bytes a parameter that an update and its statistics move, with states in FP32 and in BF16 (docs/design.md).
UPDATE_BYTES = {"adamw": (30, 22), "nag": (22, 18), "muon": (30, 22)}


def timed_job(config: Config, dp_size: int) -> TimedJob:
    """Return the work of the job that `config` describes, on `dp_size` ranks that share out the masters.

    Raises: ValueError if the model is of another family than "transformer" or has latent attention, or the optimizer is
    a plugin's.
    """
    model, ranks, training, fp8 = config.model, config.parallelism, config.training, config.precision.fp8
    if model.family != "transformer":
        raise ValueError(f'model.family: got "{model.family}"; time is planned for "transformer" alone')
    if model.latent_attention is not None:
        raise ValueError(
            "model.latent_attention: time is planned without it alone; plan the memory, and measure the time"
        )
    if config.optimizer.name not in UPDATE_BYTES:
        known = ", ".join(UPDATE_BYTES)
        raise ValueError(f'optimizer.name: got "{config.optimizer.name}"; time is planned for {known} alone')
    tensor, pipeline, context = ranks.tensor, ranks.pipeline, ranks.context
    repeated = sizes.num_repeated(model) / model.num_layers
    in_fp8 = 0
    if fp8 is not None:
        in_fp8 = sum(not matches(f"blocks.{layer}.", fp8.but) for layer in range(model.num_layers))  # whole blocks
    count = training.global_batch_size // (training.micro_batch_size * dp_size * ranks.replicas)
    by_block = ranks.shard == "parameters"
    dtype = config.precision.reduce_dtype or config.precision.grad_dtype
    moved = UPDATE_BYTES[config.optimizer.name][getattr(config.optimizer, config.optimizer.name).state_dtype == "bf16"]
    return TimedJob(
        model=model,
        micro_batch=training.micro_batch_size,
        global_batch=training.global_batch_size,
        dp=dp_size,
        replicas=ranks.replicas,
        tp=tensor.size if tensor else 1,
        pp=pipeline.size if pipeline else 1,
        cp=context.size if context else 1,
        ep=ranks_along(ranks, "ep"),
        tp_whole=tensor is not None and not tensor.sequence_parallel,
        schedule=pipeline.schedule if pipeline else "1f1b",
        stages=stages_per_rank(pipeline) if pipeline else 1,
        cp_heads=context is not None and context.method == "heads",
        kernels="compiled" if model.compile else "fused",
        fp8=in_fp8 / model.num_layers,
        fp8_weights=fp8 is not None and fp8.weight_grad == "fp8",
        recompute=Recompute(repeated, repeated, 1.0 if model.recompute == "selective" else repeated),
        traffic=Traffic(
            gathers=2 * count if by_block else 1,  # each block before its forward and before its backward
            reductions=count if ranks.accumulate == "owner" else 1,
            pieces=model.num_layers // ranks_along(ranks, "pp") + 1,
            hidden_by=(count if by_block else 1) if ranks.overlap else 0,
            reduce_bytes=4 if dtype == "fp32" else 2,
            update_bytes=moved,
        ),
        muon=config.optimizer.name == "muon",
    )
