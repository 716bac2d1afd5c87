"""Small pipelines, and the engine with the whole model that they must equal."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megamix import AdamW, Precision, ShardedEngine, Sharding
from megamix.base.machine import torch_version
from megamix.comm.topology import Topology
from megamix.config import ModelConfig, ParallelismConfig
from megamix.config.mesh_checks import SPLITS_BACKWARD
from megamix.data.loader import Batch
from megamix.mixed_precision.loss_scale import DynamicLossScale
from megamix.model.transformer import Transformer
from megamix.parallel.build import build_model, drawn
from megamix.parallel.micro_batch_runner import MicroBatch
from megamix.parallel.pipeline_parallel import SCHEDULES as ALL_SCHEDULES
from megamix.parallel.pipeline_parallel import Pipeline
from megamix.parallel.stages import V_SHAPED, plan_stages
from megamix.tools.verify.core.observed_step import rank_device

MODELS = {
    "gpt": {"norm": "layernorm", "rope": False, "activation": "gelu", "bias": True},
    "llama": {"num_kv_heads": 2, "scaled_init": False},
}
B, T, VOCAB = 2, 12, 40
# With an older torch the other two are refused: test_pipeline_config.py.
SCHEDULES = [name for name in ALL_SCHEDULES if torch_version() >= SPLITS_BACKWARD or not name.endswith("zero_bubble")]


@dataclass(frozen=True, kw_only=True)
class Case:
    schedule: str = "1f1b"
    dtype: torch.dtype = torch.float32
    grad_dtype: torch.dtype | None = None
    model: str = "llama"
    tied: bool = False
    rounds: int = 1  # micro-batches / pp_size
    pp_size: int = 2
    more: tuple[tuple[str, Any], ...] = ()  # further settings of the model
    packed: bool = False

    @property
    def micro_batches(self):
        return self.rounds * self.pp_size

    def config(self):
        layers = 2 * self.pp_size + 1  # two stages per rank, and one more block than stages
        sizes = {"vocab_size": VOCAB, "seq_len": T, "hidden_size": 16, "num_layers": layers, "num_heads": 4}
        return ModelConfig(**sizes, **MODELS[self.model], tie_embeddings=self.tied, init_std=0.1, **dict(self.more))


def pipeline_engine(case, model, topology, placements=None, *, fill=None):
    """Build this rank's engine."""
    scale = DynamicLossScale(init_scale=2.0**8, growth_interval=1, max_scale=2.0**8)
    return ShardedEngine(
        model,
        AdamW(lr=0.01, eps=1e-2),  # as large as the gradients, so that rounding a tiny one is no whole step
        Precision(case.dtype, case.grad_dtype, scale),
        Sharding(units=[*model.blocks], topology=topology, bucket_size=4000, placements=placements or {}),
        clip_grad=0.5,
        grad_accum_steps=case.micro_batches,
        compile_update=False,
        fill=fill,
    )


def make_pipeline(case, topology):
    config, per_rank = case.config(), 1 if case.schedule == "1f1b" else 2
    stages = plan_stages(config, topology.pp.size, per_rank, v_shaped=case.schedule in V_SHAPED)
    model, placements = build_model(config, ParallelismConfig(), topology, rank_device(), stages)
    engine = pipeline_engine(case, model, topology, placements, fill=drawn(model, 5))
    return engine, Pipeline(engine, model, stages, case.schedule, B)


def make_whole(case, topology):
    """Build the whole model's engine on each of this stage's data-parallel ranks."""
    torch.manual_seed(5)
    alone = Topology() if topology.dp.group is None else Topology.current(topology.dp.group)
    return pipeline_engine(case, Transformer(case.config()), alone)


def batches(case, step, dp_rank):
    """Return a step's micro-batches, functions of step, rank and number."""
    made = []
    for number in range(case.micro_batches):
        generator = torch.Generator().manual_seed(1000 * step + 50 * dp_rank + number)
        tokens = torch.randint(VOCAB, (B, T + 1), generator=generator)
        targets, positions = tokens[:, 1:].clone(), None
        if case.packed:  # a document of 5 tokens, then one that continues
            positions = torch.cat([torch.arange(5), torch.arange(T - 5)]).expand(B, T).contiguous()
            targets[:, 4] = -100
        made.append(Batch(tokens[:, :-1].clone(), targets, positions, int((targets >= 0).sum())))
    return made


def micro_batches(case, step, dp_rank, seeded=False):
    made = batches(case, step, dp_rank)
    return [MicroBatch(batch, 7 * number if seeded else None) for number, batch in enumerate(made)]


def by_name(engine, shard_of):
    """Return one tensor of each bucket's shard by parameter name. Every owner must call it."""
    found = {}
    for bucket in engine.buckets:
        flat = bucket.owners.gather(shard_of(bucket)).view(-1)
        found |= {slot.spec.name: flat[slot.start : slot.end].clone() for slot in bucket.plan.slots}
    return found


def state_of_shard(name, bucket):
    """Return one state of all elements of a bucket that this rank owns."""
    return torch.cat([states[name] for states in bucket.states])


def state_of(engine):
    """Return master and moments by name, and this rank's half parameters."""
    kinds = [lambda bucket: bucket.master, *(partial(state_of_shard, name) for name in ("exp_avg", "exp_avg_sq"))]
    parts = [by_name(engine, kind) for kind in kinds]
    engine.wait()
    named = (one for bucket in engine.buckets for one in bucket.named_params.items())
    half = {name: param.detach().float().flatten() for name, param in named}
    return {name: [*(part[name] for part in parts), half[name]] for name in parts[0]}
