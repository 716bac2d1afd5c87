"""Weights into the engine and out of it: the module's own weights, a state dict's, or those that a function draws."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from megamix.base.names import by_plain_name
from megamix.comm.collectives import Collectives
from megamix.mixed_precision.bucket import Bucket
from megamix.mixed_precision.census import Entries, Entry, Links
from megamix.mixed_precision.flat_layout import ParamSpec
from megamix.mixed_precision.update_slice import MASTER

_MOST_TOLD = 8  # most entries that a message lists for each kind of problem; another model may differ in hundreds

# Writes the initial values of a parameter's flattened block, from element number `start` on, into FP32 (n,).
Fill = Callable[[ParamSpec, int, Tensor], None]


def without_values(model: nn.Module, device: torch.device) -> None:
    """Replace each trainable parameter by one on `device` without memory for its values, for an engine with `fill`.
    Shared parameters stay shared; frozen parameters and buffers stay as they are.
    """
    empty: dict[nn.Parameter, nn.Parameter] = {}
    for name, param in [*model.named_parameters(remove_duplicate=False)]:
        if param.requires_grad:
            if param not in empty:
                element = torch.zeros((), dtype=param.dtype, device=device)
                empty[param] = nn.Parameter(element.expand(param.shape))
            put_parameter(model, name, empty[param])


def put_parameter(model: nn.Module, name: str, param: nn.Parameter) -> None:
    path, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(path), attribute, param)


def full_weights(model: nn.Module, buckets: Sequence[Bucket], entries: Entries, links: Links) -> dict[str, Tensor]:
    """Return the state dict of the model that all ranks train, copied to the host. Trained weights are in FP32, from
    every rank's masters, or from their average where it is shown. `entries`: parameters and buffers of the whole model.
    """
    trained: dict[str, Tensor] = {}
    for bucket in buckets:
        flat = bucket.owners.gather(bucket.shown).view(-1)
        for slot in bucket.plan.slots:
            value = _whole(flat[slot.start : slot.end], slot.spec, links).to("cpu", copy=True)
            trained |= dict.fromkeys((slot.spec.name, *slot.spec.aliases), value)
    # Without keep_vars torch would read the values of freed parameters.
    own = by_plain_name(model.state_dict(keep_vars=True).items())
    weights = {
        name: trained[name] if name in trained else tensor.detach().to("cpu", copy=True) for name, tensor in own.items()
    }
    if links.pp.axis.size == 1:
        return weights
    return _of_all_stages(weights, [*entries.params, *entries.buffers], links.pp, links.device)


def _of_all_stages(
    own: Mapping[str, Tensor], entries: Sequence[Entry], pp: Collectives, device: torch.device
) -> dict[str, Tensor]:
    """Return this rank's weights, and every entry from the first rank of `pp` that holds it."""
    held = pp.table(torch.tensor([entry.name in own for entry in entries], dtype=torch.uint8, device=device))
    weights = {**own}
    for entry, source in zip(entries, held.argmax(0).tolist(), strict=True):
        if entry.name in own:
            weight = own[entry.name].to(device).contiguous()
        else:
            dtype = getattr(torch, entry.dtype.removeprefix("torch."))
            weight = torch.empty(entry.full_shape, dtype=dtype, device=device)
        pp.broadcast(weight, source)
        weights |= dict.fromkeys((entry.name, *entry.aliases), weight.cpu())
    return weights


def _whole(block: Tensor, spec: ParamSpec, links: Links) -> Tensor:
    """Join all ranks' blocks of a parameter, which follow each other in one dim. Shapes: block (numel,)."""
    if spec.shape == spec.full_shape:
        return block.view(spec.shape)
    (dim,) = (dim for dim, size in enumerate(spec.shape) if size != spec.full_shape[dim])
    return torch.cat([part.view(spec.shape) for part in links.along[spec.along].gather(block)], dim)


