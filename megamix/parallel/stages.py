"""A pipeline's stages: which blocks each one has, and the part of the model that a rank holds for its own."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megamix.config import ModelConfig
from megamix.model.sizes import flops_per_token, parameter_count
from megamix.model.transformer import Transformer

V_SHAPED = ("zbv_zero_bubble",)  # schedules of stages that go down the ranks and back up


@dataclass(frozen=True, slots=True)
class StagePlan:
    """What one stage computes and holds."""

    rank: int  # in the pipeline
    layers: range
    flops: int  # per token, forward and backward
    params: int  # with the table or head; a tied one on both stages that hold it


def plan_stages(config: ModelConfig, pp_size: int, stages_per_rank: int, *, v_shaped: bool = False) -> list[StagePlan]:
    """Give each stage neighbouring blocks, so that the dearest stage costs as little as it can.

    The first stage also looks tokens up, which holds a table and multiplies nothing; the last one has norm and head.
    Blocks are handed out one by one, each to the stage that has the fewest operations with it. All blocks cost alike,
    so no split has a cheaper dearest stage. Among equals it goes to the stage that holds fewer parameters with it, then
    to the later one, which keeps the activations of fewer micro-batches.
    Stages are dealt to the ranks in turn or, on a V, down the ranks and back up.
    Raises: ValueError if there are more stages than blocks.
    """
    num_stages = pp_size * stages_per_rank
    if num_stages > config.num_layers:
        raise ValueError(
            f"{num_stages} pipeline stages need a block each, but model.num_layers is {config.num_layers}; "
            f"take at most {config.num_layers} stages"
        )
    ends = config.model_copy(update={"num_layers": 0, "tie_embeddings": False})  # embedding, norm and head
    whole = config.model_copy(update={"tie_embeddings": False})
    rows = config.vocab_size + (config.seq_len if config.position == "learned" else 0)
    block_flops = (flops_per_token(whole) - flops_per_token(ends)) // config.num_layers
    block_params = (parameter_count(whole) - parameter_count(ends)) // config.num_layers
    flops, params, counts = [block_flops] * num_stages, [block_params] * num_stages, [1] * num_stages
    flops[-1] += flops_per_token(ends)
    params[0] += rows * config.hidden_size
    params[-1] += parameter_count(ends) - rows * config.hidden_size
    for _ in range(config.num_layers - num_stages):
        stage = min(range(num_stages), key=lambda stage: (flops[stage], params[stage], -stage))
        flops[stage] += block_flops
        params[stage] += block_params
        counts[stage] += 1
    starts = [sum(counts[:stage]) for stage in range(num_stages + 1)]
    ranks = [*range(pp_size), *reversed(range(pp_size))] if v_shaped else [*range(pp_size)] * stages_per_rank
    return [
        StagePlan(ranks[stage], range(*starts[stage : stage + 2]), flops[stage], params[stage])
        for stage in range(num_stages)
    ]


def describe_stages(plans: list[StagePlan]) -> str:
    """For a log: what is where, and how even the split is."""
    total = sum(plan.flops for plan in plans)
    return ", ".join(
        f"stage {stage} on pp rank {plan.rank}: blocks {plan.layers.start}..{plan.layers.stop - 1}, "
        f"{plan.flops / total:.0%} of the operations, {plan.params / 1e6:.2f} M parameters"
        for stage, plan in enumerate(plans)
    )


def keep_layers(model: Transformer, held: Collection[int]) -> None:
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

    def __init__(self, model: Transformer, layers: range):
        super().__init__()
        self.layers = layers
        self.is_first, self.is_last = layers.start == 0, layers.stop == model.config.num_layers
        self.parts = nn.ModuleList(_modules(model, self.is_first, layers, self.is_last))
        self._run = model.__call__  # not as a module: the parameters of its other stages are not this one's

    def forward(
        self, x: Tensor, targets: Tensor, positions: Tensor | None = None, seed: Tensor | None = None
    ) -> Tensor:
        """Hidden states half (B, T, hidden_size) from those of the stage before, on the first stage from tokens INT64
        (B, T); on the last one the loss, FP32 ().

        `seed`: UINT64 (1,) on the host, of what the micro-batch drops out. Each stage draws numbers of its own.
        """
        if seed is not None:
            torch.manual_seed((int(seed) + self.layers.start) % 2**64)
        out: Tensor = self._run(x, targets, positions, layers=self.layers)
        return out


def _modules(model: Transformer, first: bool, layers: range, last: bool) -> Iterator[nn.Module]:
    if first:
        yield model.embedding
        if model.position_embedding is not None:
            yield model.position_embedding
    yield from (model.blocks[layer] for layer in layers)
    if last:
        yield from (model.norm, model.head)
