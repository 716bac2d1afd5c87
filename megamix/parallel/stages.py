"""A pipeline's stages: which blocks each one has, and the part of the model that a rank holds for its own."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megamix.config import DecoderConfig
from megamix.model.decoder import Costs, Decoder
from megamix.model.family import family_of

V_SHAPED = ("zbv_zero_bubble",)  # schedules of stages that go down the ranks and back up


@dataclass(frozen=True, slots=True)
class StagePlan:
    """What one stage computes and holds."""

    rank: int  # in the pipeline
    layers: range
    flops: int  # per token, forward and backward
    params: int  # with the table or head; a tied one on both stages that hold it


def plan_stages(
    config: DecoderConfig, pp_size: int, stages_per_rank: int, *, v_shaped: bool = False
) -> list[StagePlan]:
    """Give each stage neighbouring blocks, so that the dearest stage costs as little as it can.

    The first stage also looks tokens up, which holds a table and multiplies nothing; the last one has norm and head.
    No split has a cheaper dearest stage. Among these the operations are the most even, then the parameters; then later
    stages get more blocks, since they keep the activations of fewer micro-batches.
    Stages are dealt to the ranks in turn or, on a V, down the ranks and back up.
    Raises: ValueError if there are more stages than blocks.
    """
    num_stages = pp_size * stages_per_rank
    if num_stages > config.num_layers:
        raise ValueError(
            f"{num_stages} pipeline stages need a block each, but model.num_layers is {config.num_layers}; "
            f"take at most {config.num_layers} stages"
        )
    ranks = [*range(pp_size), *reversed(range(pp_size))] if v_shaped else [*range(pp_size)] * stages_per_rank
    cut = _cut(family_of(config).costs(config), num_stages)
    return [StagePlan(rank, *stage) for rank, stage in zip(ranks, cut, strict=True)]


def _cut(costs: Costs, num_stages: int) -> Iterator[tuple[range, int, int]]:
    """Yield the blocks of each stage, their operations and their parameters."""
    num_blocks = len(costs.blocks)
    flops, params = [block.flops for block in costs.blocks], [block.params for block in costs.blocks]
    params[0] += costs.first.params
    flops[-1], params[-1] = flops[-1] + costs.last.flops, params[-1] + costs.last.params
    flops_to, params_to = ([0, *itertools.accumulate(counts)] for counts in (flops, params))
    # The best way to give the first blocks to the first stages, stage by stage, by the number of these blocks: the
    # dearest stage, squares of operations and of parameters, places, borders.
    best: dict[int, tuple[int, int, int, int, tuple[int, ...]]] = {0: (0, 0, 0, 0, (0,))}
    for stage in range(num_stages):
        before, best = best, {}
        for stop in range(stage + 1, num_blocks + stage + 2 - num_stages):  # each later stage needs a block
            for start in range(stop - 1, stage - 1, -1):
                cost, held = flops_to[stop] - flops_to[start], params_to[stop] - params_to[start]
                if stop in best and cost > best[stop][0]:
                    break  # and dearer still with more blocks
                if start in before:
                    dearest, even, evenly_held, places, borders = before[start]
                    places -= stage * (stop - start)
                    way = max(dearest, cost), even + cost**2, evenly_held + held**2, places, (*borders, stop)
                    best[stop] = min(way, best.get(stop, way))
    for start, stop in itertools.pairwise(best[num_blocks][-1]):
        yield range(start, stop), flops_to[stop] - flops_to[start], params_to[stop] - params_to[start]


def describe_stages(plans: list[StagePlan]) -> str:
    """For a log: what is where, and how even the split is."""
    total = sum(plan.flops for plan in plans)
    return ", ".join(
        f"stage {stage} on pp rank {plan.rank}: blocks {plan.layers.start}..{plan.layers.stop - 1}, "
        f"{plan.flops / total:.0%} of the operations, {plan.params / 1e6:.2f} M parameters"
        for stage, plan in enumerate(plans)
    )


def keep_layers(model: Decoder, held: Collection[int]) -> None:
    """Take out of a whole model all but these blocks, the embedding if the first one is among them, and norm and head
    if the last one is. A tied table stays with both its names on either end. What is left keeps its names.
    """
    num_layers = model.config.num_layers
    first, last = 0 in held, num_layers - 1 in held
    tied = model.config.tie_embeddings and (first or last)
    for layer in set(range(num_layers)) - {*held}:
        model.blocks[layer] = nn.Module()  # without parameters, and an error if it was called
    if not first:
        model.position_embedding = None
    for name, stays in (("embedding", first or tied), ("norm", last), ("head", last or tied)):
        if not stays:
            model.add_module(name, nn.Module())


class Stage(nn.Module):
    """One stage of a rank's model, as torch's schedules call it. Its parameters are those that the stage uses."""

    def __init__(self, model: Decoder, layers: range):
        super().__init__()
        self.layers = layers
        self.is_first, self.is_last = layers.start == 0, layers.stop == model.config.num_layers
        self.parts = nn.ModuleList(_modules(model, self.is_first, layers, self.is_last))
        self._run = model.__call__  # not as a module: the parameters of its other stages are not this one's

    def forward(
        self, x: Tensor, targets: Tensor, positions: Tensor | None = None, num_documents: int = 0,
        seed: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Hidden states half (B, T, hidden_size) from those of the stage before, on the first stage from tokens INT64
        (B, T); on the last one the loss, FP32 ().

        `seed`: UINT64 (1,) on the host, of what the micro-batch drops out. Each stage draws numbers of its own.
        """
        if seed is not None:
            (number,) = seed.tolist()  # int() of one of 2^63 and more fails (torch 2.13)
            torch.manual_seed((number + self.layers.start) % 2**64)
        out: Tensor = self._run(x, targets, positions, num_documents, layers=self.layers)
        return out


def _modules(model: Decoder, first: bool, layers: range, last: bool) -> Iterator[nn.Module]:
    if first:
        yield model.embedding
        if model.position_embedding is not None:
            yield model.position_embedding
    yield from (model.blocks[layer] for layer in layers)
    if last:
        yield from (model.norm, model.head)
