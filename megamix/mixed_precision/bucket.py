"""The bucket: neighbouring parameters in one flat buffer, from their gradients to their next values."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from megamix.base import constants
from megamix.comm.collectives import Collectives, Pending, noting
from megamix.mixed_precision.flat_layout import ROW, BucketPlan, FlatLayout, GroupSpan, ParamSpec
from megamix.mixed_precision.row_stats import RowStats
from megamix.mixed_precision.settings import Precision, Sharding
from megamix.mixed_precision.storage import FreedParameter, Storage, allocate, free
from megamix.mixed_precision.update_slice import AVERAGE, MASTER, States, UpdateGroup, UpdateSlice

log = logging.getLogger("megamix")


class OwnedRange(NamedTuple):
    """A run of one parameter's flattened elements that this rank owns, from element number `start` on."""

    spec: ParamSpec
    start: int
    tensors: States  # views (n,): "master" in FP32, "average" if one is kept, then the optimizer's states


@dataclass(slots=True, eq=False)
class ParamGrad:
    """One parameter's place in its bucket's gradients, and its state in the current step."""

    name: str
    view: Tensor  # gradient dtype, shape of the parameter
    counts: bool  # False: another rank has the same gradient, and that rank's copy is summed
    waits: bool  # True: is copied together with others, because it is so small that a call costs more than its bytes
    touched: bool = False
    ready: bool = False  # complete: no more gradients come in this step


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketBytes:
    """Bytes of a bucket's buffers on one rank, of each as if it had memory now."""

    plan: BucketPlan
    storage: Storage
    params: int
    grads: int
    rank_sum: int  # 0: the sum lies in `grads`
    total: int  # 0: the bucket has no total
    master: int
    states: int
    average: int  # 0: no average is kept

    @classmethod
    def count(
        cls,
        plan: BucketPlan,
        precision: Precision,
        sharding: Sharding,
        groups: Sequence[UpdateGroup],
        owner_adds: bool,
        shard: int | None,
        averages: bool = False,
    ) -> BucketBytes:
        """Count bytes without tensors or ranks.

        `owner_adds`: the owner adds up a step's micro-batches. `shard`: the number of the rank's shard; None: the shard
        with the most bytes of states, which is an upper bound for every rank. `averages`: an average is kept.
        """
        storage = Storage.of(sharding.shard)
        states = [
            sum((span.end - span.start) * groups[span.group].state_bytes for span in plan.shard_spans(number))
            for number in (plan.unlike_shards() if shard is None else [shard])
        ]
        return cls(
            plan=plan,
            storage=storage,
            params=plan.padded_numel * precision.dtype.itemsize,
            grads=plan.padded_numel * precision.own_grad_dtype.itemsize,
            rank_sum=plan.shard_numel * precision.sum_dtype(plan.num_shards).itemsize if storage.frees_grads else 0,
            total=plan.shard_numel * torch.float32.itemsize if owner_adds else 0,
            master=plan.shard_numel * torch.float32.itemsize,
            states=max(states),
            average=plan.shard_numel * torch.float32.itemsize if averages else 0,
        )

    def held(self) -> int:
        """Return the bytes of the buffers that have memory between steps."""
        params = 0 if self.storage.frees_params else self.params
        grads = 0 if self.storage.frees_grads else self.grads + self.total
        return params + grads + self.master + self.states + self.average

    def temporary(self) -> BucketBytes:
        """Return the buffers that have memory only while a step needs them; the others count 0."""
        params = self.params if self.storage.frees_params else 0
        if self.storage.frees_grads:
            return replace(self, params=params, master=0, states=0, average=0)
        return replace(self, params=params, grads=0, rank_sum=0, total=0, master=0, states=0, average=0)


