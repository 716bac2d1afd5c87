"""A bucket: neighbouring parameters in one flat buffer, from their gradients to their next values."""

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

from megamix import tuned
from megamix.comm.collectives import Collectives, Pending, noting
from megamix.mixed_precision.flat_layout import ROW, BucketPlan, FlatLayout, GroupSpan, ParamSpec
from megamix.mixed_precision.row_stats import RowStats
from megamix.mixed_precision.settings import Precision, Sharding
from megamix.mixed_precision.storage import STORAGE, FreedParameter, Storage, free, take
from megamix.mixed_precision.update_slice import MASTER, States, UpdateGroup, UpdateSlice

log = logging.getLogger("megamix")


class OwnedRange(NamedTuple):
    """A run of one parameter's elements, flattened, from number `start` on, that this rank owns."""

    spec: ParamSpec
    start: int
    tensors: States  # (n,) each, views: "master" in FP32, then the optimizer's states


@dataclass(slots=True, eq=False)
class ParamGrad:
    """One parameter's place in its bucket's gradients, and what has come there in this step."""

    name: str
    view: Tensor  # gradient dtype, of the parameter's shape
    counts: bool  # False: another rank's copy of this gradient is the one that is summed
    waits: bool  # for others of its bucket: it is so small that a call costs more than its bytes
    touched: bool = False
    ready: bool = False  # whole: nothing more is to come in this step


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketBytes:
    """Bytes of a bucket's buffers on one rank, of each while it has memory."""

    plan: BucketPlan
    storage: Storage
    params: int
    grads: int
    rank_sum: int  # 0: it lies in `grads`
    total: int  # 0: there is none
    master: int
    states: int

    @classmethod
    def count(
        cls,
        plan: BucketPlan,
        precision: Precision,
        sharding: Sharding,
        groups: Sequence[UpdateGroup],
        owner_adds: bool,
        shard: int | None,
    ) -> BucketBytes:
        """Count without tensors or ranks. `owner_adds`: it adds up a step's micro-batches; `shard`: which one is the
        rank's; None: the one with the most bytes of states, which no rank exceeds.
        """
        storage = STORAGE[sharding.shard]
        states = [
            sum((span.end - span.start) * groups[span.group].state_bytes for span in plan.shard_spans(number))
            for number in (range(plan.num_shards) if shard is None else [shard])
        ]
        return cls(
            plan=plan,
            storage=storage,
            params=plan.padded_numel * precision.dtype.itemsize,
            grads=plan.padded_numel * precision.own_grad_dtype.itemsize,
            rank_sum=plan.shard_numel * precision.sum_dtype(plan.num_shards).itemsize if storage.grads_pass else 0,
            total=plan.shard_numel * torch.float32.itemsize if owner_adds else 0,
            master=plan.shard_numel * torch.float32.itemsize,
            states=max(states),
        )

    def held(self) -> int:
        """Return those of what is there between steps."""
        params = 0 if self.storage.params_pass else self.params
        grads = 0 if self.storage.grads_pass else self.grads + self.total
        return params + grads + self.master + self.states

    def passing(self) -> BucketBytes:
        """Return those of what is there only while a step needs it."""
        params = self.params if self.storage.params_pass else 0
        if self.storage.grads_pass:
            return replace(self, params=params, master=0, states=0)
        return replace(self, params=params, grads=0, rank_sum=0, total=0, master=0, states=0)


