"""NCCL between simulated GPUs, by its contract: real sums over Gloo, and an error where a program relies on more.

A communicator is a stream: a thread that runs what it is given in order, each a random while late. What a collective
writes is NaN until then, and neither that nor what it reads may be touched before its `wait` (device.cpp), which orders
streams and tells the host nothing.
"""

import itertools
import random
import sys
import threading
import time
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

ops = torch.ops.simulated
DTYPES = {torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32}
DTYPES |= {torch.float64, torch.float8_e4m3fn, torch.float8_e5m2}
LATEST_S = 0.003

delays = random.Random(0)
_numbers = itertools.count(1)


class Stream(threading.Thread):
    """Runs what it is given in order, each a while late."""

    def __init__(self):
        super().__init__(daemon=True, name="simulated NCCL")
        self.queue = SimpleQueue()
        self.start()

    def run(self):
        while (work := self.queue.get()) is not None:
            time.sleep(delays.choice((0.0, LATEST_S * delays.random())))
            work.land()
            del work  # it holds Gloo's group, whose threads spin once the peers have left theirs


class Collective(dist.Work):
    """One that was issued. It has `reads` and `writes`, memory of the device, until it was waited for; of what it
    writes, `in_place` is also read, and so is not NaN at first.
    """

    def __init__(self, what, reads, writes, in_place, run, timeout_s):
        super().__init__()
        self.what, self._run, self._timeout_s = what, run, timeout_s
        self._landed, self._error, self._number = threading.Event(), "", next(_numbers)
        # Kept, as torch keeps what a collective uses.
        self._uses = [(each, False) for each in reads] + [(each, True) for each in (*writes, *in_place)]
        for tensor, written in self._uses:
            ops.touch(tensor, written, what)
        for tensor in writes:
            ops.host(tensor).view(-1).view(torch.uint8).fill_(0xFF)  # NaN
        for tensor, written in self._uses:
            ops.lend(tensor, written, what, self._number)

    def land(self):
        try:
            with torch.no_grad():
                self._run()
            self._landed.set()
        except Exception as error:  # a peer is gone: NCCL would say nothing until its time limit
            self._error = str(error)

    def wait(self, timeout=None):
        if not self._landed.wait(self._timeout_s):
            raise RuntimeError(f"{self.what} has not run for {self._timeout_s:g} s. {self._error}")
        if freed := ops.give_back(self._number):
            raise RuntimeError(f"memory was freed while {freed} used it")
        return True


