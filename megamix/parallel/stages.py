"""A pipeline's stages: which blocks each one has, and the part of the model that a rank holds for its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megamix.config import ModelConfig
from megamix.model.flops import flops_per_token, parameter_count
from megamix.model.transformer import Transformer


@dataclass(frozen=True, slots=True)
class StagePlan:
    """What one stage computes and holds."""

    layers: range
    flops: int  # per token, forward and backward
    params: int  # with the table or head; a tied one on both stages that hold it


def plan_stages(config: ModelConfig, num_stages: int) -> list[StagePlan]:
    """Give each stage neighbouring blocks, so that the dearest stage costs as little as it can.

    The first stage also looks tokens up, which holds a table and multiplies nothing; the last one has norm and head.
    Blocks are handed out one by one, each to the stage that has the fewest operations with it. All blocks cost alike,
    so no split has a cheaper dearest stage. Among equals it goes to the stage that holds fewer parameters with it, then
    to the later one, which keeps the activations of fewer micro-batches.
    Raises: ValueError if there are more stages than blocks.
    """
    if num_stages > config.num_layers:
        raise ValueError(
            f"{num_stages} pipeline stages need a block each, but model.num_layers is {config.num_layers}; "
            f"take at most {config.num_layers} stages"
        )
    ends = config.model_copy(update={"num_layers": 0, "tie_embeddings": False})  # embedding, norm and head
    rows = config.vocab_size + (config.seq_len if config.position == "learned" else 0)
    head_flops = flops_per_token(ends)
    block_flops = (flops_per_token(config) - head_flops) // config.num_layers
    whole = config.model_copy(update={"tie_embeddings": False})
    block_params = (parameter_count(whole) - parameter_count(ends)) // config.num_layers
    flops, params, counts = [0] * num_stages, [0] * num_stages, [0] * num_stages
    flops[-1] += head_flops
    params[0] += rows * config.hidden_size
    params[-1] += parameter_count(ends) - rows * config.hidden_size

    def hand_out(stage: int) -> None:
        flops[stage] += block_flops
        params[stage] += block_params
        counts[stage] += 1

    for stage in range(num_stages):
        hand_out(stage)
    for _ in range(config.num_layers - num_stages):
        hand_out(min(range(num_stages), key=lambda stage: (flops[stage], params[stage], -stage)))
    starts = [sum(counts[:stage]) for stage in range(num_stages + 1)]
    return [StagePlan(range(*starts[stage : stage + 2]), flops[stage], params[stage]) for stage in range(num_stages)]


def stages_of_rank(rank: int, pp_size: int, stages_per_rank: int, *, v_shaped: bool) -> list[int]:
    """Of one rank, ascending: every pp_size-th stage or, on a V, one on the way down and one on the way back."""
    if v_shaped:
        return [rank, 2 * pp_size - 1 - rank]
    return [rank + turn * pp_size for turn in range(stages_per_rank)]


@torch.no_grad()
def build_part(config: ModelConfig, parts: Sequence[range]) -> Transformer:
    """The model with nothing in it but these blocks, and the embedding in front of the first block, norm and head
    behind the last one; on the CPU. A tied table is there with both its names on either end.

    Names are those of the whole model, and so are the initial weights, after the same torch.manual_seed: every weight
    is drawn, those of others into memory that is given back at once.
    """
    with torch.device("meta"):
        model = Transformer(config)
    shapes = {name: param.shape for name, param in model.named_parameters()}
    held = {layer for layers in parts for layer in layers}
    first, last = 0 in held, config.num_layers - 1 in held
    tied = config.tie_embeddings and (first or last)
    for layer in set(range(config.num_layers)) - held:
        model.blocks[layer] = nn.Module()  # without parameters, and an error if it was called
    if not (first or tied):
        model.add_module("embedding", nn.Module())
    if not (last or tied):
        model.add_module("head", nn.Module())
    if not first:
        model.position_embedding = None
    if not last:
        model.add_module("norm", nn.Module())
    model.to_empty(device="cpu")
    if tied:
        model.tie()
    here = dict(model.named_parameters())
    for name, shape in shapes.items():
        model.draw(name, here[name] if name in here else torch.empty(shape))
    return model


class Stage(nn.Module):
    """One stage of a rank's model, as torch's schedules call it. Its parameters are those that the stage uses."""

    def __init__(self, model: Transformer, layers: range):
        super().__init__()
        self.config, self.layers = model.config, layers
        self.is_first, self.is_last = layers.start == 0, layers.stop == model.config.num_layers
        self.parts = nn.ModuleList(_modules(model, self.is_first, layers, self.is_last))
        self._run = model.__call__  # not as a module: its other stages' parameters are not this one's

    def forward(
        self, x: Tensor, targets: Tensor, positions: Tensor | None = None, seed: Tensor | None = None
    ) -> Tensor:
        """Hidden states half (B, T, hidden_size) from those of the stage before, on the first stage from tokens INT64
        (B, T); on the last one the loss, FP32 ().

        `seed`: UINT64 (1,) on the host, of what the micro-batch drops out. Each stage draws numbers of its own.
        """
        if seed is not None:
            torch.manual_seed((int(seed) + self.layers.start) % 2**64)
        out: Tensor = self._run(x, targets, positions, self.layers)
        return out


def _modules(model: Transformer, first: bool, layers: range, last: bool) -> Iterator[nn.Module]:
    if first:
        yield model.embedding
        if model.position_embedding is not None:
            yield model.position_embedding
    yield from (model.blocks[layer] for layer in layers)
    if last:
        yield from (model.norm, model.head)
