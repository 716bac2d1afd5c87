"""Full weights by the module's own names, out of the masters and back into them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from megamix.comm.collectives import Collectives
from megamix.mixed_precision.flat_layout import ParamSpec
from megamix.mixed_precision.half_params import HalfParams
from megamix.mixed_precision.master_shard import MasterShard


def full_weights(
    model: nn.Module, half_params: HalfParams, master_shard: MasterShard, params: Sequence[ParamSpec],
    tp: Collectives, pp: Collectives,
) -> dict[str, Tensor]:  # fmt: skip
    """The state dict of the model that all ranks train, its trained weights taken in FP32 from every rank's masters.
    Copies, on the host.

    `params`: of the whole model. `tp`: among the ranks that divide this rank's parameters; `pp`: among those that hold
    others.
    """
    trained: dict[str, Tensor] = {}
    for index, bucket in enumerate(half_params.layout.buckets):
        flat = master_shard.gather(index)
        for slot in bucket.slots:
            value = _whole(flat[slot.start : slot.end], slot.spec, tp).to("cpu", copy=True)
            trained |= dict.fromkeys((slot.spec.name, *slot.spec.aliases), value)
    own = model.state_dict()
    weights = {name: trained[name] if name in trained else tensor.to("cpu", copy=True) for name, tensor in own.items()}
    if pp.axis.size > 1:
        weights |= _of_all_stages(trained, params, pp, master_shard.master[0].device)
    return weights


def _of_all_stages(
    own: Mapping[str, Tensor], params: Sequence[ParamSpec], pp: Collectives, device: torch.device
) -> dict[str, Tensor]:
    """Every parameter, from the first of `pp` that holds it."""
    held = pp.table(torch.tensor([spec.name in own for spec in params], dtype=torch.uint8, device=device))
    weights: dict[str, Tensor] = {}
    for spec, source in zip(params, held.argmax(0).tolist(), strict=True):
        weight = own[spec.name].to(device) if spec.name in own else torch.empty(spec.full_shape, device=device)
        pp.broadcast(weight, source)
        weights |= dict.fromkeys((spec.name, *spec.aliases), weight.cpu())
    return weights


def _whole(block: Tensor, spec: ParamSpec, tp: Collectives) -> Tensor:
    """The full parameter from all ranks' blocks, which lie one behind the other in one dim. Shapes: block (numel,)."""
    if spec.shape == spec.full_shape:
        return block.view(spec.shape)
    (dim,) = (dim for dim, size in enumerate(spec.shape) if size != spec.full_shape[dim])
    return torch.cat([part.view(spec.shape) for part in tp.table(block)], dim)


def take_over(half_params: HalfParams, master_shard: MasterShard, owners: Sequence[Collectives]) -> None:
    """Take the module's weights, those of each bucket's first owner, into masters and half parameters."""
    for bucket, own in enumerate(owners):
        full = half_params.full_precision(bucket)
        own.broadcast(full)
        master_shard.take(bucket, full)
        half_params.install(full)
        del full  # before the next one comes


def load_weights(
    state_dict: Mapping[str, Tensor], model: nn.Module, half_params: HalfParams, master_shard: MasterShard,
    params: Sequence[ParamSpec],
) -> None:  # fmt: skip
    """Set masters and half parameters from full FP32 weights, and copy what the buckets do not hold into the module.
    `params`: of the whole model; entries of other ranks' are left to these.

    Raises: ValueError naming every missing, unknown or misshapen entry, before anything is changed.
    """
    own = model.state_dict()
    shapes: dict[str, tuple[int, ...]] = {name: tuple(tensor.shape) for name, tensor in own.items()}
    trained = {
        name: slot.spec.full_shape
        for bucket in half_params.layout.buckets
        for slot in bucket.slots
        for name in (slot.spec.name, *slot.spec.aliases)
    }
    shapes |= trained
    elsewhere = {name for spec in params for name in (spec.name, *spec.aliases)}
    problems = [f"missing {name}" for name in own if name not in state_dict]
    problems += [f"unknown {name}" for name in state_dict if name not in own and name not in elsewhere]
    problems += [
        f"{name} has shape {tuple(state_dict[name].shape)}, the model's has {shape}"
        for name, shape in shapes.items()
        if name in state_dict and tuple(state_dict[name].shape) != shape
    ]
    if problems:
        raise ValueError("load_weights() needs exactly the module's entries: " + "; ".join(problems))
    for index in range(len(half_params.layout.buckets)):
        full = half_params.full_precision(index, state_dict)
        master_shard.take(index, full)
        half_params.flat[index].copy_(full)
    for name, tensor in own.items():
        if name not in trained:
            tensor.copy_(state_dict[name])
