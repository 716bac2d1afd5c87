"""The conductor: calls the stages of a mixed-precision step in the order in which the data flows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager as Context
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from megamix.clock import Clock
from megamix.comm.collectives import Collectives, make_collectives
from megamix.comm.starters import refuse_alone
from megamix.comm.topology import Topology
from megamix.mixed_precision import settings
from megamix.mixed_precision.bucket import Bucket
from megamix.mixed_precision.examination import look, new_examination, watch
from megamix.mixed_precision.flat_layout import FlatLayout, Piece, build_layout
from megamix.mixed_precision.foreign_params import warn_of_foreign_params
from megamix.mixed_precision.fused_update import CompiledUpdate, StepScalars, choose_update
from megamix.mixed_precision.grad_reduce import GradReduce, connect_axes, make_sums, require_equal_buckets
from megamix.mixed_precision.grad_stats import GradStats, PieceStats, agree, clip_coefficient
from megamix.mixed_precision.half_grads import HalfGrads, refuse_second_engine
from megamix.mixed_precision.half_params import (
    Entry,
    describe_params,
    describe_whole,
    refuse_shared_elements,
    single_device,
)  # fmt: skip
from megamix.mixed_precision.loss_scale import SMALLEST_USED, StaticLossScale
from megamix.mixed_precision.master_shard import Fill, MasterShard, OwnedRange, full_weights, load_weights, take_over
from megamix.mixed_precision.matrix_update import MatrixUpdate, with_moves
from megamix.mixed_precision.moving_buffers import MovingBuffers
from megamix.mixed_precision.optimizers import Optimizer
from megamix.mixed_precision.settings import Precision, Sharding
from megamix.mixed_precision.step import StepResult, StepUnderWay, lr_of, put_lr_table
from megamix.mixed_precision.unit_gather import LIVES
from megamix.mixed_precision.unseen_writes import UnseenWrites


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """What an engine was built for."""

    precision: Precision
    sharding: Sharding
    layout: FlatLayout
    params: list[Entry]  # of the whole model, in registration order, and its buffers
    buffers: list[Entry]
    param_names: list[str]
    pieces: list[Piece]  # the parts of parameters that this rank owns, as `StepResult.by_piece` has them
    update_path: str  # "compiled", or "library": torch's own kernels


class ShardedEngine:
    """Trains any module in half precision with the FP32 truth sharded over the data-parallel ranks.

        engine = ShardedEngine(model, AdamW(lr=3e-4), Precision(torch.bfloat16))
        for tokens, targets in batches:
            engine.backward(loss_of(model(tokens), targets))
            engine.step()

    The module keeps its Parameters; their data become views into flat half buffers, starting from the first rank's
    values, or from what `fill` writes; the module needs none then (`without_values`). Gradients are averaged over ranks
    and over `grad_accum_steps` calls of `backward` per `step`, by weight. `clip_grad`: largest global norm; 0 is off.
    """

    __reduce__ = settings.refuse_copy

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, precision: Precision | None = None,
        sharding: Sharding | None = None, clip_grad: float = 0.0, grad_accum_steps: int = 1,
        compile_update: bool = True, fill: Fill | None = None,
    ):  # fmt: skip
        precision = Precision() if precision is None else precision
        sharding = Sharding() if sharding is None else sharding  # by `or` an empty list would not be refused
        self.precision, self.sharding = precision, sharding
        settings.check_arguments(model, optimizer, precision, sharding, clip_grad, grad_accum_steps)
        if sharding.topology is None:
            refuse_alone()
        refuse_second_engine(model)
        optimizer = self.optimizer = optimizer.for_model(model)
        device, grad_dtype = single_device(model), precision.own_grad_dtype
        refuse_shared_elements(model)
        self.module, self.device, self.clip_grad, self.grad_accum_steps = model, device, clip_grad, grad_accum_steps
        topology = self.topology = sharding.topology or Topology.current()
        specs, groups, axes = describe_params(model, optimizer, topology, sharding)
        self.params, self.buffers = describe_whole(model, specs, topology)
        self.param_names = [entry.name for entry in self.params]  # of the whole model, in registration order
        if topology.world.rank == 0:
            optimizer.warn_of_doubts(model, {entry.name: entry.full_shape for entry in self.params})
        layout = self.layout = build_layout(specs, [axis.size for axis in axes], sharding.bucket_size)
        world = self.collectives = make_collectives(topology.world, device)  # all ranks of the model
        self._tp, self._pp = (make_collectives(axis, device) for axis in (topology.tp, topology.pp))
        by_axis = connect_axes(axes, precision, device, sharding.collectives)
        among = self.bucket_collectives = [by_axis[bucket.axis] for bucket in layout.buckets]  # of each, its owners
        self.clock, self.loss_scale = Clock(device), precision.loss_scale or StaticLossScale()
        states = [group.states for group in groups]
        self._fingerprint = settings.fingerprint(layout, states, precision.dtype, self.loss_scale.rule)
        chosen = (precision.dtype, grad_dtype, precision.reduce_dtype, clip_grad, grad_accum_steps, compile_update)
        others = (self.loss_scale.settings(), sharding.shard, sharding.accumulate)
        settings.require_equal(world, device, optimizer, chosen, others)
        require_equal_buckets(by_axis, device, layout.buckets)

        make_params, make_buffers, make_gather = LIVES[sharding.shard]
        half = self.half_params = make_params(model, layout, precision.dtype, device)
        shard = self.master_shard = MasterShard(layout, among, groups, device)
        take_over(model, half, shard, among, by_axis[0], topology, fill)
        self.loss_scale.to(device)
        grads = self.half_grads = HalfGrads(layout, half.params, grad_dtype, device, make_buffers())
        self.param_gather = make_gather(model, sharding.units, half, shard, sharding.overlap, self.clock, grads.came)
        require_equal_buckets(by_axis, device, [layout.buckets[k] for k in self.param_gather.order_of_need])
        sums = make_sums(grads.buffers, among, precision, sharding, grad_accum_steps)
        kinds = (half.flat, grads.flat, sums.of_step)
        update, stats = choose_update(optimizer, with_moves(optimizer, groups), *kinds, world, compile_update)
        self.update_path = "compiled" if isinstance(update, CompiledUpdate) else "library"  # torch's own kernels
        self._cuts = [[(run, update) for run in runs] for runs in self.master_shard.runs]
        self.matrix_update = MatrixUpdate(optimizer, update, len(groups), shard, half, topology, self.clock)
        self.grad_reduce = GradReduce(layout, grads.buffers, sums, stats, among, sharding.overlap, self.clock)
        self.piece_stats = PieceStats(layout, [own.axis.rank for own in among], device, topology.saves_shard)
        self.under_way = StepUnderWay(grad_accum_steps, device, lambda: model.training and not grads.inside_backward)
        parts = (half.shards, shard.master, self.piece_stats.by_bucket)
        unseen = self.unseen_writes = UnseenWrites(*parts, self.param_names, self.under_way)
        half.before_free = lambda bucket: unseen.look([bucket] if unseen.due else [])
        self.moving_buffers = MovingBuffers(model)
        self.applied_updates, self.skipped_steps = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))
        self._lr_table = put_lr_table(optimizer.lr_table(), device)
        # Fill it with a positive number on any rank: from the next step() on that is every rank's `stop_requested`.
        self.stop_request = torch.zeros((), dtype=torch.float64, device=device)

    @property
    def buckets(self) -> list[Bucket]:
        """Return what this rank trains and owns, bucket by bucket, to look at."""
        shard, half, of_step = self.master_shard, self.half_params, self.grad_reduce.grad_shards
        return [
            Bucket(
                plan=plan, owners=self.bucket_collectives[k], spans=shard.runs[k],
                pieces=self.piece_stats.by_bucket[k],
                named_params={slot.spec.name: half.params[slot.spec.name] for slot in plan.slots}, params=half.flat[k],
                param_shard=half.shards[k], grads=self.half_grads.flat[k], grad_sum=of_step[k],
                master=shard.master[k], states=shard.states[k],
            )
            for k, plan in enumerate(self.layout.buckets)
        ]  # fmt: skip

    @property
    def progress(self) -> StepUnderWay:
        return self.under_way

    @property
    def world(self) -> Collectives:
        """Return what all ranks of the model do together."""
        return self.collectives

    @property
    def plan(self) -> EnginePlan:
        return EnginePlan(
            self.precision, self.sharding, self.layout, self.params, self.buffers, self.param_names,
            self.piece_stats.pieces, self.update_path,
        )  # fmt: skip

    @contextmanager
    def micro_batches(self, count: int) -> Iterator[None]:
        """Take `count` of the step's micro-batches, forwards and backwards, inside, as a pipeline's schedule runs them:
        their losses through `progress.scaled`, their gradients within `backward_pass`.
        """
        with self.accumulate(count):
            self.moving_buffers.begin()  # no forward of the whole module does
            yield

    def collect(self, names: Iterable[str]) -> None:
        """Take the gradients that a pass has put into `param.grad` of these without firing the ready hooks."""
        self.half_grads.take(names)

    def check_module(self) -> None:
        """Raise RuntimeError if the module's parameters are no longer as the engine has left them."""
        self.half_params.check()

    def __getattr__(self, name: str) -> Any:
        raise settings.attribute_error(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.under_way.claim()
        try:
            return self.module(*args, **kwargs)
        except RuntimeError as error:
            settings.explain_dtypes(error, args, kwargs, self.half_params.dtype)
            raise

    def backward(self, loss: Tensor, weight: float = 1.0, last: bool = False) -> None:
        """Back-propagate `loss` (one element, the mean over this rank's micro-batch), times the loss scale.

        Where only some of its targets count, give the sum over those, divided by the number of all, and the share that
        counts as `weight`: a step's gradient and loss are the sums of what was given over the sum of the weights, the
        exact mean over all targets of all ranks. Where none counts anywhere they are zero.
        In the last micro-batch of a step each bucket's reduction starts as soon as its gradients are complete. `last`:
        this one is, though fewer than `grad_accum_steps` came; ranks may differ, unless each is gathered or reduced.
        """
        settings.check_loss(loss, weight)
        examined = self.under_way.examination is not None and self.under_way.micro_batches == 0
        if examined or self.half_grads.passes == 0:
            warn_of_foreign_params(loss, self.half_params.params.values())
        last = last or self.under_way.micro_batches == self.grad_accum_steps - 1
        completes = self.half_grads.names if last or self.grad_reduce.takes_each else ()
        with self.accumulate(last=last), self.backward_pass(self.under_way.micro_batches, completes, loss):
            self.under_way.scaled(loss, weight, counts=self.topology.counts_loss).backward()  # type: ignore[no-untyped-call]  # no types

    @contextmanager
    def accumulate(self, micro_batches: int = 1, last: bool = False) -> Iterator[None]:
        """Take the step's next micro-batches: their losses through `under_way.scaled`, their gradients within
        `backward_pass`. With the last one, what is left of the sums over the ranks begins. `backward` does all of this
        for one; a pipeline's schedule runs all of a step at once. `last`: the step ends with these, however few came.
        """
        with self.under_way.alone("engine.backward"):
            self.half_params.check()
            self.under_way.require_room(micro_batches)
            if self.under_way.micro_batches == 0:
                self.under_way.begin(self.loss_scale.loss_scale.clamp(min=SMALLEST_USED))
            try:
                yield
            except BaseException as error:
                settings.explain_stale_loss(error)
                self.moving_buffers.note()
                self._forget_step()
                raise
            self.moving_buffers.note()
            ends = self.under_way.add(micro_batches, last)
            if ends or self.grad_reduce.takes_each:
                self.half_grads.fill_missing()
                self.grad_reduce.end_micro_batch(ends)

    def backward_pass(self, micro_batch: int, completes: Collection[str], loss: Tensor | None = None) -> Context[None]:
        """Take the gradients of one pass through the model, or through a stage of it, by the ready hooks.

        `completes`: the parameters whose gradients of this step are whole with it; a bucket's sum over the ranks begins
        when all of it is. `loss`: what is back-propagated, for what it reads beside the model's output.
        """
        look_at = look(self.under_way.examination, micro_batch)
        grads = self.half_grads.backward_pass(self.grad_reduce.launch, completes, look_at)
        return self.param_gather.backward_pass(grads, loss)

    def set_lr(self, lr: float | Sequence[float]) -> None:
        """Replace the learning rate, from the next `step()` on: a number, or one per update as in the constructor, of
        which the entry of the next update comes next. Groups keep their factors. The host does not wait.

        The first rank's holds for all, and travels with the step's agreement; other ranks need not call it. No state
        keeps it: whoever loads a state sets it again.
        """
        self.optimizer = replace(self.optimizer, lr=lr)  # refuses what cannot be
        self._lr_table = put_lr_table(self.optimizer.lr_table(), self.device)

    def wait(self) -> None:
        """Return once no transfer of parameters is under way, so they may be read in any way, if the rank has them.
        Without `Sharding.units` none is after `step()`; with them a forward and `state_dict()` await them.
        """
        self.param_gather.wait_all()

    def discard_step(self) -> None:
        """Forget the micro-batches since the last `step()`, what their forwards have moved of buffers, and
        `examine_next_step()`, for instance when a forward has failed; a `backward` that fails does it by itself. Every
        rank must call it.
        """
        self._forget_step()
        self.param_gather.end()

    def _forget_step(self) -> None:
        self.half_grads.discard()
        self.grad_reduce.reset()
        self.under_way.discard()
        self.moving_buffers.put_back(torch.ones_like(self.stop_request, dtype=torch.bool))

    def examine_next_step(self) -> None:
        """Look closely at the next step: `StepResult.examination`. What it computes stays the same, bit for bit."""
        self.under_way.require_empty("examine_next_step()", "before the first")
        self.under_way.examination = new_examination(self.param_names, self.grad_accum_steps, self.device)

    def step(self) -> StepResult:
        """Agree, update and send out; the host never waits for the device.

        If any gradient on any rank is not finite, nothing changes anywhere but the loss scale and `skipped_steps`.
        """
        with self.under_way.alone("step()"):
            grad_shards, by_piece, stats = self._sum_and_agree("step()")
            with self.grad_reduce.used():
                with self.clock.span("update"):
                    cuts, examination, self.under_way.examination = self._cuts, self.under_way.examination, None
                    if examination is not None:
                        cuts = watch(examination, self.piece_stats.by_bucket, grad_shards, self.matrix_update.of_run)
                    # The scale that backward used: the next step's may differ from it by the growth factor.
                    divisor = self.under_way.scale_used.double() * stats.weight_sum
                    grad_norm = stats.sum_of_squares.sqrt() / divisor
                    multiplier = (clip_coefficient(grad_norm, self.clip_grad) / divisor).float()
                    coefficients = self.optimizer.coefficients((update := self.applied_updates + 1).double())
                    scalars = StepScalars(multiplier, stats.found_inf, stats.lr, update.float(), coefficients)
                for bucket in self.matrix_update.in_turn(self.param_gather.order_of_need, cuts, grad_shards, scalars):
                    self.param_gather.updated(bucket)
            self.applied_updates += ~stats.found_inf
            self.skipped_steps += stats.found_inf
            self.loss_scale.update_(stats.found_inf, stats.max_abs, self.under_way.scale_used)
            self.half_params.note_written()
            self.moving_buffers.put_back(stats.found_inf)
            return StepResult(
                (stats.loss_sum / stats.weight_sum).float(), stats.found_inf, grad_norm.float(), stats.max_abs.float(),
                self.under_way.scale_used.clone(), scalars.lr, stats.stop_requested, by_piece, stats.recorded,
                examination,
            )  # fmt: skip

    def probe_loss_scale(self) -> None:
        """Let the loss scale take note of these gradients and forget them, in place of the first `step()`.

        Nothing else changes, so the first step may take the same batch. Every rank must call it.
        """
        _, _, stats = self._sum_and_agree("probe_loss_scale()")
        self.grad_reduce.reset()
        self.loss_scale.update_(stats.found_inf, stats.max_abs, self.under_way.scale_used)
        self.moving_buffers.put_back(torch.ones_like(stats.found_inf))

    def _sum_and_agree(self, call: str) -> tuple[list[Tensor], Tensor, GradStats]:
        """End the step's sums: each bucket's shard, its statistics by piece (FP64 (2, pieces)), those of the model."""
        self.under_way.require_complete(call)
        self.half_params.check()
        self.unseen_writes.refuse_told()
        self.param_gather.leave(call)  # what no forward has awaited, e.g. of a unit it skipped, is about to be written
        if self.unseen_writes.due:
            self.unseen_writes.look(range(len(self.half_params.copies())))
        grad_shards = [self.grad_reduce.wait(bucket) for bucket in range(len(self.layout.buckets))]
        with self.clock.span("update"):
            by_piece = self.piece_stats([self.grad_reduce.rows(bucket) for bucket in range(len(grad_shards))])
            lr = lr_of(self._lr_table, self.applied_updates + 1)
            found = self.unseen_writes.found
            stats = agree(by_piece, self.under_way, self.stop_request, lr, found, self.collectives)
            self.unseen_writes.tell(stats.unseen_writes)
        self.under_way.reset()
        return grad_shards, by_piece, stats

    @contextmanager
    def whole_parameters(self) -> Iterator[None]:
        """Let the module's parameters be read in any way inside; every rank must enter and leave. Those of
        `Sharding(shard="parameters")` have no memory otherwise. A forward inside gathers nothing: a rank may go alone.
        What is written inside is refused by the `step()` two steps later, or when weights are given or saved before.
        """
        self._require_between_steps("whole_parameters()")
        with self.param_gather.whole():
            self.unseen_writes.asked = not self.half_params.copies()
            try:
                yield
            finally:
                if not self.half_params.copies():  # what was written inside goes with the memory
                    self.unseen_writes.look(range(len(self.layout.buckets)))

    def full_weights(self) -> dict[str, Tensor]:
        """Return the state dict on the host, trained weights in FP32 from the masters. Every rank must call it."""
        self._require_between_steps("full_weights()")
        self.refuse_unseen_writes()
        state = (self.module, self.half_params, self.master_shard, [*self.params, *self.buffers])
        return full_weights(*state, self._tp, self._pp)

    def load_weights(self, state_dict: Mapping[str, Tensor]) -> None:
        """Set masters and half parameters, and copy frozen parameters and buffers; optimizer states stay.

        Give full FP32 weights under the module's own names, the same on every rank.
        Raises: ValueError naming missing, unknown and misshapen entries, the first of each, or a parameter with NaN,
        inf or a value that the dtype cannot hold; nothing is changed then.
        """
        self._require_between_steps("load_weights()", writes=True)
        load_weights(state_dict, self.module, self.half_params, self.master_shard, self.params, self.buffers)
        self.unseen_writes.forget()
        self.half_params.note_written()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the run's state (copies): masters, optimizer states, counters, loss scale."""
        self._require_between_steps("state_dict()")
        self.refuse_unseen_writes(on_every_rank=False)
        return {
            "layout": self._fingerprint,
            "rank": self.topology.world.rank,
            **self.master_shard.state_dict(),
            "applied_updates": self.applied_updates.clone(),
            "skipped_steps": self.skipped_steps.clone(),
            "loss_scale": self.loss_scale.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave on the same rank of the same layout. Every rank must call it.

        Masters, states and counters are taken over; lr and all other settings stay this engine's own.
        Raises: ValueError if the layout (with the optimizer's groups), the names of the optimizer's states, the loss
        scale's rule or the rank differ; nothing is changed then.
        """
        self._require_between_steps("load_state_dict()", writes=True)
        settings.require_own_state(state, self._fingerprint, self.topology.world.rank)
        self.master_shard.load_state_dict(state)
        self.publish_masters()
        self.applied_updates.copy_(state["applied_updates"])
        self.skipped_steps.copy_(state["skipped_steps"])
        self.loss_scale.load_state_dict(state["loss_scale"])

    def owned_ranges(self) -> list[OwnedRange]:
        """Return what this rank owns of masters and states: views, to read or, before `publish_masters`, to write."""
        self._require_between_steps("owned_ranges()")
        return list(self.master_shard.owned_ranges())

    def publish_masters(self) -> None:
        """Make every half parameter the cast of its master, which was written. Every rank must call it."""
        self._require_between_steps("publish_masters()", writes=True)
        self.param_gather.publish()
        self.unseen_writes.forget()
        self.half_params.note_written()

    def refuse_unseen_writes(self, on_every_rank: bool = True) -> None:
        """Compare half parameters that this rank keeps of its own masters with these; reads the device.

        Raises: RuntimeError naming the first that differs: `on_every_rank`, which all must call then, or on this alone.
        """
        self.unseen_writes.look(range(len(self.half_params.copies())))
        self.unseen_writes.refuse(self.collectives if on_every_rank else None)

    def _require_between_steps(self, call: str, writes: bool = False) -> None:
        self.under_way.require_empty(call, "right after step()")
        self.half_params.check()
        self.param_gather.leave(call) if writes else self.param_gather.wait_all()
