"""The collectives of a step, in a class for each backend, so that no other file asks which backend it runs on.

Every rank must issue its collectives in the same order, because they are matched by order of issue. If two ranks issue
two equal buckets in opposite order, each gets the other bucket's sum without an error.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megamix.base import constants
from megamix.comm.topology import Axis

# torch 2.13 renames both functions and warns about the old names; earlier versions have only the old names.
_all_gather: Callable[..., dist.Work | None] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., dist.Work | None] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

_GATHER_TAG = 1 << 30  # first tag of gathers, far above those of users' own sends and receives (0 by default)

Use = Callable[[Tensor], None]  # uses all ranks' parts of a sum, in place of the sum


@contextmanager
def noting(what: str) -> Iterator[None]:
    """Add `what`, if it is not empty, as a note to an error of the backend inside the block."""
    try:
        yield
    except RuntimeError as error:
        if what:
            error.add_note(what)
        raise


class Pending:
    """A collective under way. `wait` returns once the result may be read on the current stream. It may be called again.

    `works`: torch's handles; none if there is nothing to wait for. `then`: called once, by the first `wait`. `what`:
    added as a note to an error of `wait`, because the backend names neither call nor tensor.
    """

    what = ""
    noted: Callable[[], AbstractContextManager[None]] = nullcontext  # entered around each wait, for measuring

    def __init__(self, *works: dist.Work | None, then: Callable[[], object] | None = None):
        self.works, self._then = list[Any](work for work in works if work is not None), then

    def wait(self) -> None:
        with self.noted(), noting(self.what):
            works, self.works = self.works, []
            then, self._then = self._then, None  # `then` never runs after a failed work
            for work in works:
                work.wait()
            if then is not None:
                then()

    def __del__(self) -> None:
        # A Gloo receive lives in its work object. If that were dropped unfinished, the next collective would get its
        # message. This is a plain `try`: at the end of a program the name `contextlib` of this module may be None.
        try:
            for work in self.works:
                work.wait()
        except Exception:  # the group may be gone already, and its messages with it
            pass


class Collectives:
    """The collectives of a single rank, which return its own values. The classes of the backends, for several ranks of
    an axis, derive from this one.
    """

    def __init__(self, axis: Axis):
        self.axis = axis

    def release(self) -> None:
        """Free the scratch buffers in which parts arrive; the next sum allocates them again. Call it only between
        sums.
        """

    def own_part(self, flat: Tensor) -> Tensor:
        """Return this rank's part of an evenly divided tensor, as a view. Shapes: (n,) -> (n / size,)."""
        return flat.view(self.axis.size, -1)[self.axis.rank]

    def reduce_scatter(self, grads: Tensor, grad_shard: Tensor, use: Use | None = None) -> Pending:
        """Start summing `grads` over the ranks into this rank's part.

        `use(parts)` replaces the sum, for instance by one in another dtype. It is called once, by the first `wait` or
        by the next reduction. `parts`: this rank's part of each rank's gradients, in rank order. The parts lie in a
        scratch buffer that the next reduction overwrites; `grads` has been sent by then and may be overwritten.
        Shapes: grads (padded_numel,); grad_shard (padded_numel / size,), a view of grads at this rank's place, or
        memory of its own; parts (size, padded_numel / size).
        """
        then = partial(use, grads.unsqueeze(0)) if use else partial(grad_shard.copy_, grads)
        in_place = grad_shard.untyped_storage()._cdata == grads.untyped_storage()._cdata
        return Pending(then=None if use is None and in_place else then)

    def all_gather(self, flat: Tensor, shard: Tensor, number: int = 0) -> Pending:
        """Start filling `flat` (padded_numel,) with every rank's `shard`, a view of flat at this rank's place.

        `number`: gathers with different numbers never take each other's parts, if the backend can tell (Gloo on a CPU).
        A rank that launches another number than the others waits, and fails at the group's time limit.
        """
        return Pending()

    def table(self, row: Tensor) -> Tensor:
        """Return every rank's row, in rank order; wait for the result. It is meant for small rows. Shapes: row (n,) ->
        (size, n).
        """
        table, pending = self.start_table(row)
        pending.wait()
        return table

    def start_table(self, row: Tensor) -> tuple[Tensor, Pending]:
        """Start what `table` does. Return the table to be filled, and its collective."""
        return row.unsqueeze(0), Pending()

    def gather(self, part: Tensor, number: int = 0) -> Tensor:
        """Return every rank's part, as `table` does, for parts of any size. Shapes: part (n,) -> (size, n)."""
        flat = part.new_empty(self.axis.size, part.numel())
        flat[self.axis.rank].copy_(part)
        self.all_gather(flat.view(-1), flat[self.axis.rank], number).wait()
        return flat

    def sum_parts(self, parts: Tensor) -> Tensor:
        """Return this rank's row of the ranks' sum; wait for it. Shapes: parts (size, n) -> (n,)."""
        return parts[0]

    def sum_whole(self, flat: Tensor) -> Tensor:
        """Return the ranks' sum, with the same bits on every rank; wait for it. Shapes: (n,) -> (n,)."""
        size, numel = self.axis.size, flat.numel()
        parts = torch.nn.functional.pad(flat, (0, -numel % size)).view(size, -1)
        return self.gather(self.sum_parts(parts)).view(-1)[:numel]

    def all_reduce(self, flat: Tensor) -> Pending:
        """Start replacing `flat` (n,) by the ranks' sum, with the same bits on every rank."""
        return Pending()

    def exchange(self, sent: Tensor, arrived: Tensor, to: Sequence[int], of: Sequence[int]) -> Pending:
        """Start sending `to[r]` elements of `sent` to each rank r, and receiving `of[r]` elements from it into
        `arrived`, both in rank order.

        Shapes: sent (sum of to,), arrived (sum of of,).
        """
        return Pending(then=partial(arrived.copy_, sent))

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Overwrite `tensor` on every rank by the tensor of rank `source` of the axis."""

    def agree(self, ok: bool) -> bool:
        """Return whether all ranks pass True. It waits for the device, so it is never called inside a step."""
        return ok


class _ManyRanks(Collectives):
    """The common part of both backends. The parts of sums that this class computes arrive in `num_scratch` buffers in
    turn.
    """

    num_scratch = 1

    def __init__(self, axis: Axis, device: torch.device):
        super().__init__(axis)
        self._device = device
        # Each buffer has the size of the largest sum since the last `release`.
        self.scratch = [torch.empty(0, device=device).untyped_storage() for _ in range(self.num_scratch)]
        self._exchanges = deque([(one, Pending()) for one in self.scratch], self.num_scratch)  # oldest first

    def release(self) -> None:
        for one in self.scratch:
            one.resize_(0)

    def reduce_scatter(self, grads: Tensor, grad_shard: Tensor, use: Use | None = None) -> Pending:
        scratch, earlier = self._exchanges[0]
        earlier.wait()  # sums the earlier parts before new parts overwrite them
        if scratch.nbytes() < grads.nbytes:
            scratch.resize_(0)  # without this, resizing would copy the old bytes
            scratch.resize_(grads.nbytes)
        parts = grads.new_empty(0).set_(scratch, 0, grads.shape, grads.stride())
        work = dist.all_to_all_single(parts, grads, group=self.axis.group, async_op=True)
        add = partial(sum_in_rank_order, out=grad_shard) if use is None else use
        # On a GPU `wait` orders the current stream after the exchange, and the sum runs on that stream. The next
        # exchange into this buffer starts after the sum.
        exchange = Pending(work, then=partial(add, parts.view(self.axis.size, -1)))
        self._exchanges.append((scratch, exchange))
        return exchange

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        # The tensor is sent as bytes, because a module's buffers may have dtypes that the backends do not send.
        plain = tensor.view(-1).view(torch.uint8) if tensor.is_contiguous() else tensor
        dist.broadcast(plain, group=self.axis.group, group_src=source)

    def all_reduce(self, flat: Tensor) -> Pending:
        # The first `wait` computes the sum. Gloo's own all-reduce would add in another order in each part of a tensor.
        return Pending(then=lambda: flat.copy_(self.sum_whole(flat)))

    def exchange(self, sent: Tensor, arrived: Tensor, to: Sequence[int], of: Sequence[int]) -> Pending:
        group = self.axis.group
        return Pending(dist.all_to_all_single(arrived, sent, [*of], [*to], group=group, async_op=True))

    def start_table(self, row: Tensor) -> tuple[Tensor, Pending]:
        table = row.new_empty(self.axis.size, row.numel())
        return table, Pending(_all_gather(table.view(-1), row, group=self.axis.group, async_op=True))

    def agree(self, ok: bool) -> bool:
        return bool(self.table(torch.tensor([ok], dtype=torch.int32, device=self._device)).all())


class NcclCollectives(_ManyRanks):
    """NCCL's collectives, in place, with SUM and never with AVG: for one rank, AVG launches a pass over all the data.

    With `use`, parts arrive in two scratch buffers: with a single one, backward would wait at each bucket.
    """

    num_scratch = 2

    def reduce_scatter(self, grads: Tensor, grad_shard: Tensor, use: Use | None = None) -> Pending:
        if use is not None:
            return super().reduce_scatter(grads, grad_shard, use)
        return Pending(_reduce_scatter(grad_shard, grads, group=self.axis.group, async_op=True))

    def all_gather(self, flat: Tensor, shard: Tensor, number: int = 0) -> Pending:
        return Pending(_all_gather(flat, shard, group=self.axis.group, async_op=True))

    def sum_parts(self, parts: Tensor) -> Tensor:
        out = parts.new_empty(parts.shape[1])
        _reduce_scatter(out, parts, group=self.axis.group)
        return out

    def all_reduce(self, flat: Tensor) -> Pending:
        return Pending(dist.all_reduce(flat, group=self.axis.group, async_op=True))


class GlooCollectives(_ManyRanks):
    """Gloo's collectives. A reduce-scatter is an all-to-all, an FP32 sum in rank order and one rounding.

    This is 2.4 times as fast as Gloo's own reduce-scatter, adds in a fixed order, and overflows to inf as NCCL's sum
    does. The parts arrive in one scratch buffer, so a reduction is completed before the next one starts.
    """

    def all_gather(self, flat: Tensor, shard: Tensor, number: int = 0) -> Pending:
        # GPU tensors, as with several ranks on one GPU: Gloo can send only from host memory.
        if flat.device.type != "cpu":  # pragma: CUDA only
            return Pending(_all_gather(flat, shard, group=self.axis.group, async_op=True))
        # Every part travels straight to its place. Gloo's own all-gather copies through a further buffer: for 3 M half
        # elements between two ranks it takes 3.9 ms, this code 1.2 ms.
        size, rank, group = self.axis.size, self.axis.rank, self.axis.group
        tag = _GATHER_TAG + number % _GATHER_TAG
        parts = flat.view(size, -1)
        works: list[dist.Work | None] = []
        for distance in range(1, size):
            target = (rank + distance) % size
            works.append(dist.isend(shard, group=group, tag=tag, group_dst=target))
            source = (rank - distance) % size
            works.append(dist.irecv(parts[source], group=group, tag=tag, group_src=source))
        return Pending(*works)

    def sum_parts(self, parts: Tensor) -> Tensor:
        arrived, out = torch.empty_like(parts), parts.new_empty(parts.shape[1])
        dist.all_to_all_single(arrived, parts, group=self.axis.group)
        sum_in_rank_order(arrived, out)
        return out


class ShapesAlone(Collectives):
    """The collectives of an axis that is not connected, for a memory plan without ranks. They return tensors of the
    right shapes, without other ranks' values.
    """

    def exchange(self, sent: Tensor, arrived: Tensor, to: Sequence[int], of: Sequence[int]) -> Pending:
        return Pending()  # more may arrive than is sent

    def sum_parts(self, parts: Tensor) -> Tensor:
        out = parts.new_empty(parts.shape[1])
        if not parts.is_meta:  # takes memory as Gloo does; on "meta" a GPU is planned, and NCCL has buffers of its own
            sum_in_rank_order(torch.empty_like(parts), out)
        return out


class Unconnected(Collectives):
    """The collectives of ranks without a process group, for code that only asks for placements. Calls are refused."""

    def _refuse(self, *given: object, **settings: object) -> Any:
        raise RuntimeError(
            f"ranks {[*self.axis.ranks]} share an axis, and no process group connects them: build the topology by "
            "Topology.connect(), with these axes, on every rank of a process group"
        )

    reduce_scatter = all_gather = table = start_table = gather = sum_parts = _refuse
    sum_whole = all_reduce = exchange = broadcast = agree = _refuse


def sum_in_rank_order(parts: Tensor, out: Tensor) -> None:
    """Sum the ranks' parts in FP32, rank 0 first. A half `out` is rounded once; an FP32 `out` receives the sum itself.

    Shapes: parts half or FP32 (ranks, shard_numel) -> out half or FP32 (shard_numel,).
    """
    rounded = out.dtype != torch.float32
    # On a GPU a sum without accumulator is one chunk, because launches cost more than the cache saves.
    size = min(constants.SUM_CHUNK, out.numel()) if rounded or out.is_cpu else out.numel()
    accumulator = out.new_empty(size, dtype=torch.float32) if rounded else out
    for start in range(0, out.numel(), size):
        chunk = out[start : start + size]
        total = accumulator[: chunk.numel()] if rounded else chunk
        total.copy_(parts[0, start : start + size])
        for part in parts[1:, start : start + size]:
            total.add_(part)
        if rounded:
            chunk.copy_(total)


def make_collectives(axis: Axis, device: torch.device) -> Collectives:
    """Return the collectives of this axis's backend for tensors on this device."""
    if axis.group is None:
        return Collectives(axis) if axis.size == 1 else Unconnected(axis)
    # A group may have one backend for each device type ("cpu:gloo,cuda:nccl"): ask for that of this device.
    backend = axis.group._get_backend(device).name()
    if backend == "nccl":
        return NcclCollectives(axis, device)  # also for one rank, which then makes the same calls as many
    # A single rank has no peer, and Gloo would take 0.2 ms a sum to copy values to this rank itself.
    return GlooCollectives(axis, device) if axis.size > 1 else Collectives(axis)


MakeCollectives = Callable[[Axis, torch.device], Collectives]  # `make_collectives` or a replacement


def gather_json(collectives: Collectives, value: Any, device: torch.device) -> list[Any]:
    """Return every rank's value, in rank order. The values travel as JSON: torch's own object gather unpickles, and a
    pickle may run code.

    `device`: the device of the collectives' tensors.
    """
    content = json.dumps(value).encode()
    most = int(collectives.table(torch.tensor([len(content)], device=device)).max())
    row = bytearray(content.ljust(most))  # JSON ends where the blanks begin
    table = collectives.table(torch.frombuffer(row, dtype=torch.uint8).to(device))
    return [json.loads(bytes(line)) for line in table.tolist()]
