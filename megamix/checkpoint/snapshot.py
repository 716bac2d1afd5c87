"""What one rank holds of a run's state, and where it belongs in the full, unsharded parameters.

It is saved as the snapshot of one instant: views of the engine, or a copy that training leaves alone.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor

from megamix.checkpoint.boxes import Box, boxes_of_range
from megamix.checkpoint.manifest import BUFFER, MASTER, Dtype, LayoutRecord, Manifest, ParamRecord, RunRecord, StateSet
from megamix.mixed_precision.engine import ShardedEngine
from megamix.mixed_precision.flat_layout import ParamSpec
from megamix.mixed_precision.half_params import SAVED_DTYPES, Entry
from megamix.mixed_precision.optimizers import Optimizer

DTYPES: dict[str, torch.dtype] = dict(zip(get_args(Dtype), SAVED_DTYPES, strict=True))
DTYPE_NAMES: dict[str, Any] = {str(dtype): name for name, dtype in DTYPES.items()}  # each of a Literal type


@dataclass(frozen=True, slots=True)
class StateBox:
    """A box of one state of one parameter, or of a buffer."""

    param: str
    state: str
    box: Box


@dataclass(frozen=True, slots=True)
class Part(StateBox):
    """A box with the memory that holds it: (box.numel,) or the box's shape."""

    tensor: Tensor


def state_set(optimizer: Optimizer, name: str, shape: tuple[int, ...]) -> StateSet:
    """Return the states that the optimizer has of a parameter, the master first."""
    states = optimizer.states(name, shape).items()
    return {MASTER: "F32", **{state: DTYPE_NAMES[str(dtype)] for state, dtype in states}}


def state_sets(engine: ShardedEngine) -> list[tuple[Entry, StateSet]]:
    """Return what there is to save of the whole model: every parameter, then every buffer."""
    params = [(entry, state_set(engine.optimizer, entry.name, entry.full_shape)) for entry in engine.params]
    return [*params, *((entry, {BUFFER: DTYPE_NAMES[entry.dtype]}) for entry in engine.buffers)]


def parts_of_range(spec: ParamSpec, state: str, start: int, flat: Tensor) -> Iterator[Part]:
    """Cut a flat range of the block that the rank trains into parts of the full parameter.

    `start`: the place in the block of the first of `flat`'s elements. Shapes: flat (n,) -> views of it.
    """
    done = 0
    for box in boxes_of_range(start, start + flat.numel(), Box(spec.offset, spec.shape)):
        yield Part(spec.name, state, box, flat[done : done + box.numel])
        done += box.numel


def owned_parts(engine: ShardedEngine) -> list[Part]:
    """Everything that this rank owns: views of its masters and optimizer states, good until the next step.

    Raises: RuntimeError in the middle of a step.
    """
    parts: list[Part] = []
    for owned in engine.owned_ranges():
        for state, flat in owned.tensors.items():
            parts += parts_of_range(owned.spec, state, owned.start, flat)
    return parts


def buffer_parts(engine: ShardedEngine) -> list[Part]:
    """Return the buffers of this rank's module, as they are."""
    held = dict(engine.module.named_buffers(remove_duplicate=False))
    own = [entry for entry in engine.buffers if entry.name in held]
    return [Part(entry.name, BUFFER, Box.whole(entry.full_shape), held[entry.name]) for entry in own]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one rank saves."""

    manifest: Manifest  # its files still to be named; the same on every rank
    parts: Sequence[Part]

    @property
    def largest_size(self) -> int:
        """Bytes that all ranks together will not exceed: the states, and room for names."""
        size = sum(DTYPES[dtype].itemsize * math.prod(shape) for _, _, shape, dtype in self.manifest.tensors())
        return int(size * 1.01) + (1 << 20)


def take_snapshot(engine: ShardedEngine, run: RunRecord) -> Snapshot:
    """Return the engine's state between two steps: views, so save it before the next one. Reads the device."""
    sets = [(entry, tuple(states.items())) for entry, states in state_sets(engine)]
    places = {states: place for place, states in enumerate(dict.fromkeys(states for _, states in sets))}
    manifest = Manifest(
        applied_updates=int(engine.applied_updates),
        skipped_steps=int(engine.skipped_steps),
        loss_scale={name: value.double().tolist() for name, value in engine.loss_scale.state_dict().items()},
        loss_scale_rule=engine.loss_scale.rule,
        run=run,
        layout=LayoutRecord(
            dp_size=engine.topology.dp.size,
            tp_size=engine.topology.tp.size,
            pp_size=engine.topology.pp.size,
            buckets=tuple(bucket.padded_numel for bucket in engine.layout.buckets),
        ),
        states=tuple(map(dict, places)),
        params=tuple(
            ParamRecord(name=entry.name, shape=entry.full_shape, aliases=entry.aliases, states=places[states])
            for entry, states in sets
        ),
    )
    parts = owned_parts(engine) if engine.topology.saves_shard else []
    if engine.topology.stage.rank == 0:
        first = {entry.name for entry in engine.buffers if entry.stage == engine.topology.pp.rank}
        own = (part for part in buffer_parts(engine) if part.param in first)
        parts += [replace(part, tensor=part.tensor.contiguous()) for part in own]
    # The widest first, so that in a file and in the host's memory each begins at a multiple of its elements' size.
    return Snapshot(manifest, sorted(parts, key=lambda part: -part.tensor.itemsize))


class HostCopy:
    """Memory of the host for one snapshot, used again by the next: on a GPU pinned, so that the device copies into it
    while the host goes on.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._copied: torch.cuda.Event | None = None

    def take(self, snapshot: Snapshot) -> Snapshot:
        """Start copying. The engine may go on at once: on a GPU its next step is queued behind the copy."""
        sizes = [part.tensor.nbytes for part in snapshot.parts]
        on_gpu = any(part.tensor.is_cuda for part in snapshot.parts)
        if self._memory.numel() != sum(sizes):
            self._memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=on_gpu)
        in_bytes = zip(snapshot.parts, torch.split(self._memory, sizes), strict=True)
        pieces = [piece.view(part.tensor.dtype) for part, piece in in_bytes]
        for part, piece in zip(snapshot.parts, pieces, strict=True):
            piece.copy_(part.tensor.view(-1), non_blocking=True)
        if on_gpu:  # pragma: CUDA only
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # no types
            self._copied.record()
        parts = [replace(part, tensor=piece) for part, piece in zip(snapshot.parts, pieces, strict=True)]
        return replace(snapshot, parts=parts)

    def wait(self) -> None:
        """Return once the copy is whole; for any thread."""
        if self._copied is not None:  # pragma: CUDA only
            self._copied.synchronize()