def take_over(model: nn.Module, buckets: Sequence[Bucket], links: Links, dtype: torch.dtype, fill: Fill | None) -> None:
    """Take the module's weights into masters and half parameters.

    Without `fill` each bucket takes the values of its first owner on the first replica. `fill` writes each owner's
    masters, and the half parameters become their casts. Frozen parameters, cast to `dtype`, and buffers, in their own
    dtypes, take the values of the first data-parallel rank on the first replica.
    """
    params = by_plain_name(model.named_parameters())
    if fill is not None:
        for bucket in buckets:
            for owned in bucket.owned_ranges():
                fill(owned.spec, owned.start, owned.tensors[MASTER])
    for bucket in buckets:
        if fill is None:
            full = bucket.flattened(params)
            bucket.owners.broadcast(full)
            links.replicas.broadcast(full)
            bucket.master.copy_(bucket.owners.own_part(full))
        else:
            full = bucket.owners.gather(bucket.master.to(dtype)).view(-1)
        bucket.adopt(params, full)
        del full  # frees this buffer before the next bucket needs one
    frozen = [param for param in model.parameters() if not param.requires_grad or not param.numel()]
    for param in frozen:
        if param.is_floating_point():
            param.data = param.data.to(dtype)
    for tensor in (*(param.data for param in frozen), *model.buffers()):
        links.owners[0].broadcast(tensor)
        links.replicas.broadcast(tensor)


def misfit_names(
    given: Mapping[str, tuple[int, ...]],
    own: Mapping[str, tuple[int, ...]],
    *,
    may_lack: Collection[str] = (),
    may_have: Collection[str] = (),
) -> list[str]:
    """Return the differences from the model's own names and shapes: the first of each kind, and how many more."""
    kinds = {
        "missing": [f"missing {name}" for name in own if name not in given and name not in may_lack],
        "unknown": [f"unknown {name}" for name in given if name not in own and name not in may_have],
        "of another shape": [
            f"{name} has shape {given[name]}, the model's has {shape}"
            for name, shape in own.items()
            if given.get(name, shape) != shape
        ],
    }
    for kind, lines in kinds.items():
        if (more := len(lines) - _MOST_TOLD) > 0:
            lines[_MOST_TOLD:] = [f"and {more} more {kind}"]
    return [line for lines in kinds.values() for line in lines]


def load_weights(
    state_dict: Mapping[str, Tensor], model: nn.Module, buckets: Sequence[Bucket], entries: Entries
) -> None:
    """Set masters and half parameters from full FP32 weights, and copy all other entries into the module. `entries`:
    those of the whole model. Weights that only other ranks hold are ignored.

    Raises: ValueError naming the first missing, unknown and misshapen entries, and the first parameters with values
    that their dtype cannot hold, before anything is changed.
    """
    own = by_plain_name(model.state_dict(keep_vars=True).items())
    weights = by_plain_name(state_dict.items())
    trained = {
        name: slot.spec.full_shape
        for bucket in buckets
        for slot in bucket.plan.slots
        for name in (slot.spec.name, *slot.spec.aliases)
    }
    shapes = {name: trained.get(name, tuple(tensor.shape)) for name, tensor in own.items()}
    given = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    elsewhere = {name for entry in (*entries.params, *entries.buffers) for name in (entry.name, *entry.aliases)}
    if problems := misfit_names(given, shapes, may_have=elsewhere):
        raise ValueError("load_weights() needs exactly the module's entries: " + "; ".join(problems))
    dtypes = {name: tensor.dtype for name, tensor in own.items() if isinstance(tensor, nn.Parameter)}
    half = buckets[0].params.dtype
    of_all_ranks = {name: half for entry in entries.params for name in (entry.name, *entry.aliases)}
    for name, dtype in (dtypes | of_all_ranks).items():
        if dtype.is_floating_point and name in weights:
            values, limit = weights[name].detach().float(), torch.finfo(dtype).max
            if name not in of_all_ranks:
                values = values[~values.isinf()]  # frozen parameters may hold inf, as a mask does
            largest = float(values.abs().max()) if values.numel() else 0.0
            if not largest <= limit:  # NaN is refused, too
                raise ValueError(
                    f"load_weights() takes finite values: {name} has {largest:.6g}, and {dtype} holds up to {limit:.5g}"
                )
    for bucket in buckets:
        specs = [slot.spec for slot in bucket.plan.slots]
        bucket.load(bucket.flattened({spec.name: weights[spec.name][spec.block] for spec in specs}))
    for name, tensor in own.items():
        if name not in trained:
            tensor.detach().copy_(weights[name])