class Bucket:
    """Neighbouring parameters in one flat buffer: the unit of one reduce-scatter, one update and one all-gather.

    `params` half (padded_numel,): the module's Parameters, `named_params`, are views into this buffer; padding is zero.
    `param_shard` half (shard_numel,): this rank's part of `params`, casts of the masters.
    `grads` gradient dtype (padded_numel,): a step's sum over this rank's micro-batches, loss scale included.
    `rank_sum` (shard_numel,): this rank's part of the sum of `grads` over the owners.
    `total` FP32 (shard_numel,): the sum of `rank_sum` over micro-batches, if the owner adds them up; else None.
    `master` FP32 (shard_numel,): the master weights. `states`: for each span of `spans` the optimizer's states, in
    their own dtypes.
    `average` FP32 (shard_numel,): the average of the masters, if one is kept; else None.

    `storage` says which of `params`, `grads`, `rank_sum` and `total` have memory only while a step needs them.
    """

    params: Tensor
    param_shard: Tensor
    named_params: dict[str, nn.Parameter]
    _classes: dict[str, type[nn.Parameter]]  # the Parameters' own classes, which may be subclasses
    grads: Tensor
    rank_sum: Tensor
    sum_sent: Pending  # the last reduce-scatter that was launched

    def __init__(
        self,
        number: int,
        plan: BucketPlan,
        owners: Collectives,
        place: int,
        groups: Sequence[UpdateGroup],
        precision: Precision,
        sharding: Sharding,
        device: torch.device,
        owner_adds: bool,
    ):
        """Allocate masters and states, all zeros.

        `owners`: the ranks that hold one shard each. `place`: number of this bucket among its owners' buckets, from 1
        on. `owner_adds`: the owner adds up a step's micro-batches.
        """
        self.number = number
        self.plan = plan
        self.owners = owners
        self.place = place
        self.precision = precision
        self.storage = Storage.of(sharding.shard)
        self.bytes = BucketBytes.count(plan, precision, sharding, groups, owner_adds, owners.axis.rank)
        self.spans = plan.shard_spans(owners.axis.rank)  # spans of this rank's shard, one per optimizer group
        self.pieces = plan.shard_pieces(owners.axis.rank)  # parts of parameters in this rank's shard
        self.piece_rows = [(piece.end - piece.start) // ROW for piece in self.pieces]
        borders = [0, *(piece.end // ROW for piece in self.pieces)]
        self.row_borders = torch.tensor(borders, device=device)
        self.piece_starts = np.array(borders[:-1], dtype=np.int64)  # first row of each piece
        self.master = torch.zeros(plan.shard_numel, dtype=torch.float32, device=device)
        self.states = [groups[span.group].new_states(span.end - span.start, device) for span in self.spans]
        self.average: Tensor | None = None
        self.shows_average = False  # True: the half parameters are casts of the average
        self.total: Tensor | None = None
        self.param_grads: dict[str, ParamGrad] = {}
        self.missing = 0  # number of gradients that are not ready
        self._waiting: dict[str, Tensor] = {}  # this pass's gradients that are not in `grads` yet
        self._paddings: list[Tensor] = []  # padding of `grads` behind each parameter
        self.sum_pending: Pending | None = None
        self.is_summed_across = False  # True: this step's sum over replicas is launched
        self.gather_pending: Pending | None = None
        self._rows: Tensor | None = None  # statistics of the sum, taken while it was computed
        self._total_begun = False
        self._told_of_shared = False
        self._parts: dict[GroupSpan, UpdateSlice] = {}

    # Half parameters.

    def flattened(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the given values as one flat buffer: FP32 (padded_numel,).

        `values`: one tensor for each parameter of this bucket, with the shape of its spec.
        """
        full = torch.zeros(self.plan.padded_numel, dtype=torch.float32, device=self.master.device)
        for slot in self.plan.slots:
            full[slot.start : slot.end].copy_(values[slot.spec.name].detach().reshape(-1))
        return full

    def adopt(self, params: Mapping[str, nn.Parameter], full: Tensor) -> None:
        """Turn the module's Parameters into views of the flat buffer, which takes the values `full` in half.

        The Parameters' own memory is freed here, bucket by bucket. Freeing it for all buckets at the end would need 1.5
        times the memory of the model's FP32 weights.
        `param.data = view` is used instead of `nn.Parameter(view)` for two reasons. The view then has its own version
        counter, so a gather that writes the buffer during forward does not make backward refuse its saved tensors. The
        user's references to the Parameters stay valid.
        Shapes: full FP32 or half (padded_numel,).
        """
        self.params = full.to(self.precision.dtype)
        self.param_shard = self.owners.own_part(self.params)
        self.named_params = {slot.spec.name: params[slot.spec.name] for slot in self.plan.slots}
        for slot, param in zip(self.plan.slots, self.named_params.values(), strict=True):
            param.data = self.params[slot.start : slot.end].view(slot.spec.shape)
        self._classes = {name: type(param) for name, param in self.named_params.items()}
        if self.storage.frees_params:
            FreedParameter.names.update({param: name for name, param in self.named_params.items()})
            self.free_params()

    def load(self, full: Tensor) -> None:
        """Set masters and half parameters. Shapes: full FP32 (padded_numel,)."""
        self.master.copy_(self.owners.own_part(full))
        if not self.storage.frees_params:
            self.params.copy_(full)

    def allocate_params(self) -> None:
        """Give the half parameters memory. They have it only for a time."""
        allocate(self.params)

    def show_params(self) -> None:
        """Let the module's Parameters be read again, after their values have arrived."""
        for name, param in self.named_params.items():
            param.__class__ = self._classes[name]

    def free_params(self) -> None:
        """Make reads of the Parameters raise, and free their memory."""
        for param in self.named_params.values():
            param.__class__ = FreedParameter
        if not free(self.params) and not self._told_of_shared:
            self._told_of_shared = True
            log.warning(
                "%.1f MB of parameters stay in memory: a NumPy array or another process shares them. Inside "
                "engine.whole_parameters() take a copy, as tensor.clone().numpy()",
                self.params.nbytes / 1e6,
            )

    # Gradients and their sum.

    def make_grads(self) -> None:
        """Allocate the buffers of gradients and sums.

        If gradients keep their memory between steps, the sum reuses it. A sum in the gradients' dtype overwrites this
        rank's own part of `grads`. An FP32 sum of half gradients overwrites the start of `grads`, all of which has been
        sent by then. That sum has 4 bytes for each of shard_numel elements, and `grads` has 2 bytes for each of
        padded_numel elements, so it fits from 2 owners on.
        """
        plan, device = self.plan, self.master.device
        dtype = self.precision.own_grad_dtype
        sum_dtype = self.precision.sum_dtype(self.owners.axis.size)
        self.grads = torch.zeros(plan.padded_numel, dtype=dtype, device=device)
        for slot, padded_end in zip(plan.slots, plan.padded_ends(), strict=True):
            spec = slot.spec
            view = self.grads[slot.start : slot.end].view(spec.shape)
            self.param_grads[spec.name] = ParamGrad(
                spec.name, view, spec.counts, waits=spec.numel < constants.SMALL_GRAD
            )
            if slot.end < padded_end:
                self._paddings.append(self.grads[slot.end : padded_end])
        if self.storage.frees_grads:
            free(self.grads)
            self.rank_sum = torch.zeros(plan.shard_numel, dtype=sum_dtype, device=device)
            free(self.rank_sum)
        elif sum_dtype == dtype:
            self.rank_sum = self.owners.own_part(self.grads)
        else:
            self.rank_sum = self.grads.view(sum_dtype)[: plan.shard_numel]
        if self.bytes.total:
            self.total = torch.zeros(plan.shard_numel, dtype=torch.float32, device=device)
            self._free_sum(self.total)
        self.expect_grads()

    @property
    def grad_sum(self) -> Tensor:
        """Return the sum that an update reads: (shard_numel,)."""
        return self.rank_sum if self.total is None else self.total

    def expect_grads(self) -> None:
        """Forget the gradients so far: the next one of each parameter is its first."""
        for place in self.param_grads.values():
            place.touched = place.ready = False
        self._waiting.clear()
        self.missing = len(self.param_grads)

    def collect(self, name: str, grad: Tensor, completes: bool) -> None:
        """Take a gradient. A large one is copied or added at once. A small one with memory of its own waits until the
        bucket is complete or the pass is over.

        `completes`: no more gradients of this parameter come in this step.
        """
        place = self.param_grads[name]
        if self.missing == 0:
            raise RuntimeError(
                f"parameter {name} got a second gradient in one backward after its bucket was complete, or a gradient "
                "after its unit's backward: a reentrant checkpoint recomputed its module. Use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        if not place.counts:
            grad = torch.where(grad.isfinite(), 0.0, grad)  # inf and NaN stay: an overflow counts on every rank
        if place.waits and _has_memory_alone(grad):
            if name in self._waiting:
                self.add_waiting()
            self._waiting[name] = grad
        else:
            self._add({name: grad})
        if completes and not place.ready:
            place.ready = True
            self.missing -= 1
            if self.missing == 0:
                self.add_waiting()

    def add_waiting(self) -> None:
        """Copy or add the waiting gradients into `grads`."""
        if self._waiting:
            self._add(self._waiting)
            self._waiting.clear()

    def _add(self, grads: Mapping[str, Tensor]) -> None:
        """Copy first gradients, add later ones: copying costs 4 bytes per element, zeroing and adding would cost 8."""
        if self.storage.frees_grads:
            allocate(self.grads)
        places = {self.param_grads[name]: grad for name, grad in grads.items()}
        first = [place for place in places if not place.touched]
        later = [place for place in places if place.touched]
        if first:
            torch._foreach_copy_([place.view for place in first], [places[place] for place in first])
        if later:
            torch._foreach_add_([place.view for place in later], [places[place] for place in later])
        for place in first:
            place.touched = True

    def fill_missing(self) -> list[str]:
        """Zero the place of each parameter without a gradient; return the names of these parameters."""
        self.add_waiting()
        silent = [place for place in self.param_grads.values() if not place.touched]
        if silent and self.storage.frees_grads:
            allocate(self.grads)
        for place in silent:
            place.view.zero_()
        return [place.name for place in silent]

    def close(self) -> None:
        """Mark the bucket as complete: no more gradients come before the sum."""
        self.missing = 0

    def launch_sum(self, row_stats: RowStats) -> None:
        """Start summing the gradients over the owners: `sum_sent`."""
        if self.storage.frees_grads:
            allocate(self.rank_sum)
        if self._paddings:
            torch._foreach_zero_(self._paddings)  # padding may hold the last step's sum, or fresh memory

        def sum_here(parts: Tensor) -> None:
            rows = row_stats.of_sum(parts, self.rank_sum)
            self._rows = rows if self.total is None else None

        is_wider = self.rank_sum.dtype != self.grads.dtype
        sent = self.owners.reduce_scatter(self.grads, self.rank_sum, sum_here if is_wider else None)
        sent.what = (
            f"while the gradients of {self.plan.name} were summed: every rank must call backward as often, and end "
            "all of it or none"
        )
        self.sum_sent = sent
        self.sum_pending = sent if self.total is None else Pending(then=partial(self._add_sum, sent))

    def _add_sum(self, sent: Pending) -> None:
        assert self.total is not None
        sent.wait()
        if self.storage.frees_grads:
            allocate(self.total)
        if self._total_begun:
            self.total.add_(self.rank_sum)
        else:
            self.total.copy_(self.rank_sum)
        self._total_begun = True
        self._free_sum(self.rank_sum)

    def launch_sum_across(self, replicas: Collectives) -> Pending:
        """Wait for `grad_sum`, the sum over the owners. Then start summing it over the replicas."""
        self.wait_for_sum()
        self._rows = None  # these statistics are those of the sum over the owners
        self.sum_pending = sent = replicas.all_reduce(self.grad_sum)
        sent.what = f"while the gradients of {self.plan.name} were summed across replicas"
        self.is_summed_across = True
        return sent

    def wait_for_sum(self) -> None:
        """Return once `grad_sum` may be read, and free the gradients' memory."""
        if self.sum_pending is not None:
            self.sum_pending.wait()
        if self.storage.frees_grads:
            free(self.grads)

    def row_stats(self, row_stats: RowStats) -> Tensor:
        """Return the statistics of `grad_sum`: FP32 (2, rows)."""
        return row_stats.of_shard(self.grad_sum) if self._rows is None else self._rows

    def changeable(self) -> Iterator[tuple[str, Tensor, int]]:
        """Yield for each parameter, in the same order on every rank: name, the elements of `grad_sum` that this rank
        owns, which the caller may change, and the number of the first one in the parameter.
        """
        self._rows = None
        own = {piece.spec.name: (self.grad_sum[piece.elements], piece.first) for piece in self.pieces}
        for slot in self.plan.slots:
            yield slot.spec.name, *own.get(slot.spec.name, (self.grad_sum[:0], 0))

    def expect_sum(self) -> None:
        """Wait for the sum under way, then allow the next micro-batch's sum."""
        self.wait_for_sum()
        self.sum_pending = None

    def discard_sum(self) -> None:
        """Forget the step's sums and free their memory. No sum may be under way."""
        self.is_summed_across = False
        self._rows = None
        self._total_begun = False
        self._free_sum(self.rank_sum)
        if self.total is not None:
            self._free_sum(self.total)

    def _free_sum(self, sum_of_grads: Tensor) -> None:
        if self.storage.frees_grads:
            free(sum_of_grads)

    # Masters, and their casts on the way to all owners.

    def part(self, span: GroupSpan) -> UpdateSlice:
        """Return the tensors that an update reads and writes in `span`, a range of this rank's shard inside one of
        `spans`. For an element of `spans` the result is the same object every time.
        """
        if span in self._parts:
            return self._parts[span]
        at = slice(span.start, span.end)
        states = self.states_of(span.start, span.end)
        half = None if self.updated_dtype is None else self.param_shard[at]
        part = UpdateSlice(span.group, self.grad_sum[at], self.master[at], states, half)
        if span in self.spans:
            self._parts[span] = part
        return part

    @property
    def updated_dtype(self) -> torch.dtype | None:
        """Return the dtype in which an update writes half parameters. None: it writes none, because the gather of these
        parameters casts the masters.
        """
        return None if self.storage.frees_params else self.params.dtype

    def states_of(self, start: int, end: int) -> States:
        """Return views of the states of the shard's elements [start, end), a range inside one of `spans`."""
        of_spans = zip(self.spans, self.states, strict=True)
        first, states = next((span.start, states) for span, states in of_spans if start < span.end)
        return {name: state[start - first : end - first] for name, state in states.items()}

    def owned_ranges(self) -> Iterator[OwnedRange]:
        """Yield every run of a parameter's elements that this rank owns, without padding."""
        for piece in self.pieces:
            if piece.numel:
                states = self.states_of(piece.start, piece.start + piece.numel)
                kept = {} if self.average is None else {AVERAGE: self.average[piece.elements]}
                yield OwnedRange(piece.spec, piece.first, {MASTER: self.master[piece.elements], **kept, **states})

    def begin_average(self) -> None:
        """Keep an average of the masters, which starts from their present values."""
        if self.average is None:
            self.average = torch.empty_like(self.master)
            self.bytes = replace(self.bytes, average=self.average.nbytes)
        torch.add(self.master, 0.0, out=self.average)  # -0 becomes 0, which no share of 0 changes

    def move_average(self, share: Tensor) -> None:
        """Move the average by a share, FP32 (), of its distance to the masters. 0 leaves each bit as it is."""
        assert self.average is not None
        self.average.lerp_(self.master, share)

    @property
    def shown(self) -> Tensor:
        """Return the values whose casts the half parameters are: FP32 (shard_numel,)."""
        return self.average if self.average is not None and self.shows_average else self.master

    def cast_shown(self) -> None:
        """Overwrite this rank's half parameters with the casts of its shown values."""
        self.param_shard.copy_(self.shown)

    def launch_gather(self, number: int = 0, what: str = "") -> Pending:
        """Start sending this rank's shard to all owners and receiving their shards.

        `number`: as in `Collectives.all_gather`. `what`: text for an error message.
        """
        assert self.gather_pending is None
        with noting(what):
            self.gather_pending = self.owners.all_gather(self.params, self.param_shard, number)
        self.gather_pending.what = what
        return self.gather_pending

    def wait_for_params(self) -> None:
        """Return once the half parameters may be read. On NCCL only the current stream waits, not the host."""
        if self.gather_pending is not None:
            pending = self.gather_pending
            self.gather_pending = None
            pending.wait()


def _has_memory_alone(grad: Tensor) -> bool:
    """Return whether no other tensor shares the gradient's memory. A later node of backward could write to memory that
    is shared.
    """
    return torch._C._storage_Use_Count(grad.untyped_storage()._cdata) == 2  # 2: the gradient and this temporary handle


def make_buckets(
    layout: FlatLayout,
    owners_by_axis: Sequence[Collectives],
    groups: Sequence[UpdateGroup],
    precision: Precision,
    sharding: Sharding,
    device: torch.device,
    owner_adds: bool = False,
) -> list[Bucket]:
    """Return the buckets of a layout, with zeroed masters and states. `owners_by_axis`: the owners' collectives, by
    `BucketPlan.axis`.
    """
    buckets = list[Bucket]()
    num_owned = Counter[Collectives]()
    for number, plan in enumerate(layout.buckets):
        owners = owners_by_axis[plan.axis]
        num_owned[owners] += 1
        place = num_owned[owners]
        buckets.append(Bucket(number, plan, owners, place, groups, precision, sharding, device, owner_adds=owner_adds))
    return buckets
