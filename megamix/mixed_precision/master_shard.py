"""The FP32 truth: this rank's share of the master weights and optimizer states; full weights out of it and into it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megamix.comm.collectives import Collectives, make_collectives
from megamix.comm.topology import Topology
from megamix.mixed_precision.flat_layout import FlatLayout, ParamSpec
from megamix.mixed_precision.half_params import Entry, HalfParams
from megamix.mixed_precision.optimizers import MASTER, States, UpdateGroup
from megamix.names import by_plain_name

_MOST_TOLD = 8  # entries of each kind: a model of another kind differs in hundreds


class OwnedRange(NamedTuple):
    """A run of one parameter's elements, flattened, from number `start` on, that this rank owns."""

    spec: ParamSpec
    start: int
    tensors: States  # (n,) each, views: "master" in FP32, then the optimizer's states


# Writes the initial values of a parameter's block, flattened, from number `start` on, into FP32 (n,).
Fill = Callable[[ParamSpec, int, Tensor], None]


class MasterShard:
    """Per bucket: `master[k]` FP32 (shard_numel,). `runs[k]`: the pieces of bucket k's shard that belong to one
    optimizer group each, counted from the shard's start; `states[k]`: for each of these the states of its group, as
    long as the run and in their own dtypes, zeros at the start. `collectives[k]`: among the owners of bucket k, each of
    which has a shard of it.
    """

    def __init__(
        self, layout: FlatLayout, collectives: Sequence[Collectives], groups: Sequence[UpdateGroup],
        device: torch.device,
    ):  # fmt: skip
        self.layout, self.collectives = layout, collectives
        self.master = [torch.zeros(bucket.shard_numel, device=device) for bucket in layout.buckets]
        self.runs = [
            bucket.shard_runs(among.axis.rank) for bucket, among in zip(layout.buckets, collectives, strict=True)
        ]
        self.states = [
            [groups[run.group].new_states(run.end - run.start, device) for run in runs] for runs in self.runs
        ]

    def take(self, bucket: int, full: Tensor) -> None:
        """Copy this rank's part of a whole bucket. Shapes: full FP32 (padded_numel,)."""
        self.master[bucket].copy_(self.collectives[bucket].own_part(full))

    def states_of(self, bucket: int, start: int, end: int) -> States:
        """Return the states of the elements [start, end) of a bucket's shard, which lie in one run: views."""
        number = next(number for number, run in enumerate(self.runs[bucket]) if start < run.end)
        first = self.runs[bucket][number].start
        return {name: state[start - first : end - first] for name, state in self.states[bucket][number].items()}

    @property
    def state_bytes(self) -> int:
        """Return the bytes of all states that this rank holds."""
        return sum(state.nbytes for by_run in self.states for states in by_run for state in states.values())

    def owned_ranges(self) -> Iterator[OwnedRange]:
        """Yield every element of a parameter that this rank owns, without the padding."""
        for index, bucket in enumerate(self.layout.buckets):
            for piece in bucket.shard_pieces(self.collectives[index].axis.rank):
                if piece.numel:
                    states = self.states_of(index, piece.start, piece.start + piece.numel)
                    yield OwnedRange(piece.spec, piece.first, {MASTER: self.master[index][piece.elements], **states})

    def state_dict(self) -> dict[str, Any]:
        """Return copies of this rank's shards and optimizer states of all buckets."""
        return {
            "master": [master.clone() for master in self.master],
            "states": [tuple(map(torch.cat, parts)) for parts in self._parts_by_name()],
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Copy back what `state_dict` gave."""
        torch._foreach_copy_(self.master, saved["master"])
        for parts, wholes in zip(self._parts_by_name(), saved["states"], strict=True):
            for own_parts, whole in zip(parts, wholes, strict=True):
                torch._foreach_copy_(own_parts, whole.split([own.numel() for own in own_parts]))

    def _parts_by_name(self) -> list[list[list[Tensor]]]:
        """Per bucket, per name of a state: that state of all runs that have it."""
        found = []
        for by_run in self.states:
            names = dict.fromkeys(name for states in by_run for name in states)
            found.append([[states[name] for states in by_run if name in states] for name in names])
        return found

    def gather(self, bucket: int) -> Tensor:
        """Return a whole bucket's master weights, from its owners: FP32 (padded_numel,). All of them must call it."""
        return self.collectives[bucket].gather(self.master[bucket]).view(-1)


def full_weights(
    model: nn.Module, half_params: HalfParams, master_shard: MasterShard, entries: Sequence[Entry],
    tp: Collectives, pp: Collectives,
) -> dict[str, Tensor]:  # fmt: skip
    """Return the state dict of the model that all ranks train, its trained weights taken in FP32 from every rank's
    masters. Copies, on the host.

    `entries`: of the whole model. `tp`: among the ranks that divide this rank's parameters; `pp`: among those that hold
    others.
    """
    trained: dict[str, Tensor] = {}
    for index, bucket in enumerate(half_params.layout.buckets):
        flat = master_shard.gather(index)
        for slot in bucket.slots:
            value = _whole(flat[slot.start : slot.end], slot.spec, tp).to("cpu", copy=True)
            trained |= dict.fromkeys((slot.spec.name, *slot.spec.aliases), value)
    # keep_vars: else the values of those that are not there would be asked for
    own = by_plain_name(model.state_dict(keep_vars=True).items())
    weights = {
        name: trained[name] if name in trained else tensor.detach().to("cpu", copy=True) for name, tensor in own.items()
    }
    return _of_all_stages(weights, entries, pp, master_shard.master[0].device) if pp.axis.size > 1 else weights


def _of_all_stages(
    own: Mapping[str, Tensor], entries: Sequence[Entry], pp: Collectives, device: torch.device
) -> dict[str, Tensor]:
    """Return what this rank has, and every entry from the first of `pp` that holds it."""
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


def _whole(block: Tensor, spec: ParamSpec, tp: Collectives) -> Tensor:
    """Join all ranks' blocks of a parameter, which lie one behind the other in one dim. Shapes: block (numel,)."""
    if spec.shape == spec.full_shape:
        return block.view(spec.shape)
    (dim,) = (dim for dim, size in enumerate(spec.shape) if size != spec.full_shape[dim])
    return torch.cat([part.view(spec.shape) for part in tp.table(block)], dim)


def take_over(
    model: nn.Module, half_params: HalfParams, master_shard: MasterShard, collectives: Sequence[Collectives],
    dp: Collectives, topology: Topology, fill: Fill | None,
) -> None:  # fmt: skip
    """Take the module's weights, those of each bucket's first owner, into masters and half parameters; with `fill` each
    owner has its masters written, and the half parameters are their casts. What no bucket holds is the first
    data-parallel rank's, frozen parameters in half, buffers as they are. Of replicas it is all the first one's.
    """
    replicas = make_collectives(topology.replicas, master_shard.master[0].device)
    if fill is not None:
        for owned in master_shard.owned_ranges():
            fill(owned.spec, owned.start, owned.tensors[MASTER])
    for bucket, among in enumerate(collectives):
        if fill is None:
            full = half_params.full_precision(bucket)
            among.broadcast(full)
            replicas.broadcast(full)
            master_shard.take(bucket, full)
        else:
            full = among.gather(master_shard.master[bucket].to(half_params.dtype)).view(-1)
        half_params.install(full, among)
        del full  # before the next one comes
    frozen = [param for param in model.parameters() if not param.requires_grad or not param.numel()]
    for param in frozen:
        if param.is_floating_point():
            param.data = param.data.to(half_params.dtype)
    for tensor in (*(param.data for param in frozen), *model.buffers()):
        dp.broadcast(tensor)
        replicas.broadcast(tensor)


def misfit_names(
    given: Mapping[str, tuple[int, ...]], own: Mapping[str, tuple[int, ...]], *, may_lack: Collection[str] = (),
    may_have: Collection[str] = (),
) -> list[str]:  # fmt: skip
    """Return which shapes by name differ from the model's own: the first of each kind, and how many more there are."""
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
    state_dict: Mapping[str, Tensor], model: nn.Module, half_params: HalfParams, master_shard: MasterShard,
    params: Sequence[Entry], buffers: Sequence[Entry],
) -> None:  # fmt: skip
    """Set masters and half parameters from full FP32 weights, and copy what the buckets do not hold into the module.
    `params`, `buffers`: of the whole model; those that other ranks hold are left to these.

    Raises: ValueError naming the first missing, unknown and misshapen entries, and the first parameters with values
    that their dtype cannot hold, before anything is changed.
    """
    own = by_plain_name(model.state_dict(keep_vars=True).items())
    weights = by_plain_name(state_dict.items())
    trained = {
        name: slot.spec.full_shape
        for bucket in half_params.layout.buckets
        for slot in bucket.slots
        for name in (slot.spec.name, *slot.spec.aliases)
    }
    shapes = {name: trained.get(name, tuple(tensor.shape)) for name, tensor in own.items()}
    given = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    elsewhere = {name for entry in (*params, *buffers) for name in (entry.name, *entry.aliases)}
    if problems := misfit_names(given, shapes, may_have=elsewhere):
        raise ValueError("load_weights() needs exactly the module's entries: " + "; ".join(problems))
    dtypes = {name: tensor.dtype for name, tensor in own.items() if isinstance(tensor, nn.Parameter)}
    of_all_ranks = {name: half_params.dtype for entry in params for name in (entry.name, *entry.aliases)}
    for name, dtype in (dtypes | of_all_ranks).items():
        if dtype.is_floating_point and name in weights:
            values, limit = weights[name].detach().float(), torch.finfo(dtype).max
            if name not in of_all_ranks:
                values = values[~values.isinf()]  # what is frozen may have them, as a mask
            largest = float(values.abs().max()) if values.numel() else 0.0
            if not largest <= limit:  # NaN neither
                raise ValueError(
                    f"load_weights() takes finite values: {name} has {largest:.6g}, and {dtype} holds up to {limit:.5g}"
                )
    for index in range(len(half_params.layout.buckets)):
        full = half_params.full_precision(index, weights)
        master_shard.take(index, full)
        half_params.put(index, full)
    for name, tensor in own.items():
        if name not in trained:
            tensor.detach().copy_(weights[name])
