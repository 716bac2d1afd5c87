"""NCCL between simulated GPUs, by its contract: real sums over Gloo, and an error where a program relies on more.

A communicator is a stream: a thread that runs what it is given in order, each a random while late. What a collective
writes is NaN until then, and neither that nor what it reads may be touched before its `wait` (device.cpp), which orders
streams and tells the host nothing.
"""

from __future__ import annotations

import datetime
import itertools
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ops = torch.ops.simulated
DTYPES = {torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32}
DTYPES |= {torch.float64, torch.float8_e4m3fn, torch.float8_e5m2}
LATEST_S = 0.003

counts: Counter[str] = Counter()  # of what costs more than it looks: AVG, collectives of objects
delays = random.Random(0)
one_stream = False  # for all communicators that are made from now on, as where a driver runs out of queues
_shared: list[Stream] = []
_issued: list[str] = []  # by this rank, in order
_numbers = itertools.count(1)


class Stream(threading.Thread):
    """Runs what it is given in order, each a while late."""

    def __init__(self) -> None:
        super().__init__(daemon=True, name="simulated NCCL")
        self.queue: SimpleQueue[Collective | None] = SimpleQueue()
        self.start()

    def run(self) -> None:
        while (work := self.queue.get()) is not None:
            time.sleep(delays.choice((0.0, LATEST_S * delays.random())))
            work.land()


def _stream() -> Stream:
    if not one_stream:
        return Stream()
    if not _shared:
        _shared.append(Stream())
    return _shared[0]


class Collective(dist.Work):
    """One that was issued. `reads`, `writes`: the device's memory that it has until it was waited for."""

    def __init__(
        self, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor], run: Callable[[], None], timeout_s: float
    ):
        super().__init__()
        self.what, self._run, self._timeout_s = what, run, timeout_s
        self._landed, self._error, self._number = threading.Event(), "", next(_numbers)
        self._kept = (*reads, *writes)  # as torch keeps what a collective uses
        for tensors, written in ((reads, False), (writes, True)):
            for tensor in tensors:
                ops.touch(tensor, written, what)
                if written:
                    ops.host(tensor).view(-1).view(torch.uint8).fill_(0xFF)  # NaN
        for tensors, written in ((reads, False), (writes, True)):
            for tensor in tensors:
                ops.lend(tensor, written, what, self._number)
        _issued.append(what)

    def land(self) -> None:
        try:
            with torch.no_grad():
                self._run()
        except Exception as error:  # a peer is gone: NCCL would say nothing until its time limit
            self._error = str(error)
            return
        self._landed.set()

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        if not self._landed.wait(self._timeout_s):
            raise RuntimeError(f"{self.what} has not run for {self._timeout_s:g} s. {_told_orders()} {self._error}")
        freed = ops.give_back(self._number)
        if freed:
            raise RuntimeError(f"memory was freed while {freed} used it")
        return True

    def is_completed(self) -> bool:
        return self._landed.is_set()

    def synchronize(self) -> None:
        self.wait()


def _told_orders() -> str:
    """Return what each rank has issued last, as far as they say so."""
    store = dist.distributed_c10d._get_default_store()
    rank, size = dist.get_rank(), dist.get_world_size()
    store.set(f"issued by {rank}", "; ".join(_issued[-4:]))
    told = []
    for other in range(size):
        try:
            store.wait([f"issued by {other}"], datetime.timedelta(seconds=3))
            told.append(f"Rank {other} has issued last: {store.get(f'issued by {other}').decode()}.")
        except RuntimeError:
            told.append(f"Rank {other} does not wait.")
    return " ".join(told)


