"""The newest state that is whole in the nodes' shared memory, as a checkpoint to go on from.

A slot counts if its bytes have the sum of its record. The shares of one instant must all be there, on whatever nodes. A
rank whose share lies on another node fetches it.
"""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from megamix.checkpoint.all_or_none import AllOrNone
from megamix.checkpoint.manifest import FileRecord, Manifest
from megamix.checkpoint.mirror import SharedSlot, sum_words
from megamix.checkpoint.slots import SHARED, TENSORS, SlotRecord, records_in
from megamix.checkpoint.tensor_file import Stored, read_header
from megamix.checkpoint.verify import Checkpoint
from megamix.comm.host import HostMessages
from megamix.comm.topology import Axis

Version = tuple[int, int, int]  # as in SlotRecord
_Twins = dict[int, list[int]]  # by rank, the ranks that own the same share
_TIMEOUT_S = 600.0  # most seconds for what is fetched from another node


def node_of_process() -> str:
    """Return what all processes that see the same shared memory have in common."""
    boot = Path("/proc/sys/kernel/random/boot_id")  # machines may share a name
    machine = boot.read_text() if boot.is_file() else os.uname().nodename
    told = os.stat(SHARED if SHARED.is_dir() else "/")
    return f"{machine} {told.st_dev} {told.st_ino}"


class InMemory:
    """Looks into the memory of all nodes. Every rank must make every call.

    `began`: as in SlotRecord. `loads`: each start's number, and the update from which it went on; what an earlier one
    has kept of later updates, on a node that was away, is no state of this run. `why`: why a newer state than the one
    found is not whole; empty if there is none.
    """

    why = ""

    def __init__(self, home: Path, began: float, loads: Sequence[tuple[int, int]], world: Axis, all_or_none: AllOrNone):
        self._home, self._began, self._loads, self._world, self._all_or_none = home, began, loads, world, all_or_none
        self._nodes: list[str] = all_or_none.every(node_of_process)
        self._here = [rank for rank, node in enumerate(self._nodes) if node == self._nodes[world.rank]]

    def newest(self, is_alike: Callable[[Manifest], bool]) -> Checkpoint | None:
        """Return the newest state that is whole; None if none is. `is_alike`: returns whether the present ranks have
        the shares of those that kept a state, if they are as many.
        """
        rank, leads = self._world.rank, self._here[0] == self._world.rank
        told = self._all_or_none.every(lambda: [[*it.version, it.rank] for it in self._own()] * leads)
        slots = {(*slot,) for of_rank in told for slot in of_rank}
        versions = sorted({slot[:3] for slot in slots}, reverse=True)
        for version in versions:
            # The first rank writes the log of a step before it keeps the state, and before it takes another step.
            if version == versions[0] and (*version, 0) not in slots:
                self.why = f"that of attempt {version[0]} may lack its row of the log"
                continue
            held, ranks = self._held(version), {*range(version[2])}
            if lost := ranks - set[int]().union(*map(_owners, held.values())):
                self.why = self.why or f"that of attempt {version[0]} lacks the share of rank {min(lost)}"
                continue
            alike = self._all_or_none.every(partial(self._is_alike, version, is_alike))
            is_full = all(_owners(its) == ranks for its in held.values())
            if not is_full and not (all(alike) and len(ranks) == len(self._nodes)):
                self.why = self.why or f"that of attempt {version[0]} lies on several nodes, as other ranks had it"
                continue
            if not is_full:
                self._fetch(version, held)
            return self._checkpoint(version, held[self._nodes[rank]].keys())
        return None

    def _own(self) -> list[SlotRecord]:
        return [it for it in records_in(self._home) if it.began == self._began and not self._is_dead(it)]

    def _is_dead(self, record: SlotRecord) -> bool:
        return any(start > record.start and update < record.manifest.applied_updates for start, update in self._loads)

    def _of(self, version: Version) -> list[SlotRecord]:
        return [record for record in self._own() if record.version == version]

    def _is_alike(self, version: Version, is_alike: Callable[[Manifest], bool]) -> bool:
        return all(is_alike(record.manifest) for record in self._of(version)[:1])

    def _held(self, version: Version) -> dict[str, _Twins]:
        """Return by node which slots of an instant are as written. The ranks of a node share the work."""
        mine = self._of(version)[self._here.index(self._world.rank) :: len(self._here)]
        sound = self._all_or_none.every(lambda: [[it.rank, [*it.twins]] for it in mine if self._is_sound(it)])
        held = {node: _Twins() for node in self._nodes}
        for node, slots in zip(self._nodes, sound, strict=True):
            held[node] |= dict(slots)
        return held

    def _is_sound(self, record: SlotRecord) -> bool:
        try:
            return sum_words(torch.from_numpy(np.memmap(self._path(record), np.uint8, "c"))) == record.total
        except (OSError, ValueError):  # ValueError: an empty file
            return False

    def _path(self, record: SlotRecord) -> Path:
        return self._home / f"{record.name}{TENSORS}"

    def _fetch(self, version: Version, held: Mapping[str, _Twins]) -> None:
        """Bring to each node the shares of its ranks."""
        messages = HostMessages(self._world, _TIMEOUT_S)
        records = {record.rank: record for record in self._of(version)}
        for rank, node in enumerate(self._nodes):
            if rank in _owners(held[node]):
                continue
            source = next(other for other in self._nodes if rank in _owners(held[other]))
            share, twins = next(one for one in held[source].items() if rank in one[1])
            giver = self._nodes.index(source)
            if self._world.rank == giver:
                record = records[share]
                data = torch.from_file(str(self._path(record)), size=record.size, dtype=torch.uint8)
                messages.wait(messages.send(rank, record.model_dump_json(by_alias=True), data))
            if self._world.rank == rank:
                record = SlotRecord.from_json(text := messages.announced(giver))
                self._home.mkdir(mode=0o700, exist_ok=True)
                slot = SharedSlot(self._home, record.name, record.size)
                messages.receive(giver, slot.bytes)
                slot.close(text)
            held[node][share] = twins

    def _checkpoint(self, version: Version, shares: Collection[int]) -> Checkpoint:
        stored = dict[tuple[str, str], list[Stored]]()
        records = [record for record in self._of(version) if record.rank in shares]
        for record in records:
            for param, state, place in read_header(self._path(record)):
                boxes = stored.setdefault((param, state), [])
                if all(place.box != other.box for other in boxes):  # twins have the same, and all ranks have buffers
                    boxes.append(place)
        manifest = records[0].manifest
        names = [f"rank_{rank:05d}.safetensors" for rank in range(version[2])]
        files = tuple(FileRecord(name=name, size=0, crc32=0) for name in names)
        return Checkpoint(self._home, manifest.model_copy(update={"files": files}), stored, is_checked=True)


def _owners(held: _Twins) -> set[int]:
    return {rank for twins in held.values() for rank in twins}
