"""One rank's part of a run's state, and its place in the full, unsharded parameters.

The part is saved as a snapshot of one instant. A snapshot has views of the engine's tensors, or copies that training
does not change.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import get_args

import torch
from torch import Tensor

from megamix.base.axes import AXES
from megamix.base.names import by_plain_name
from megamix.checkpoint.boxes import Box, boxes_of_range
from megamix.checkpoint.manifest import (
    AVERAGE,
    BUFFER,
    MASTER,
    Dtype,
    LayoutRecord,
    Manifest,
    ParamRecord,
    RunRecord,
    StateSet,
)
from megamix.mixed_precision.census import SAVED_DTYPES, Entry
from megamix.mixed_precision.engine import ShardedEngine
from megamix.mixed_precision.optim.optimizer import Optimizer

DTYPES: dict[str, torch.dtype] = dict(zip(get_args(Dtype), SAVED_DTYPES, strict=True))
DTYPE_NAMES = {str(dtype): name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class StateBox:
    """A box of one state of one parameter, or of a buffer."""

    param: str
    state: str
    box: Box


@dataclass(frozen=True, slots=True)
class Part(StateBox):
    """A box with the tensor that holds its values. Shapes: (box.numel,) or box.size."""

    tensor: Tensor


def state_set(optimizer: Optimizer, name: str, shape: tuple[int, ...]) -> StateSet:
    """Return the states that the optimizer keeps for a parameter, the master first."""
    states = optimizer.states(name, shape).items()
    lengths = optimizer.state_lengths(name, shape).items()
    own = {state: f"F32[{length}]" for state, length in lengths}
    return {MASTER: "F32", **{state: DTYPE_NAMES[str(dtype)] for state, dtype in states}, **own}


def state_sets(engine: ShardedEngine, frozen: bool = True) -> list[tuple[Entry, StateSet]]:
    """Return everything that the whole model has to save: every parameter, then every buffer and, if `frozen`, every
    frozen parameter, each with its states.
    """
    fixed = saved_frozen(engine).items() if frozen else ()
    held = [Entry(name, tuple(param.shape), str(param.dtype), stage=0) for name, param in fixed]
    entries, optimizer = engine.plan.entries, engine.optimizer
    kept: StateSet = {} if engine.average_decay is None else {AVERAGE: "F32"}
    params = [(entry, state_set(optimizer, entry.name, entry.full_shape) | kept) for entry in entries.params]
    return [*params, *((entry, {BUFFER: DTYPE_NAMES[entry.dtype]}) for entry in (*entries.buffers, *held))]


def parts_of_range(param: str, state: str, block: Box, start: int, flat: Tensor) -> Iterator[Part]:
    """Cut a flat range of a block into parts of the full parameter.

    `start`: the index in the block of `flat`'s first element. Shapes: flat (n,) -> parts that are views of it.
    """
    done = 0
    for box in boxes_of_range(start, start + flat.numel(), block):
        yield Part(param, state, box, flat[done : done + box.numel])
        done += box.numel


def owned_parts(engine: ShardedEngine) -> list[Part]:
    """Return everything that this rank owns: views of its masters, their average and optimizer states. The next step
    overwrites them.

    Raises: RuntimeError in the middle of a step.
    """
    parts = list[Part]()
    for owned in (*engine.owned_ranges(), *engine.held_states()):
        spec = owned.spec
        for state, flat in owned.tensors.items():
            parts += parts_of_range(spec.name, state, Box(spec.offset, spec.shape), owned.start, flat)
    return parts


def buffer_parts(engine: ShardedEngine) -> list[Part]:
    """Return the buffers and frozen parameters of this rank's module, without copies."""
    held = by_plain_name(engine.module.named_buffers(remove_duplicate=False))
    own = [entry for entry in engine.plan.entries.buffers if entry.name in held]
    tensors = {entry.name: held[entry.name] for entry in own} | saved_frozen(engine)
    return [Part(name, BUFFER, Box.whole(tuple(tensor.shape)), tensor) for name, tensor in tensors.items()]


def frozen_params(engine: ShardedEngine) -> dict[str, Tensor]:
    params = by_plain_name(engine.module.named_parameters()).items()
    return {name: param.detach() for name, param in params if not param.requires_grad and param.numel()}


def saved_frozen(engine: ShardedEngine) -> dict[str, Tensor]:
    """Return the frozen parameters that are saved as buffers are: none along a plugin's axis that divides the model,
    whose ranks each know their own part, and none of a dtype that no file can hold.
    """
    if any(size > 1 and AXES[name].weights == "divided" for name, size in engine.topology.sizes.items()):
        return {}
    return {name: param for name, param in frozen_params(engine).items() if str(param.dtype) in DTYPE_NAMES}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Holds what one rank saves."""

    manifest: Manifest  # equal on every rank; `files` is still empty
    parts: Sequence[Part]

    @property
    def largest_size(self) -> int:
        """Return an upper bound of the bytes of all ranks' files together: the states, and room for names."""
        size = sum(DTYPES[dtype].itemsize * math.prod(shape) for _, _, shape, dtype in self.manifest.tensors())
        return int(size * 1.01) + (1 << 20)

    def weights(self) -> "Snapshot":
        """Return the masters and buffers alone, without the state of the training: a new run may begin with them."""
        kept = tuple({it: held[it] for it in (MASTER, BUFFER) if it in held} for held in self.manifest.states)
        manifest = Manifest(
            applied_updates=0, skipped_steps=0, loss_scale={}, run=RunRecord(config=self.manifest.run.config),
            layout=self.manifest.layout, states=kept, params=self.manifest.params,
        )  # fmt: skip
        return Snapshot(manifest, [part for part in self.parts if part.state in (MASTER, BUFFER)])


