"""Whole steps where two ranks divide the model, beside torch alone on the same layout."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from megamix.bench.engines import Work
from megamix.bench.layout_engines import OursPipeline, OursTensorParallel
from megamix.bench.layout_peers import (
    TorchPipeline,
    TorchPipelineFsdp,
    TorchTensorParallel,
    TorchTensorParallelFsdp,
)
from megamix.bench.report import Goal, Result
from megamix.bench.train_bench import GPT_12M, TrainSettings, exposed, measure, result, speed_up
from megamix.bench.train_rank import Side

# Neither parallelize_module nor torch's pipelines keep a tied table one.
UNTIED = Work(model=GPT_12M.model_copy(update={"tie_embeddings": False}), shared=True)

LAYOUTS = {
    "tp2": (
        replace(UNTIED, micro_batch_size=4),
        Side("ours", OursTensorParallel),
        [Side("autocast", TorchTensorParallel), Side("fully_shard", TorchTensorParallelFsdp)],
        [Side("ours, whole positions", partial(OursTensorParallel, sequence_parallel=False))],
    ),
    "pp2": (
        replace(UNTIED, micro_batch_size=2, micro_batches=4),
        Side("ours", OursPipeline),
        [Side("autocast", TorchPipeline), Side("fully_shard", TorchPipelineFsdp)],
        [],
    ),
}


def layout(name: str, rounds: int, work: Work | None = None) -> Result:
    """`name`: of LAYOUTS. Ours against the faster of torch's two, in BF16."""
    its_work, ours, peers, others = LAYOUTS[name]
    settings = TrainSettings(work=work or its_work, rounds=rounds, ranks=2)
    measured = measure([ours, *peers, *others], settings)
    ratios = {peer.name: speed_up(measured[ours.name], measured[peer.name]) for peer in peers}
    best = min(ratios, key=lambda peer: ratios[peer].median)
    goal = Goal(f"tokens/s over torch alone ({best})", ratios[best].median, 0.97, spread=ratios[best])
    return result(f"train --layout {name}", settings, measured, [goal], exposed(measured))
