"""A rank's share of the state, copied to the shared memory of its node after a step, and to a rank on another node.

Two slots take turns, so one is whole at any instant. A save beside training writes from the newest slot, which a third
one replaces meanwhile. `in_memory` says what a start makes of the slots. The idea of a checkpoint in the memory of
neighbours is that of Gemini (Wang et al., SOSP 2023).
"""

import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megamix.base.console import say
from megamix.base.durable import write_text
from megamix.checkpoint.manifest import RunRecord
from megamix.checkpoint.slots import RECORD, TENSORS, SlotRecord, remove_slot
from megamix.checkpoint.snapshot import DTYPE_NAMES, Part, Snapshot, buffer_parts, manifest_of, owned_parts
from megamix.checkpoint.tensor_file import key_of, safetensors_header
from megamix.comm.host import HostMessages
from megamix.mixed_precision.engine import ShardedEngine

_CHUNK = 1 << 20  # bytes that are summed at once


def sum_words(data: Tensor) -> int:
    """Return the sum of 64-bit words, modulo 2^64; bytes behind the last whole word count as one. Shapes: (n,), U8."""
    whole = data.numel() // 8 * 8
    total = sum(int(chunk.view(torch.int64).sum()) for chunk in torch.split(data[:whole], _CHUNK))
    return (total + int.from_bytes(bytes(data[whole:].tolist()), "little")) % 2**64


class SharedSlot:
    """A file of fixed size in shared memory, and the record that makes it whole."""

    def __init__(self, home: Path, name: str, size: int):
        self._record = home / f"{name}{RECORD}"
        descriptor = os.open(home / f"{name}{TENSORS}", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)  # a later write to memory that is not there would kill the process
            self._mapped = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)

    @property
    def bytes(self) -> Tensor:
        """Return all bytes of the file, for reading and writing. No tensor of them lives on: it is no process's own."""
        return torch.frombuffer(self._mapped, dtype=torch.uint8)

    def open(self) -> None:
        """Make it a slot that is not whole."""
        self._record.unlink(missing_ok=True)

    def close(self, record: str) -> None:
        try:
            write_text(self._record, record)
        except OSError as error:  # another program has filled the memory
            say(f"megamix train: a mirror is NOT whole: {error}", sys.stderr)