def manifest_of(engine: ShardedEngine, run: RunRecord, frozen: bool = True) -> Manifest:
    """Return the manifest of the engine's state as it is now, without files. The host waits for the device."""
    sets = [(entry, tuple(states.items())) for entry, states in state_sets(engine, frozen)]
    places = {states: place for place, states in enumerate(dict.fromkeys(states for _, states in sets))}
    return Manifest(
        applied_updates=int(engine.applied_updates),
        skipped_steps=int(engine.skipped_steps),
        loss_scale={name: value.double().tolist() for name, value in engine.loss_scale.state_dict().items()},
        loss_scale_rule=engine.loss_scale.rule,
        run=run,
        layout=LayoutRecord(
            axes=dict(engine.topology.sizes),
            buckets=tuple(bucket.padded_numel for bucket in engine.plan.layout.buckets),
        ),
        states=tuple(map(dict, places)),
        params=tuple(
            ParamRecord(name=entry.name, shape=entry.full_shape, aliases=entry.aliases, states=places[states])
            for entry, states in sets
        ),
    )


def take_snapshot(engine: ShardedEngine, run: RunRecord, frozen: bool = True) -> Snapshot:
    """Return the engine's state between two steps, as views: save or copy it before the next step. The host waits for
    the device. `frozen`: with the parameters that are not trained.

    Raises: RuntimeError on every rank if half parameters were written past the engine.
    """
    engine.refuse_unseen_writes()
    manifest = manifest_of(engine, run, frozen)
    parts = owned_parts(engine) if engine.topology.saves_shard else []
    if engine.topology.stage.rank == 0:
        first = {entry.name for entry in engine.plan.entries.buffers if entry.stage == engine.topology.pp.rank}
        first |= {*saved_frozen(engine)} if frozen else set()
        own = (part for part in buffer_parts(engine) if part.param in first)
        parts += [replace(part, tensor=part.tensor.contiguous()) for part in own]
    # The widest dtype comes first, so that in a file and in the host's memory each tensor is aligned to its elements.
    return Snapshot(manifest, sorted(parts, key=lambda part: -part.tensor.itemsize))


def pinned_sizes(size: int) -> list[int]:
    """Return sizes of blocks that together hold `size` bytes, rounded up to 1 MiB. They are powers of two, the largest
    first: torch rounds each pinned block up to a power of two, so 11.2 GiB in one block would take 16 GiB.
    """
    size += -size % (1 << 20)
    return [1 << bit for bit in reversed(range(size.bit_length())) if size >> bit & 1]


def _cut(parts: Iterable[Part], borders: Sequence[int]) -> Iterator[Part]:
    """Cut consecutive parts so that none crosses a border. Units: borders in bytes from the first part on."""
    start = 0
    for part in parts:
        flat, end = part.tensor.view(-1), start + part.tensor.nbytes
        cuts = [(border - start) // flat.itemsize for border in borders if start < border < end]
        for first, last in pairwise([0, *cuts, flat.numel()]):
            yield from parts_of_range(part.param, part.state, part.box, first, flat[first:last])
        start = end


class HostCopy:
    """Host memory for one snapshot; the next snapshot uses it again. If a GPU copies into it, it is pinned, so that the
    host goes on meanwhile.
    """

    def __init__(self) -> None:
        self._blocks = list[Tensor]()
        self._copied: torch.cuda.Event | None = None
        self._device = torch.device("cpu")

    def start(self, snapshot: Snapshot) -> Snapshot:
        """Start copying, and return a snapshot of the copy. The engine may go on at once: on a GPU its next step is
        queued behind the copy.
        """
        size = sum(part.tensor.nbytes for part in snapshot.parts)
        self._device = next((part.tensor.device for part in snapshot.parts if part.tensor.is_cuda), self._device)
        on_gpu = self._device.type == "cuda"
        sizes = pinned_sizes(size) if on_gpu else [size]
        if [block.numel() for block in self._blocks] != sizes:
            self._blocks = [torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=on_gpu) for size in sizes]
        blocks, free, parts = iter(self._blocks), torch.empty(0, dtype=torch.uint8), []
        for part in _cut(snapshot.parts, [*accumulate(sizes)]):
            nbytes = part.tensor.nbytes
            if nbytes > free.numel():
                free = next(blocks)
            chunk, free = free[:nbytes].view(part.tensor.dtype), free[nbytes:]
            chunk.copy_(part.tensor.view(-1), non_blocking=True)
            parts.append(replace(part, tensor=chunk))
        if on_gpu:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # untyped in torch
            self._copied.record()
        return replace(snapshot, parts=parts)

    @contextmanager
    def read(self) -> Iterator[None]:
        """Wait until the copy is complete, which can be read in the block. Any thread may call it."""
        if self._copied is not None:
            # Each thread has its own current device: without this line, waiting would open a context on GPU 0.
            torch.cuda.set_device(self._device)
            self._copied.synchronize()
        yield
