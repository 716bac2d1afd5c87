"""Full weights by the module's own names, out of the masters and back into them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from megamix.comm.collectives import Collectives
from megamix.mixed_precision.half_params import HalfParams
from megamix.mixed_precision.master_shard import MasterShard


def full_weights(
    model: nn.Module, half_params: HalfParams, master_shard: MasterShard, collectives: Collectives
) -> dict[str, Tensor]:
    """The state dict of `model`, its trained weights taken in FP32 from every rank's masters. Copies, on the host."""
    trained: dict[str, Tensor] = {}
    for index, bucket in enumerate(half_params.layout.buckets):
        full = master_shard.gather(index, collectives)
        for slot in bucket.slots:
            value = full[slot.start : slot.end].view(slot.spec.shape).to("cpu", copy=True)
            trained |= dict.fromkeys((slot.spec.name, *slot.spec.aliases), value)
    own = model.state_dict()
    return {name: trained[name] if name in trained else tensor.to("cpu", copy=True) for name, tensor in own.items()}


def load_weights(
    state_dict: Mapping[str, Tensor], model: nn.Module, half_params: HalfParams, master_shard: MasterShard
) -> None:
    """Set masters and half parameters from full FP32 weights, and copy what the buckets do not hold into the module.

    Raises: ValueError naming every missing, unknown or misshapen entry, before anything is changed.
    """
    own = model.state_dict()
    problems = [f"missing {name}" for name in own if name not in state_dict]
    problems += [f"unknown {name}" for name in state_dict if name not in own]
    problems += [
        f"{name} has shape {tuple(state_dict[name].shape)}, the model's has {tuple(tensor.shape)}"
        for name, tensor in own.items()
        if name in state_dict and state_dict[name].shape != tensor.shape
    ]
    if problems:
        raise ValueError("load_weights() needs exactly the module's entries: " + "; ".join(problems))
    trained = set()
    for index, bucket in enumerate(half_params.layout.buckets):
        full = half_params.full_precision(index, state_dict)
        master_shard.take(index, full)
        half_params.flat[index].copy_(full)
        trained |= {name for slot in bucket.slots for name in (slot.spec.name, *slot.spec.aliases)}
    for name, tensor in own.items():
        if name not in trained:
            tensor.copy_(state_dict[name])