class Mirror:
    """Keeps the newest state of this rank in shared memory. Every rank must make its calls, in the same order.

    `home`: the run's folder there. `record`: what the records of this rank's slots have in common. `left`: names of
    earlier starts' slots, which go when two instants of this start are whole. `make_slots` must follow.
    """

    def __init__(self, engine: ShardedEngine, home: Path, record: SlotRecord, left: Sequence[str]):
        self._engine, self._home, self._left = engine, home, left
        self._owned = owned_parts(engine)
        self._newest: int | None = None  # of the own slots
        self._saving: int | None = None  # the slot from which a save writes
        self._slots = list[SharedSlot]()
        self._held = dict[tuple[int, int], SharedSlot]()  # by giver and slot
        self._at: object = None  # the attempt of the newest slot
        self._taken = 0
        self._messages: HostMessages | None = None
        self._taker: int | None = None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        on_gpu = engine.device.type == "cuda"
        self._stream = torch.cuda.Stream(engine.device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._parts = self._share()
        kinds = {key_of(part): (DTYPE_NAMES[str(part.tensor.dtype)], part.box.size) for part in self._parts}
        self._header = safetensors_header(kinds)
        self.size = len(self._header) + sum(part.tensor.nbytes for part in self._parts)  # of a slot
        self._record = record.model_copy(update={"size": self.size})

    def make_slots(
        self, number: int, messages: HostMessages | None, taker: int | None, givers: Mapping[int, int]
    ) -> None:
        """Take memory for so many slots of this rank and of each giver.

        `messages`: connects the ranks; None: all is on one node. `taker`: the rank that keeps this one's share, too;
        None: no rank. `givers`: sizes of the slots of those that this rank keeps, by rank. Raises: OSError.
        """
        self._messages, self._taker = messages, taker
        for slot in range(number):
            self._slots.append(SharedSlot(self._home, self._name(self._record.rank, slot), self.size))
            self._slots[-1].bytes[: len(self._header)] = torch.frombuffer(bytearray(self._header), dtype=torch.uint8)
            if self._stream is not None:  # so that the host goes on while the GPU copies into it
                at = self._slots[-1].bytes
                torch.cuda.cudart().cudaHostRegister(at.data_ptr(), at.numel(), 0)  # type: ignore[no-untyped-call]
            for giver, size in givers.items():
                self._held[giver, slot] = SharedSlot(self._home, self._name(giver, slot), size)

    def take(self, run: RunRecord) -> None:
        """Copy the state as it is now, between two steps, of which all outcomes are known. `finish` ends it."""
        self.finish()
        number = next(it for it in range(3) if it not in (self._newest, self._saving))
        self._slots[number].open()
        changes = {"slot": number, "manifest": manifest_of(self._engine, run)}
        total = self._copy(self._slots[number])
        self._newest, self._at = number, run.progress["attempts"]
        end = partial(self._end, self._record.model_copy(update=changes), total)
        self._thread = threading.Thread(target=self._noting, args=(end,), name="mirror", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until the newest copy is whole, here and on the other node. Call it before the next update."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def start(self, snapshot: Snapshot) -> Snapshot:
        """Return a snapshot of the copy of this instant, as `HostCopy.start` does. `read` must follow."""
        run = snapshot.manifest.run
        if self._at != run.progress["attempts"]:
            self.take(run)
        assert self._newest is not None
        self._saving = self._newest
        copied = {key_of(part): part for part in self._views(self._slots[self._saving])}
        return replace(snapshot, parts=[copied[key_of(part)] for part in snapshot.parts])

    @contextmanager
    def read(self) -> Iterator[None]:
        """Wait until the copy of a snapshot is complete, which stays until the end of the block. Any thread may call
        it.
        """
        if (thread := self._thread) is not None:
            thread.join()
        yield
        self._saving = None  # if the save has failed, the slot stays until the next one

    def _share(self) -> list[Part]:
        """Return all that this rank has, so that a rank in its place needs no other file."""
        buffers = [replace(part, tensor=part.tensor.contiguous()) for part in buffer_parts(self._engine)]
        if self._stream is not None:  # the next forward, which may move a buffer, runs beside the copy
            moving = {entry.name for entry in self._engine.plan.entries.buffers}
            buffers = [replace(it, tensor=it.tensor.clone()) if it.param in moving else it for it in buffers]
        return sorted([*self._owned, *buffers], key=lambda part: -part.tensor.itemsize)  # as in a checkpoint

    def _name(self, rank: int, slot: int) -> str:
        return self._record.model_copy(update={"rank": rank, "slot": slot}).name

    def _views(self, slot: SharedSlot) -> Iterator[Part]:
        done = len(self._header)
        for part in self._parts:
            end = done + part.tensor.nbytes
            yield replace(part, tensor=slot.bytes[done:end].view(part.tensor.dtype))
            done = end

    def _copy(self, slot: SharedSlot) -> int:
        """Copy the share into a slot. Return the sum of the slot's words; on a GPU the copy is only begun."""
        self._parts = self._share()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._engine.device))
        total = summed = 0
        end = len(self._header)
        with torch.cuda.stream(self._stream):
            for part, copied in zip(self._parts, self._views(slot), strict=True):
                copied.tensor.copy_(part.tensor.view(-1), non_blocking=True)
                end += part.tensor.nbytes
                if self._stream is None:  # it is still in the cache
                    total += sum_words(slot.bytes[summed : end // 8 * 8])
                    summed = end // 8 * 8
        return (total + sum_words(slot.bytes[summed:])) % 2**64 if self._stream is None else 0

    def _noting(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # the main thread raises it
            self._error = error

    def _end(self, record: SlotRecord, total: int) -> None:
        slot = self._slots[record.slot]
        if self._stream is not None:
            torch.cuda.set_device(self._engine.device)  # each thread has its own
            self._stream.synchronize()
            total = sum_words(slot.bytes)
        text = record.model_copy(update={"total": total}).model_dump_json(by_alias=True)
        slot.close(text)
        if self._messages is not None:
            self._exchange(self._messages, text, slot)
        self._taken += 1
        if self._taken == 2:
            for name in self._left:
                remove_slot(self._home, name)

    def _exchange(self, messages: HostMessages, text: str, own: SharedSlot) -> None:
        """Send a slot to the rank that keeps it, and take those of others."""
        sent = [] if self._taker is None else messages.send(self._taker, text, own.bytes)
        for giver in dict.fromkeys(giver for giver, _ in self._held):
            told = messages.announced(giver)
            slot = self._held[giver, SlotRecord.from_json(told).slot]
            slot.open()
            messages.receive(giver, slot.bytes)
            slot.close(told)
        messages.wait(sent)
