"""The model of a job on this rank, with the initial weights that one process would draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from megamix.comm.collectives import make_collectives
from megamix.comm.topology import Topology
from megamix.config import ModelConfig
from megamix.mixed_precision.settings import Placement
from megamix.model.decoder import Decoder
from megamix.model.family import family_of
from megamix.model.layers import Linear
from megamix.parallel.borders import Border
from megamix.parallel.stages import StagePlan, keep_layers
from megamix.parallel.tensor_parallel import divide_layers, place_params, take_blocks

TABLE = "embedding.weight"  # the first name of a tied table


def build_model(
    config: ModelConfig, topology: Topology, device: torch.device, stages: Sequence[StagePlan] = (), *,
    sequence_parallel: bool,
) -> tuple[Decoder, dict[str, Placement]]:  # fmt: skip
    """Build this rank's part of the model, and say where all parameters stand in the whole. Every rank must call it.

    torch.manual_seed decides the weights, the same ones on any mesh. `stages`: of the pipeline, if there is one.
    """
    if topology.tp.size == topology.pp.size == 1:
        return family_of(config)(config).to(device), {}
    model, placements = outline(config, topology, stages, sequence_parallel=sequence_parallel)
    if topology.tp.size > 1:
        tp = make_collectives(topology.tp, 0, torch.uint8, device)
        divide_layers(model, Border(tp, sequence=sequence_parallel))
    model.to_empty(device=device)
    draw_weights(model, placements)
    return model, placements


def outline(
    config: ModelConfig, topology: Topology, stages: Sequence[StagePlan] = (), *, sequence_parallel: bool
) -> tuple[Decoder, dict[str, Placement]]:
    """Build it without memory, on the meta device, its layers undivided. `topology`: of any rank, connected or not."""
    with torch.device("meta"):
        model = family_of(config)(config)
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    placements = place_params(shapes, model.rules, topology, sequence_parallel=sequence_parallel)
    if stages:
        keep_layers(model, {layer for plan in stages if plan.rank == topology.pp.rank for layer in plan.layers})
        if config.tie_embeddings and stages[0].rank != stages[-1].rank:
            placements[TABLE] = replace(placements[TABLE], owners=topology.ends)
    take_blocks(model, topology.tp.size)
    return model, placements


@torch.no_grad()
def draw_weights(model: Decoder, placements: Mapping[str, Placement]) -> None:
    """Draw every full parameter of the whole model, one after the other, and keep this rank's blocks of its own."""
    if isinstance(model.head, Linear):  # else this rank has neither end of the model
        model.tie()
    own = dict(model.named_parameters())
    for name, placement in placements.items():
        full = torch.empty(placement.full_shape)
        model.rules[name].fill(full)
        if name in own:
            own[name].copy_(full[placement.block(own[name].shape)])
