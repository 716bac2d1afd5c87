"""What one rank holds of a run's state, and where it belongs in the full, unsharded parameters.

It is saved as the snapshot of one instant: views of the engine, or a copy that training leaves alone.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megamix.checkpoint.boxes import Box, boxes_of_range
from megamix.checkpoint.manifest import MASTER, LayoutRecord, Manifest, ParamRecord, RunRecord
from megamix.mixed_precision.engine import ShardedEngine
from megamix.mixed_precision.flat_layout import ParamSpec


@dataclass(frozen=True, slots=True)
class StateBox:
    """A box of one state of one parameter."""

    param: str
    state: str
    box: Box


@dataclass(frozen=True, slots=True)
class Part(StateBox):
    """A box with the memory that holds it: FP32 (box.numel,), contiguous."""

    tensor: Tensor


def state_names(engine: ShardedEngine) -> tuple[str, ...]:
    return MASTER, *engine.optimizer.state_names


def parts_of_range(spec: ParamSpec, state: str, start: int, flat: Tensor) -> Iterator[Part]:
    """Cut a flat range of the block that the rank trains into parts of the full parameter.

    `start`: the place in the block of the first of `flat`'s elements. Shapes: flat FP32 (n,) -> views of it.
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
        for state, flat in zip(state_names(engine), owned.tensors, strict=True):
            parts += parts_of_range(owned.spec, state, owned.start, flat)
    return parts


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one rank saves."""

    manifest: Manifest  # its files still to be named; the same on every rank
    parts: Sequence[Part]

    @property
    def largest_size(self) -> int:
        """Bytes that all ranks together will not exceed: the FP32 states, and room for names."""
        numel = sum(math.prod(param.shape) for param in self.manifest.params)
        return int(4 * numel * len(self.manifest.states) * 1.01) + (1 << 20)


def take_snapshot(engine: ShardedEngine, run: RunRecord) -> Snapshot:
    """Return the engine's state between two steps: views, so save it before the next one. Reads the device."""
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
        states=state_names(engine),
        params=tuple(
            ParamRecord(name=spec.name, shape=spec.full_shape, aliases=spec.aliases) for spec in engine.params
        ),
    )
    return Snapshot(manifest, owned_parts(engine))


class HostCopy:
    """Memory of the host for one snapshot, used again by the next: on a GPU pinned, so that the device copies into it
    while the host goes on.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0)
        self._copied: torch.cuda.Event | None = None

    def take(self, snapshot: Snapshot) -> Snapshot:
        """Start copying. The engine may go on at once: on a GPU its next step is queued behind the copy."""
        numel = sum(part.box.numel for part in snapshot.parts)
        on_gpu = any(part.tensor.is_cuda for part in snapshot.parts)
        if self._memory.numel() != numel:
            self._memory = torch.empty(numel, pin_memory=on_gpu)
        pieces: Sequence[Tensor] = torch.split(self._memory, [part.box.numel for part in snapshot.parts])
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
