"""A pipeline's stages: the blocks of each stage, and the part of the model that a rank holds for its stages."""

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megamix.config import DecoderConfig, ParallelismConfig, stages_per_rank
from megamix.model.decoder import Decoder
from megamix.model.family import family_of
from megamix.model.language_model import Costs, LanguageModel

V_SHAPED = ("zbv_zero_bubble",)  # schedules whose stages go from the first rank to the last and back


@dataclass(frozen=True, slots=True)
class StagePlan:
    """The work and the parameters of one stage."""

    rank: int  # rank of the pipeline that runs it
    layers: range
    flops: int  # operations per token, forward and backward
    params: int  # parameters, with the table or head; a tied table counts on both stages that hold it


def plan_pipeline(config: DecoderConfig, parallelism: ParallelismConfig) -> list[StagePlan]:
    """Return the stages of all ranks; an empty list without a pipeline. Raises: as `plan_stages`."""
    if (pipeline := parallelism.pipeline) is None:
        return []
    v_shaped = pipeline.schedule in V_SHAPED
    return plan_stages(config, pipeline.size, stages_per_rank(pipeline), v_shaped=v_shaped)


def plan_stages(
    config: DecoderConfig, pp_size: int, stages_per_rank: int, *, v_shaped: bool = False
) -> list[StagePlan]:
    """Divide the blocks into stages of neighbouring blocks, so that the costliest stage costs as little as possible.

    The first stage also has the embedding: parameters, but no products. The last stage has norm and head. If several
    splits have the same cost of the costliest stage, the split with the most even operations is taken; among these, the
    one with the most even parameters; among these, the one with more blocks on later stages, which keep the activations
    of fewer micro-batches.
    The ranks get the stages in turn or, with `v_shaped`, from the first rank to the last and back.
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
    num_blocks = len(costs.blocks)
    flops, params = [block.flops for block in costs.blocks], [block.params for block in costs.blocks]
    params[0] += costs.first.params
    flops[-1], params[-1] = flops[-1] + costs.last.flops, params[-1] + costs.last.params
    flops_to, params_to = ([0, *itertools.accumulate(counts)] for counts in (flops, params))
    # Dynamic programming, stage by stage. `best` has, for each number of first blocks, the best way to divide them into
    # the stages so far. A way is a tuple: cost of the costliest stage, sum of squared operations, sum of squared
    # parameters, places (the sum over the blocks of minus the number of their stage), borders.
    best: dict[int, tuple[int, int, int, int, tuple[int, ...]]] = {0: (0, 0, 0, 0, (0,))}
    for stage in range(num_stages):
        before, best = best, {}
        for stop in range(stage + 1, num_blocks + stage + 2 - num_stages):  # each later stage needs a block
            for start in range(stop - 1, stage - 1, -1):
                cost, held = flops_to[stop] - flops_to[start], params_to[stop] - params_to[start]
                if stop in best and cost > best[stop][0]:
                    break  # more blocks cost still more
                if start in before:
                    dearest, even, evenly_held, places, borders = before[start]
                    places -= stage * (stop - start)
                    way = max(dearest, cost), even + cost**2, evenly_held + held**2, places, (*borders, stop)
                    best[stop] = min(way, best.get(stop, way))
    for start, stop in itertools.pairwise(best[num_blocks][-1]):
        yield range(start, stop), flops_to[stop] - flops_to[start], params_to[stop] - params_to[start]


def describe_stages(plans: list[StagePlan]) -> str:
    """Return a line for the log: rank, blocks, share of operations and parameters of each stage."""
    total = sum(plan.flops for plan in plans)
    return ", ".join(
        f"stage {stage} on pp rank {plan.rank}: blocks {plan.layers.start}..{plan.layers.stop - 1}, "
        f"{plan.flops / total:.0%} of the operations, {plan.params / 1e6:.2f} M parameters"
        for stage, plan in enumerate(plans)
    )


def keep_layers(model: Decoder, held: Collection[int]) -> None:
    """Remove from a whole model all blocks but `held`. The embedding stays only if the first block does, norm and head
    only if the last block does. A tied table stays, under both its names, if the first or the last block does. The
    remaining parameters keep their names.
    """
    num_layers = model.config.num_layers
    first, last = 0 in held, num_layers - 1 in held
    tied = model.config.tie_embeddings and (first or last)
    for layer in set(range(num_layers)) - {*held}:
        model.blocks[layer] = nn.Module()  # an empty module has no parameters, and raises if it is called
    if not first:
        model.position_embedding = None
    for name, stays in (("embedding", first or tied), ("norm", last), ("head", last or tied)):
        if not stays:
            model.add_module(name, nn.Module())


class Stage(nn.Module):
    """One stage of a rank's model, as torch's schedules call it. It has only the parameters that the stage uses."""

    def __init__(self, model: LanguageModel, layers: range):
        super().__init__()
        self.layers = layers
        self.is_first, self.is_last = layers.start == 0, layers.stop == model.config.num_layers
        parts: list[nn.Module] = [model]
        if isinstance(model, Decoder):
            first, last = model.inputs if self.is_first else [], [model.norm, model.head] if self.is_last else []
            parts = [*first, *(model.blocks[layer] for layer in layers), *last]
        self.parts = nn.ModuleList(parts)
        self._run = model.__call__  # a function; a submodule would add the other stages' parameters

    def forward(
        self,
        x: Tensor,
        targets: Tensor,
        positions: Tensor | None = None,
        num_documents: int = 0,
        deal: Tensor | None = None,
        seed: Tensor | None = None,
    ) -> Tensor:
        """Return hidden states, half (B, T, hidden_size); on the last stage the loss, FP32 ().

        `x`: the hidden states of the stage before; on the first stage the tokens, INT64 (B, T). `seed`: UINT64 (1,) on
        the host, the seed of the micro-batch's dropout. Each stage draws other numbers from it.
        """
        if seed is not None:
            (number,) = seed.tolist()  # int(seed) fails from 2^63 on (torch 2.13)
            torch.manual_seed((number + self.layers.start) % 2**64)
        # torch receives into one buffer in each step, and no version counts that. The model gets a tensor of its own.
        out: Tensor = self._run(x.view_as(x), targets, positions, num_documents, deal, layers=self.layers)
        return out