class SimulatedNccl(dist.ProcessGroup):
    """One group's. torch makes it in the place of its own: see `answer`."""

    class Options(SimpleNamespace):
        split_from: Any = None

    supports_splitting = True
    _device_types = (torch.device("cuda"),)

    def __init__(self, store: Any, rank: int, size: int, options: Options):
        super().__init__(rank, size)
        self._rank, self._size, self._timeout_s = rank, size, options._timeout.total_seconds()
        ranks = options.global_ranks_in_group
        self.label = f"group {list(ranks)}" if ranks else "the world"
        if options.split_from is not None:
            options.split_from.perform_nocolor_split(None)
        # torch has set it on the group in whose place this one stands.
        self.bound_device_id = sys._getframe(1).f_locals.get("device_id")
        self._gloo = dist.ProcessGroupGloo(store, rank, size, options._timeout)
        self._stream, self._of_pairs = _stream(), dict[int, Stream]()

    # What torch asks of a backend and of a group.

    def _get_backend(self, device: torch.device) -> SimulatedNccl:
        return self

    def name(self) -> str:
        return "nccl"

    def getBackendName(self) -> str:
        return "nccl"

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def _set_sequence_number_for_group(self) -> None: ...

    def _set_group_name(self, name: str) -> None: ...

    def _set_group_desc(self, desc: str) -> None: ...

    def eager_connect_single_device(self, device: torch.device) -> None: ...

    def shutdown(self) -> None: ...

    def abort(self) -> None: ...

    def perform_nocolor_split(self, device: object) -> None:
        """Take part in a split of this communicator, in which all its ranks must."""
        token = torch.zeros(1, device="cpu")
        self._issue("ncclCommSplit", [], [], lambda: self._gloo.allreduce([token]).wait()).wait()

    # The collectives.

    def _issue(
        self, kind: str, reads: Sequence[Tensor], writes: Sequence[Tensor], run: Callable[[], None],
        stream: Stream | None = None,
    ) -> Collective:  # fmt: skip
        what = f"{kind} {[tuple(tensor.shape) for tensor in (reads or writes)]} of {self.label}"
        for tensor in (*reads, *writes):
            if not tensor.is_contiguous():
                raise ValueError(f"{what}: Tensors must be contiguous")
            if not tensor.is_cuda or tensor.get_device() != ops.current_device():
                raise ValueError(f"{what}: a tensor is on {tensor.device}, this rank's is {ops.current_device()}")
            if tensor.dtype not in DTYPES:
                raise TypeError(f"{what}: Unconvertible NCCL type {tensor.dtype}")
        work = Collective(what, reads, writes, run, self._timeout_s)
        (stream or self._stream).queue.put(work)
        return work

    def _parts(self, whole: Tensor, part: Tensor, what: str) -> tuple[list[Tensor], bool]:
        """Return `whole` by rank, and whether `part` lies in it, at this rank's place."""
        if whole.numel() != self._size * part.numel() or whole.dtype != part.dtype:
            raise ValueError(f"{what}: {self._size} x {part.numel()} {part.dtype} in {whole.numel()} {whole.dtype}")
        parts = [*whole.view(self._size, -1)] if whole.is_contiguous() else []
        shares = whole.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()
        inside = (
            shares
            and whole.data_ptr() < part.data_ptr() + part.nbytes
            and part.data_ptr() < whole.data_ptr() + whole.nbytes
        )
        in_place = inside and bool(parts) and parts[self._rank].data_ptr() == part.data_ptr()
        if inside and not in_place:
            raise ValueError(f"{what}: one tensor lies in the other, but not at this rank's place")
        return parts, in_place

    def all_gather_single(self, out: Tensor, inp: Tensor, opts: Any = None) -> Collective:
        parts, in_place = self._parts(out, inp, "all_gather")
        mine, there = ops.host(inp), [ops.host(part) for part in parts]

        def run() -> None:
            own = mine.reshape(-1).clone()
            self._gloo.allgather([there], [own]).wait()

        writes = [part for rank, part in enumerate(parts) if rank != self._rank] if in_place else [out]
        return self._issue("all_gather", [inp], writes, run)

    def reduce_scatter_single(self, out: Tensor, inp: Tensor, opts: Any = None) -> Collective:
        parts, in_place = self._parts(inp, out, "reduce_scatter")
        mine, there = ops.host(inp), ops.host(out)

        def run() -> None:
            arrived = torch.empty_like(mine)
            self._gloo.alltoall_base(arrived.view(-1), mine.view(-1).clone(), [], []).wait()
            there.copy_(_reduced(arrived.view(self._size, -1), opts).view(there.shape))

        reads = [part for rank, part in enumerate(parts) if rank != self._rank] if in_place else [inp]
        if not in_place:
            return self._issue("reduce_scatter", reads, [out], run)
        # In place the sum is not NaN at first: it is what is summed.
        work = self._issue("reduce_scatter", reads, [], run)
        ops.lend(out, True, work.what, work._number)
        return work

    def all_to_all_single(
        self, out: Tensor, inp: Tensor, out_splits: Any = None, in_splits: Any = None, opts: Any = None
    ) -> Collective:
        if out.data_ptr() == inp.data_ptr():
            raise ValueError("all_to_all: NCCL has none in place")
        mine, there = ops.host(inp).view(-1), ops.host(out).view(-1)

        def run() -> None:
            self._gloo.alltoall_base(there, mine.clone(), out_splits or [], in_splits or []).wait()

        return self._issue("all_to_all", [inp], [out], run)

    def allgather(self, outs: list[list[Tensor]], ins: list[Tensor], opts: Any = None) -> Collective:
        mine, there = ops.host(ins[0]), [ops.host(part) for part in outs[0]]
        return self._issue("all_gather", ins, outs[0], lambda: self._gloo.allgather([there], [mine.clone()]).wait())

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Collective:
        there = ops.host(tensors[0])
        again = dist.BroadcastOptions()
        again.rootRank, again.rootTensor = opts.rootRank, 0
        reads, writes = (tensors, []) if opts.rootRank == self._rank else ([], tensors)
        return self._issue("broadcast", reads, writes, lambda: self._gloo.broadcast([there], again).wait())

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Collective:
        there = ops.host(tensors[0])

        def run() -> None:
            arrived = there.new_empty(self._size, there.numel())
            self._gloo.allgather([[*arrived]], [there.reshape(-1).clone()]).wait()
            there.copy_(_reduced(arrived, opts).view(there.shape))

        work = self._issue("all_reduce", tensors, [], run)
        ops.lend(tensors[0], True, work.what, work._number)
        return work

    def barrier(self, opts: Any = None) -> Collective:
        token = torch.zeros(1, device="cpu")
        return self._issue("barrier", [], [], lambda: self._gloo.allreduce([token]).wait())

    # One message between two ranks has a communicator of its own, where several together have the group's.

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Collective:
        return self._messages([("send", tensors[0], peer)], 1, self._of_pair(peer))

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Collective:
        return self._messages([("recv", tensors[0], peer)], 1, self._of_pair(peer))

    def _of_pair(self, peer: int) -> Stream:
        if peer not in self._of_pairs:
            self._of_pairs[peer] = _stream()
        return self._of_pairs[peer]

    def _messages(self, them: list[tuple[str, Tensor, int]], tag: int, stream: Stream) -> Collective:
        parts = [(kind, ops.host(tensor), peer) for kind, tensor, peer in them]

        def run() -> None:
            works = [
                self._gloo.send([part.clone()], peer, tag) if kind == "send" else self._gloo.recv([part], peer, tag)
                for kind, part, peer in parts
            ]
            for work in works:
                work.wait()

        reads = [tensor for kind, tensor, _ in them if kind == "send"]
        writes = [tensor for kind, tensor, _ in them if kind == "recv"]
        named = "+".join(f"{kind} {peer}" for kind, _, peer in them)
        return self._issue(named, reads, writes, run, stream)


