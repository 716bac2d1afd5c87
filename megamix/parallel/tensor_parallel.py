"""The change of a plain model into one tensor-parallel rank's part: blocks for parameters, other operations, borders.

Column-parallel layers see all positions and compute some of the columns. Row-parallel layers take these columns and sum
over the ranks. The table of tokens is divided by rows (Shoeybi et al. 2019; Korthikanti et al. 2022 for divided
positions between the layers). The model marks its layers where it builds them (megamix/model/layers.py).

The modules stay the same and compute with plain tensors. torch's `parallelize_module` would hand them DTensors. The
operations that compute wide on a CPU cannot take DTensors, and each operation would cost a dispatch of some ten
microseconds. `parallelize_module` also needs connected ranks, and `plan` has none.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from megamix.comm.collectives import Collectives
from megamix.comm.topology import Topology
from megamix.config import axis_key
from megamix.data.loader import IGNORE
from megamix.mixed_precision.settings import Placement
from megamix.mixed_precision.weights import put_parameter
from megamix.model.cross_entropy import SLOPE_SCALE
from megamix.model.decoder import Branch, Decoder
from megamix.model.language_model import LanguageModel
from megamix.model.layers import Linear, ParamRule
from megamix.model.ops import Keep, LookUp, Ops, Product, change_ops
from megamix.parallel.borders import Border


def place_params(model: LanguageModel, topology: Topology, *, sequence_parallel: bool) -> dict[str, Placement]:
    """Return the placement of this rank's block of each parameter, by name. `model`: a whole one, as on the meta
    device.

    Raises: ValueError naming a parameter that does not divide evenly, or a module that ranks would compute wrong.
    """
    if topology.tp.size > 1 and isinstance(model, Decoder):
        _check_branches(model, topology.tp.size)
    placements = {}
    for name, param in model.named_parameters():
        rule = model.rules[name]
        if rule.divided is not None and (size := param.shape[rule.divided]) % (ranks := _num_blocks(rule, topology)):
            key = axis_key(rule.along)
            raise ValueError(
                f"parallelism.{key}: got {ranks}, must divide {size}, of {name} {[*param.shape]}; take another one, or "
                "other sizes under [model]"
            )
        placements[name] = _place(rule, tuple(param.shape), topology, sequence_parallel)
    return placements


def _num_blocks(rule: ParamRule, topology: Topology) -> int:
    return 1 if rule.divided is None else topology.along(rule.along).size


def _check_branches(model: Decoder, tp_size: int) -> None:
    """Refuse a branch that divides no layer by rows: its input's gradients are summed over ranks. Refuse a divided
    layer outside of a branch. Raises: ValueError.
    """
    inside = set[nn.Module]([model.head])
    for path, module in model.named_modules():
        if isinstance(module, Branch):
            inside |= {*module.modules()}
            if not any(getattr(layer, "divides", None) == "rows" for layer in module.modules()):
                raise ValueError(
                    f"parallelism.tensor.size: got {tp_size}, but {path} ({type(module).__name__}) is a Branch "
                    "without a row-divided layer, and its gradients would count once for each rank; give its last "
                    'Linear divides="rows", its first ones divides="columns", or make it an nn.Module that is no Branch'
                )
    for path, module in model.named_modules():
        if isinstance(module, Linear) and module.divides and module not in inside:
            raise ValueError(
                f'parallelism.tensor.size: got {tp_size}, but {path} has divides="{module.divides}" and is in no '
                "Branch: nothing would add up the ranks' gradients of its input; make the module around it a Branch"
            )


def _place(rule: ParamRule, shape: tuple[int, ...], topology: Topology, sequence_parallel: bool) -> Placement:
    # With whole activations every tp rank computes the same gradient, so one rank's counts. With a part of the
    # positions, or of the heads, each rank computes a part of the gradient, and all count.
    counts = sequence_parallel or topology.tp.rank == 0 or rule.within_heads
    if rule.divided is None:
        return Placement(shape, (0,) * len(shape), topology.owners_of(None), counts)
    start = shape[rule.divided] // _num_blocks(rule, topology) * topology.along(rule.along).rank
    offset = tuple(start if dim == rule.divided else 0 for dim in range(len(shape)))
    return Placement(shape, offset, topology.owners_of(rule.along), counts or rule.along == "tp", rule.along)


def _by_rows(border: Border, product: Product, ops: Ops, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product of a layer that has a part of its inputs: the ranks' outputs are summed, then the bias is
    added.
    """
    out = border.leave(product(ops, x, weight, None))
    return out if bias is None else out + bias


def _in_own_rows(border: Border, look_up: LookUp, ops: Ops, tokens: Tensor, weight: Tensor) -> Tensor:
    """Look up in a table of which this rank has some rows: one rank has a token's row, and the others add zeros."""
    row = tokens - border.tp.axis.rank * weight.shape[0]
    elsewhere = (row < 0) | (row >= weight.shape[0])
    rows = look_up(ops, row.masked_fill(elsewhere, 0), weight)
    return border.leave(rows.masked_fill(elsewhere.unsqueeze(-1), 0))