class Bucket:
    """Neighbouring parameters in one flat buffer: the unit of one reduce-scatter, one update and one all-gather.

    `params` half (padded_numel,): the module's Parameters, `named_params`, are views into it; its padding is zero.
    `param_shard` half (shard_numel,): this rank's part of it, casts of the masters.
    `grads` gradient dtype (padded_numel,): a step's sum over this rank's micro-batches, with the loss scale in it.
    `rank_sum` (shard_numel,): this rank's part of its sum over the owners.
    `total` FP32 (shard_numel,): the sum of these over micro-batches, where the owner adds them up.
    `master` FP32 (shard_numel,): the truth. `states`: for each of `spans` the states of its group, in their own dtypes.

    Which of `params`, `grads`, `rank_sum` and `total` have memory only while a step needs them says `storage`.
    """

    params: Tensor
    param_shard: Tensor
    named_params: dict[str, nn.Parameter]
    _classes: dict[str, type[nn.Parameter]]  # their own, which may be subclasses
    grads: Tensor
    rank_sum: Tensor

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
        """Make the truth, zeros. `owners`: the ranks that have a shard each; `place`: among the buckets of these,
        from 1 on; `owner_adds`: it adds up a step's micro-batches.
        """
        self.number = number
        self.plan = plan
        self.owners = owners
        self.place = place
        self.precision = precision
        self.storage = STORAGE[sharding.shard]
        self.bytes = BucketBytes.count(plan, precision, sharding, groups, owner_adds, owners.axis.rank)
        self.spans = plan.shard_spans(owners.axis.rank)  # of this rank's shard, one for each optimizer group in it
        self.pieces = plan.shard_pieces(owners.axis.rank)  # the parts of parameters in it
        self.piece_rows = [(piece.end - piece.start) // ROW for piece in self.pieces]
        borders = [0, *(piece.end // ROW for piece in self.pieces)]
        self.row_borders = torch.tensor(borders, device=device)
        self.piece_starts = np.array(borders[:-1], dtype=np.int64)  # the first row of each piece
        self.master = torch.zeros(plan.shard_numel, dtype=torch.float32, device=device)
        self.states = [groups[span.group].new_states(span.end - span.start, device) for span in self.spans]
        self.total: Tensor | None = None
        self.param_grads: dict[str, ParamGrad] = {}
        self.missing = 0  # how many gradients are not ready
        self._waiting: dict[str, Tensor] = {}  # gradients of this pass that are not in `grads` yet
        self._paddings: list[Tensor] = []  # behind the parameters' places in `grads`
        self.sum_pending: Pending | None = None
        self.gather_pending: Pending | None = None
        self._rows: Tensor | None = None  # statistics of the sum, taken while it was made
        self._total_begun = False
        self._told_of_shared = False
        self._parts: dict[GroupSpan, UpdateSlice] = {}

    # The half parameters.

    def flattened(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return values of this bucket's parameters, each of its spec's shape: FP32 (padded_numel,)."""
        full = torch.zeros(self.plan.padded_numel, dtype=torch.float32, device=self.master.device)
        for slot in self.plan.slots:
            full[slot.start : slot.end].copy_(values[slot.spec.name].detach().reshape(-1))
        return full

    def adopt(self, params: Mapping[str, nn.Parameter], full: Tensor) -> None:
        """Let the module's Parameters be views into the flat buffer, which takes these values in half. Their own
        weights go: with all buckets' at once a model would need 1.5 times the memory of its FP32 weights.

        `param.data = view` and not `nn.Parameter(view)`: the view then has its own version counter, so that a gather
        which lands in the buffer during forward does not make backward refuse its saved tensors, and the user's
        references stay good. Shapes: full FP32 or half (padded_numel,).
        """
        self.params = full.to(self.precision.dtype)
        self.param_shard = self.owners.own_part(self.params)
        self.named_params = {slot.spec.name: params[slot.spec.name] for slot in self.plan.slots}
        for slot, param in zip(self.plan.slots, self.named_params.values(), strict=True):
            param.data = self.params[slot.start : slot.end].view(slot.spec.shape)
        self._classes = {name: type(param) for name, param in self.named_params.items()}
        if self.storage.params_pass:
            FreedParameter.names.update({param: name for name, param in self.named_params.items()})
            self.free_params()

    def load(self, full: Tensor) -> None:
        """Set masters and half parameters. Shapes: full FP32 (padded_numel,)."""
        self.master.copy_(self.owners.own_part(full))
        if not self.storage.params_pass:
            self.params.copy_(full)

    def take_params(self) -> None:
        """Let the half parameters have memory."""
        if self.storage.params_pass:
            take(self.params)

    def show_params(self) -> None:
        """Let everybody read the module's Parameters, which are there."""
        for name, param in self.named_params.items():
            param.__class__ = self._classes[name]

    def free_params(self) -> None:
        """Let nobody read them any more, and give their memory back."""
        for param in self.named_params.values():
            param.__class__ = FreedParameter
        if not free(self.params) and not self._told_of_shared:
            self._told_of_shared = True
            log.warning(
                "%.1f MB of parameters stay in memory: a NumPy array or another process shares them. Inside "
                "engine.whole_parameters() take a copy, as tensor.clone().numpy()",
                self.params.nbytes / 1e6,
            )

    # The gradients, and their sum.

    def make_grads(self) -> None:
        """Make the buffers of gradients and sums.

        A sum lies in the bucket itself, where gradients keep their memory: in its own dtype over this rank's part; in
        FP32, of halves, at the start, all of which has been sent by then: 4 bytes for each element of a share of a
        bucket with 2 bytes an element, so it has at least 2 owners.
        """
        plan, device = self.plan, self.master.device
        dtype = self.precision.own_grad_dtype
        sum_dtype = self.precision.sum_dtype(self.owners.axis.size)
        self.grads = torch.zeros(plan.padded_numel, dtype=dtype, device=device)
        for slot, padded_end in zip(plan.slots, plan.padded_ends(), strict=True):
            spec = slot.spec
            view = self.grads[slot.start : slot.end].view(spec.shape)
            self.param_grads[spec.name] = ParamGrad(spec.name, view, spec.counts, waits=spec.numel < tuned.SMALL_GRAD)
            if slot.end < padded_end:
                self._paddings.append(self.grads[slot.end : padded_end])
        if self.storage.grads_pass:
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
        """Return where the sum is that an update reads: (shard_numel,)."""
        return self.rank_sum if self.total is None else self.total

    def expect_grads(self) -> None:
        """Forget what has arrived so far: the next gradient is the first."""
        for place in self.param_grads.values():
            place.touched = place.ready = False
        self._waiting.clear()
        self.missing = len(self.param_grads)

    def collect(self, name: str, grad: Tensor, completes: bool) -> None:
        """Take a gradient: a large one at once, a small one of its own memory when the bucket is complete or the pass
        is over.

        `completes`: no other comes in this step.
        """
        place = self.param_grads[name]
        if self.missing == 0:
            raise RuntimeError(
                f"parameter {name} got a second gradient in one backward when its bucket was complete, or one behind "
                "its unit's backward: a reentrant checkpoint recomputed its module. Use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        if not place.counts:
            grad = torch.where(grad.isfinite(), 0.0, grad)  # an overflow counts wherever it is
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
        """Let what has been taken be in `grads`."""
        if self._waiting:
            self._add(self._waiting)
            self._waiting.clear()

    def _add(self, grads: Mapping[str, Tensor]) -> None:
        """Copy first gradients, add later ones: copying costs 4 bytes an element where zeroing and adding costs 8."""
        if self.storage.grads_pass:
            take(self.grads)
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
        """Let parameters that got no gradient count as zeros; return their names."""
        self.add_waiting()
        silent = [place for place in self.param_grads.values() if not place.touched]
        if silent and self.storage.grads_pass:
            take(self.grads)
        for place in silent:
            place.view.zero_()
        return [place.name for place in silent]

    def close(self) -> None:
        """Be complete: no gradient comes any more before the sum."""
        self.missing = 0

    def launch_sum(self, row_stats: RowStats) -> Pending:
        """Start summing the gradients over the owners."""
        if self.storage.grads_pass:
            take(self.rank_sum)
        if self._paddings:
            torch._foreach_zero_(self._paddings)  # the last step's sum may lie there, or anything

        def sum_here(parts: Tensor) -> None:
            rows = row_stats.of_sum(parts, self.rank_sum)
            self._rows = rows if self.total is None else None

        is_wider = self.rank_sum.dtype != self.grads.dtype
        pending = self.owners.reduce_scatter(self.grads, self.rank_sum, sum_here if is_wider else None)
        pending.what = (
            f"while the gradients of {self.plan.name} were summed: every rank must call backward as often, and end "
            "all of it or none"
        )
        self.sum_pending = pending if self.total is None else Pending(then=partial(self._add_sum, pending))
        return pending

    def _add_sum(self, pending: Pending) -> None:
        assert self.total is not None
        pending.wait()
        if self.storage.grads_pass:
            take(self.total)
        if self._total_begun:
            self.total.add_(self.rank_sum)
        else:
            self.total.copy_(self.rank_sum)
        self._total_begun = True
        self._free_sum(self.rank_sum)

    def wait_for_sum(self) -> None:
        """Return once `grad_sum` may be read, and give the gradients' memory back."""
        if self.sum_pending is not None:
            self.sum_pending.wait()
        if self.storage.grads_pass:
            free(self.grads)

    def row_stats(self, row_stats: RowStats) -> Tensor:
        """Return the statistics of `grad_sum`: FP32 (2, rows)."""
        return row_stats.of_shard(self.grad_sum) if self._rows is None else self._rows

    def expect_sum(self) -> None:
        """Let the next micro-batch's sum come: what was begun has ended."""
        self.wait_for_sum()
        self.sum_pending = None

    def discard_sum(self) -> None:
        """Let the next step's first sum come, and give the sums' memory back; none is under way."""
        self._rows = None
        self._total_begun = False
        self._free_sum(self.rank_sum)
        if self.total is not None:
            self._free_sum(self.total)

    def _free_sum(self, sum_of_grads: Tensor) -> None:
        if self.storage.grads_pass:
            free(sum_of_grads)

    # The truth, and its casts on their way to all owners.

    def part(self, span: GroupSpan) -> UpdateSlice:
        """Return what an update reads and writes of a span of this rank's shard, which lies in one of `spans`; the same
        whenever it is asked for one of these.
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
        """Return in which dtype an update writes parameters; None: their gather casts the masters."""
        return None if self.storage.params_pass else self.params.dtype

    def states_of(self, start: int, end: int) -> States:
        """Return the states of the elements [start, end) of the shard, which lie in one of `spans`: views."""
        of_spans = zip(self.spans, self.states, strict=True)
        first, states = next((span.start, states) for span, states in of_spans if start < span.end)
        return {name: state[start - first : end - first] for name, state in states.items()}

    def owned_ranges(self) -> Iterator[OwnedRange]:
        """Yield every element of a parameter that this rank owns, without the padding."""
        for piece in self.pieces:
            if piece.numel:
                states = self.states_of(piece.start, piece.start + piece.numel)
                yield OwnedRange(piece.spec, piece.first, {MASTER: self.master[piece.elements], **states})

    def gather_master(self) -> Tensor:
        """Return the master weights of all owners: FP32 (padded_numel,). All of them must call it."""
        return self.owners.gather(self.master).view(-1)

    def cast_master(self) -> None:
        """Make this rank's half parameters the casts of its masters."""
        self.param_shard.copy_(self.master)

    def launch_gather(self, number: int = 0, what: str = "") -> Pending:
        """Start sending this rank's shard to all owners, and receiving theirs. `number`: as `Collectives.all_gather`
        has it; `what`: goes with an error.
        """
        assert self.gather_pending is None
        with noting(what):
            self.gather_pending = self.owners.all_gather(self.params, self.param_shard, number)
        self.gather_pending.what = what
        return self.gather_pending

    def wait_for_params(self) -> None:
        """Return once the half parameters may be read: on NCCL by what the current stream does next."""
        if self.gather_pending is not None:
            pending = self.gather_pending
            self.gather_pending = None
            pending.wait()


def _has_memory_alone(grad: Tensor) -> bool:
    """Return whether no other tensor shares its memory, which a later node of a backward could write."""
    return torch._C._storage_Use_Count(grad.untyped_storage()._cdata) == 2  # with the one that asks


def make_buckets(
    layout: FlatLayout,
    owners_by_axis: Sequence[Collectives],
    groups: Sequence[UpdateGroup],
    precision: Precision,
    sharding: Sharding,
    device: torch.device,
    owner_adds: bool = False,
) -> list[Bucket]:
    """Return the buckets of a layout, each with its truth, zeros. `owners_by_axis`: by `BucketPlan.axis`."""
    buckets = list[Bucket]()
    num_owned = Counter[Collectives]()
    for number, plan in enumerate(layout.buckets):
        owners = owners_by_axis[plan.axis]
        num_owned[owners] += 1
        place = num_owned[owners]
        buckets.append(Bucket(number, plan, owners, place, groups, precision, sharding, device, owner_adds=owner_adds))
    return buckets