def _reduced(parts: Tensor, opts: Any) -> Tensor:
    """Return the ranks' parts reduced in rank order, half ones in FP32 and rounded once. Shapes: (ranks, n) -> (n,)."""
    op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    if op == dist.ReduceOp.MAX:
        return parts.amax(0)
    if op == dist.ReduceOp.MIN:
        return parts.amin(0)
    if op == dist.ReduceOp.AVG:
        counts["AVG"] += 1
    wide = torch.float32 if parts.dtype in (torch.float16, torch.bfloat16) else parts.dtype
    total = parts.new_zeros(parts.shape[1:], dtype=wide)
    for part in parts:
        total += part
    return (total / len(parts) if op == dist.ReduceOp.AVG else total).to(parts.dtype)


def _together(messages: list[dist.P2POp]) -> list[Any]:
    group = messages[0].group or dist.group.WORLD
    if not isinstance(group, SimulatedNccl):
        return _batch_isend_irecv(messages)
    kinds = {dist.isend: "send", dist.irecv: "recv"}
    return [group._messages([(kinds[one.op], one.tensor, one.group_peer) for one in messages], 0, group._stream)]


_batch_isend_irecv = dist.batch_isend_irecv
_object_to_tensor = dist.distributed_c10d._object_to_tensor


def _counted_object(obj: object, device: torch.device, group: Any) -> Any:
    counts["objects"] += torch.device(device).type == "cuda"
    return _object_to_tensor(obj, device, group)


def answer() -> None:
    """Stand in the place of NCCL in torch.distributed."""
    of = dist.distributed_c10d
    of.ProcessGroupNCCL, of._NCCL_AVAILABLE = SimulatedNccl, True
    of.batch_isend_irecv = dist.batch_isend_irecv = _together  # torch puts several together for its own class alone
    of._object_to_tensor = _counted_object