def _keep_own(border: Border, keep: Keep, ops: Ops, x: Tensor, share: float) -> Tensor:
    """Return the mask of dropout on a part of the positions: it drops the same units as in one process."""
    if not border.sequence:
        return keep(ops, x, share)
    whole = x.new_empty(()).expand(x.shape[0], x.shape[1] * border.tp.axis.size, x.shape[2])
    return border.own_positions(keep(ops, whole, share), 1)


def take_blocks(model: LanguageModel, topology: Topology) -> None:
    """Put an empty block in place of each parameter that is divided, under all its names. The values are lost, so call
    it before they are drawn, as on the meta device.
    """
    blocks: dict[nn.Parameter, nn.Parameter] = {}
    for name, param in [*model.named_parameters(remove_duplicate=False)]:
        if param not in blocks:
            rule, shape = model.rules[name], [*param.shape]
            if rule.divided is not None:
                shape[rule.divided] //= _num_blocks(rule, topology)
            blocks[param] = param if shape == [*param.shape] else nn.Parameter(param.new_empty(shape))
        put_parameter(model, name, blocks[param])


def divide_layers(model: Decoder, border: Border) -> None:
    """Make a model whose parameters are blocks compute the whole model's results. Its calls are collective then."""
    for module in model.modules():
        if isinstance(module, Branch):
            module.register_forward_pre_hook(lambda _, args: (border.enter(args[0]), *args[1:]))
    rows = (module for module in model.modules() if isinstance(module, Linear) and module.divides == "rows")
    change_ops(rows, lambda ops: replace(ops, product=partial(_by_rows, border, ops.product)))
    change_ops([model.embedding], lambda ops: replace(ops, look_up=partial(_in_own_rows, border, ops.look_up)))
    model.norm.register_forward_hook(lambda _, args, out: border.enter(out))
    # A head's loss, which has no dim, is the same on every rank already.
    model.head.register_forward_hook(lambda _, args, out: border.join_columns(out) if out.dim() else out)
    model.slopes = partial(vocabulary_slopes, border.tp)
    model.register_forward_pre_hook(lambda _, args: border.begin(_num_positions(*args)))
    if border.sequence:
        change_ops((model, *model.blocks), lambda ops: replace(ops, keep=partial(_keep_own, border, ops.keep)))
        if model.position_embedding is not None:
            model.position_embedding.register_forward_pre_hook(lambda _, args: (border.own_positions(args[0], -1),))


def _num_positions(tokens: Tensor, targets: Tensor | None = None, *others: object) -> int:
    """Return the number of positions in a model's inputs. Later stages of a pipeline get hidden states in place of
    tokens, so the targets are counted if there are any.
    """
    return (tokens if targets is None else targets).shape[-1]


def vocabulary_slopes(
    tp: Collectives, logits: Tensor, targets: Tensor, slope: Tensor, *, z_loss: float = 0.0
) -> Tensor:
    """Do what `megamix.model.cross_entropy.slopes` does, on ranks with some columns each: return the log-likelihoods of
    the targets, which cover all columns and are the same on every rank, and write the slopes of the rank's own columns
    into `slope`. `tp`: the ranks, each with an equal part of the columns, in order.

    Three FP32 numbers of each row travel: the rank's largest logit, the sum of exponentials relative to it, and the
    target's logit, which is 0 on all ranks but the one that has it.
    Shapes: logits FP32 (rows, columns), targets INT64 (rows,), slope as logits -> FP32 (rows,).
    """
    column = (targets - tp.axis.rank * logits.shape[1]).unsqueeze(1)
    here = (column >= 0) & (column < logits.shape[1])
    column = column.where(here, 0)
    peak = logits.amax(1, keepdim=True)
    own = torch.cat([peak, (logits - peak).exp_().sum(1, keepdim=True), logits.gather(1, column).where(here, 0)], 1)
    peaks, sums, target_logits = tp.gather(own.view(-1)).view(tp.axis.size, *own.shape).unbind(2)
    highest = peaks.amax(0)
    logsumexp = (sums * (peaks - highest).exp()).sum(0).log().add_(highest)
    counts = targets != IGNORE
    share = (logits - logsumexp.unsqueeze(1)).exp_()
    if z_loss:
        share *= 1 + 2 * z_loss * logsumexp.unsqueeze(1)
    share.scatter_add_(1, column, -here.to(share.dtype))
    slope.copy_(share.mul_(counts.unsqueeze(1) * SLOPE_SCALE))
    return (target_logits.sum(0) - logsumexp - z_loss * logsumexp.square()).where(counts, 0)