class SimulatedNccl(dist.ProcessGroup):
    """One group's. torch makes it in the place of its own: see `answer`."""

    class Options(SimpleNamespace):
        split_from: Any = None

    supports_splitting = True
    _device_types = (torch.device("cuda"),)

    def __init__(self, store, rank, size, options):
        super().__init__(rank, size)
        self.rank, self.size, self._timeout_s = (lambda: rank), (lambda: size), options._timeout.total_seconds()
        self._label = f"group {list(options.global_ranks_in_group)}" if options.global_ranks_in_group else "the world"
        if options.split_from is not None:
            options.split_from.perform_nocolor_split(None)
        # torch has set it on the group in whose place this one stands.
        self.bound_device_id = sys._getframe(1).f_locals.get("device_id")
        self._gloo = dist.ProcessGroupGloo(store, rank, size, options._timeout)
        self._stream, self._of_pairs = Stream(), {}

    def _get_backend(self, device):
        return self

    def name(self):
        return "nccl"

    getBackendName = name

    def _ignore(self, *_): ...

    _set_sequence_number_for_group = _set_group_name = _set_group_desc = eager_connect_single_device = abort = _ignore

    def shutdown(self):
        for stream in (self._stream, *self._of_pairs.values()):
            stream.queue.put(None)

    def perform_nocolor_split(self, device):
        """Take part in a split of this communicator, in which all its ranks must."""
        self.barrier("ncclCommSplit").wait()

    def _issue(self, kind, reads, writes, run, *, in_place=(), stream=None):
        what = f"{kind} {[tuple(tensor.shape) for tensor in (reads or writes or in_place)]} of {self._label}"
        for tensor in (*reads, *writes, *in_place):
            if not tensor.is_contiguous():
                raise ValueError(f"{what}: Tensors must be contiguous")
            if tensor.device != torch.device("cuda", ops.current_device()):
                raise ValueError(f"{what}: a tensor is on {tensor.device}, this rank's is {ops.current_device()}")
            if tensor.dtype not in DTYPES:
                raise TypeError(f"{what}: Unconvertible NCCL type {tensor.dtype}")
        work = Collective(what, reads, writes, in_place, run, self._timeout_s)
        (stream or self._stream).queue.put(work)
        return work

    def _others(self, whole, part, what):
        """Return the other ranks' parts of `whole` where `part` is this rank's; None where they lie apart."""
        size, rank = self.size(), self.rank()
        if whole.numel() != size * part.numel() or whole.dtype != part.dtype:
            raise ValueError(f"{what}: {size} x {part.numel()} {part.dtype} in {whole.numel()} {whole.dtype}")
        distance = part.data_ptr() - whole.data_ptr()
        if not -part.nbytes < distance < whole.nbytes:
            return None
        if distance != rank * part.nbytes:
            raise ValueError(f"{what}: one tensor lies in the other, but not at this rank's place")
        return [other for number, other in enumerate(whole.view(size, -1)) if number != rank]

    def all_gather_single(self, out, inp, opts=None):
        others = self._others(out, inp, "all_gather")
        return self.allgather([[*out.view(self.size(), -1)]], [inp], writes=[out] if others is None else others)

    def allgather(self, outs, ins, opts=None, writes=None):
        mine, there = ops.host(ins[0]), [ops.host(part) for part in outs[0]]
        run = lambda: self._gloo.allgather([there], [mine.view_as(there[0]).clone()]).wait()  # noqa: E731
        return self._issue("all_gather", ins, outs[0] if writes is None else writes, run)

    def reduce_scatter_single(self, out, inp, opts=None):
        others = self._others(inp, out, "reduce_scatter")
        mine, there = ops.host(inp), ops.host(out)

        def run():
            arrived = torch.empty_like(mine)
            self._gloo.alltoall_base(arrived.view(-1), mine.view(-1).clone(), [], []).wait()
            there.copy_(_sum(arrived.view(self.size(), -1), opts).view(there.shape))

        if others is None:
            return self._issue("reduce_scatter", [inp], [out], run)
        return self._issue("reduce_scatter", others, [], run, in_place=[out])

    def all_to_all_single(self, out, inp, out_splits=None, in_splits=None, opts=None):
        if out.data_ptr() == inp.data_ptr() and out.numel():  # both may be empty, and at no address
            raise ValueError("all_to_all: NCCL has none in place")
        mine, there = ops.host(inp).view(-1), ops.host(out).view(-1)
        run = lambda: self._gloo.alltoall_base(there, mine.clone(), out_splits or [], in_splits or []).wait()  # noqa: E731
        return self._issue("all_to_all", [inp], [out], run)

    def broadcast(self, tensors, opts):
        there, again = ops.host(tensors[0]), dist.BroadcastOptions()
        again.rootRank, again.rootTensor = opts.rootRank, 0
        reads, writes = (tensors, []) if opts.rootRank == self.rank() else ([], tensors)
        return self._issue("broadcast", reads, writes, lambda: self._gloo.broadcast([there], again).wait())

    def allreduce(self, tensors, opts=None):
        there = ops.host(tensors[0])

        def run():
            arrived = there.new_empty(self.size(), there.numel())
            self._gloo.allgather([[*arrived]], [there.reshape(-1).clone()]).wait()
            there.copy_(_sum(arrived, opts).view(there.shape))

        return self._issue("all_reduce", [], [], run, in_place=tensors)

    def barrier(self, kind="barrier", opts=None):
        token = torch.zeros(1, device="cpu")
        return self._issue(kind, [], [], lambda: self._gloo.allreduce([token]).wait())

    def send(self, tensors, peer, tag=0):
        return self._alone("send", tensors[0], peer)

    def recv(self, tensors, peer, tag=0):
        return self._alone("recv", tensors[0], peer)

    def _alone(self, kind, tensor, peer):
        """One message has a communicator of the two ranks, where several together have the group's."""
        if peer not in self._of_pairs:
            self._of_pairs[peer] = Stream()
        return self.messages([(kind, tensor, peer)], 1, self._of_pairs[peer])

    def messages(self, them, tag=0, stream=None):
        parts = [(kind, ops.host(tensor), peer) for kind, tensor, peer in them]

        def run():
            works = [
                self._gloo.send([part.clone()], peer, tag) if kind == "send" else self._gloo.recv([part], peer, tag)
                for kind, part, peer in parts
            ]
            for work in works:
                work.wait()

        reads, writes = ([tensor for kind, tensor, _ in them if kind == wanted] for wanted in ("send", "recv"))
        return self._issue("+".join(f"{kind} {peer}" for kind, _, peer in them), reads, writes, run, stream=stream)


def _sum(parts, opts):
    """Return the ranks' parts added in rank order, half ones in FP32 and rounded once. Shapes: (ranks, n) -> (n,)."""
    assert opts is None or opts.reduceOp == dist.ReduceOp.SUM, "of NCCL's operations the sum alone is simulated"
    half = parts.dtype in (torch.float16, torch.bfloat16)
    total = parts.new_zeros(parts.shape[1:], dtype=torch.float32 if half else parts.dtype)
    for part in parts:
        total += part
    return total.to(parts.dtype)


_batch_isend_irecv = dist.batch_isend_irecv


def _all_or_none(messages):
    group = messages[0].group or dist.group.WORLD
    if not isinstance(group, SimulatedNccl):
        return _batch_isend_irecv(messages)
    kinds = {dist.isend: "send", dist.irecv: "recv"}
    return [group.messages([(kinds[one.op], one.tensor, one.group_peer) for one in messages])]


def answer():
    """Stand in the place of NCCL in torch.distributed."""
    of = dist.distributed_c10d
    of.ProcessGroupNCCL, of._NCCL_AVAILABLE = SimulatedNccl, True
    of.batch_isend_irecv = dist.batch_isend_irecv = _all_or_none  # torch puts several together for its own class alone
