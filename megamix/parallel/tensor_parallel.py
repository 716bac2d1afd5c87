"""A plain model becomes one tensor-parallel rank's part of it: blocks for parameters, other operations, borders.

Column-parallel layers (query, key, value, gate, up, head) see all positions and compute some of the columns;
row-parallel ones (out, down) sum over what these gave; the table of tokens is divided by rows (Shoeybi et al. 2019, and
Korthikanti et al. 2022 for the positions between them). The modules stay what they were and compute with plain
tensors. torch's own `parallelize_module` would hand them DTensors, which the operations that compute wide on a CPU
cannot take, at a dispatch of some ten microseconds per operation, and it needs connected ranks where `plan` has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megamix.model.layers import Embedding
from megamix.model.ops import Ops
from megamix.model.transformer import Block, Transformer
from megamix.parallel.borders import Border
from megamix.parallel.placements import block_shape
from megamix.parallel.vocabulary_slopes import VocabularySlopes


@dataclass(frozen=True, kw_only=True)
class _RowOps(Ops):
    """For a layer that has a part of its inputs: the ranks' outputs add up, and the bias comes once, after that."""

    border: Border

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = self.border.leave(super().linear(x, weight, None))
        return out if bias is None else out + bias


@dataclass(frozen=True, kw_only=True)
class _TableOps(Ops):
    """For a table of which this rank has some rows: of each token one rank has the row, and the others add zeros."""

    border: Border

    def embedding(self, tokens: Tensor, weight: Tensor) -> Tensor:
        row = tokens - self.border.tp.axis.rank * weight.shape[0]
        elsewhere = (row < 0) | (row >= weight.shape[0])
        rows = super().embedding(row.masked_fill(elsewhere, 0), weight)
        return self.border.leave(rows.masked_fill(elsewhere.unsqueeze(-1), 0))


@dataclass(frozen=True, kw_only=True)
class _PositionOps(Ops):
    """For a part of the positions: the units that drop out are those that would in one process."""

    border: Border

    def dropout(self, x: Tensor, share: float) -> Tensor:
        if not self.border.sequence:
            return super().dropout(x, share)
        kept = x.new_empty(x.shape[0], x.shape[1] * self.border.tp.axis.size, x.shape[2], dtype=torch.bool)
        kept = self.border.own_positions(kept.bernoulli_(1 - share), 1)
        return torch.where(kept, x * (1 / (1 - share)), 0.0)


def take_blocks(model: nn.Module, tp_size: int) -> None:
    """Put an empty block in place of each parameter that is divided, under all its names. For a model whose values are
    still to be drawn, such as one on the meta device.
    """
    blocks: dict[nn.Parameter, nn.Parameter] = {}
    for name, param in [*model.named_parameters(remove_duplicate=False)]:
        if param not in blocks:
            shape = block_shape(name, tuple(param.shape), tp_size)
            blocks[param] = param if shape == param.shape else nn.Parameter(param.new_empty(shape))
        path, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(path), attribute, blocks[param])


def divide_layers(model: Transformer, border: Border) -> None:
    """Let a model whose parameters are blocks compute what the whole model would. Calls of it are collective."""
    for name, module in model.named_modules():
        if name.endswith((".attention", ".feed_forward")):
            module.register_forward_pre_hook(lambda _, args: (border.enter(args[0]), *args[1:]))
        if name.endswith((".attention.out", ".feed_forward.down")):
            _swap(module, _RowOps, border)
    if isinstance(model.embedding, Embedding):  # a pipeline's rank may have neither end
        _swap(model.embedding, _TableOps, border)
    # What the last norm gives goes to the head, or to the loss with the head's weight.
    model.norm.register_forward_hook(lambda _, args, out: border.enter(out))
    model.head.register_forward_hook(lambda _, args, out: border.join_columns(out))
    model.slopes = VocabularySlopes(border.tp)
    model.register_forward_pre_hook(lambda _, args: border.begin(_num_positions(*args)))
    if border.sequence:
        _divide_positions(model, border)


def _divide_positions(model: Transformer, border: Border) -> None:
    for module in (model, *(block for block in model.blocks if isinstance(block, Block))):
        _swap(module, _PositionOps, border)  # what they compute themselves is dropout
    if model.position_embedding is not None:
        model.position_embedding.register_forward_pre_hook(lambda _, args: (border.own_positions(args[0], -1),))


def _num_positions(tokens: Tensor, targets: Tensor | None = None, *others: object) -> int:
    """Of what a model is called with; a pipeline's later stages have hidden states for tokens, and targets always."""
    return (tokens if targets is None else targets).shape[-1]


def _swap(module: nn.Module, ops: type[Any], border: Border) -> None:
    module.ops = ops(**vars(module.ops), border=border)
