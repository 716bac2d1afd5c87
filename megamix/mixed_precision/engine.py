"""The conductor of a mixed-precision step: calls its stages in the order in which the data flows."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from megamix.base.added_loss import added_losses_times
from megamix.base.clock import Clock
from megamix.comm.collectives import make_collectives, noting
from megamix.comm.topology import Topology
from megamix.mixed_precision.bucket import Bucket, OwnedRange, make_buckets
from megamix.mixed_precision.census import (
    Census,
    Entries,
    Links,
    describe_whole,
    refuse_shared_elements,
    single_device,
    take_census,
)
from megamix.mixed_precision.examination import Examiner
from megamix.mixed_precision.flat_layout import FlatLayout, Piece, build_layout
from megamix.mixed_precision.fused_update import choose_kernels
from megamix.mixed_precision.grad_reduce import GradReduce, refuse_second_engine
from megamix.mixed_precision.grad_stats import GradStats, agree, decide, peak_rows, stats_by_piece
from megamix.mixed_precision.guards import refusals
from megamix.mixed_precision.guards.foreign_params import warn_of_foreign_params
from megamix.mixed_precision.guards.module_guard import ModuleGuard
from megamix.mixed_precision.guards.unseen_writes import UnseenWrites
from megamix.mixed_precision.loss_scale import SMALLEST_USED, StaticLossScale
from megamix.mixed_precision.module_state import MovingBuffers, Tallies
from megamix.mixed_precision.observer import StepObserver
from megamix.mixed_precision.optim.optimizer import GroupScalars, Optimizer
from megamix.mixed_precision.param_gather import ParamGather
from megamix.mixed_precision.settings import Precision, Sharding
from megamix.mixed_precision.step import StepProgress, StepResult, entry, put_table
from megamix.mixed_precision.unit_gather import UnitGather
from megamix.mixed_precision.update_slice import UpdateGroup, table_of
from megamix.mixed_precision.weights import Fill, full_weights, load_weights, take_over

GradientHook = Callable[[str, Tensor, Tensor, int], object]  # see `ShardedEngine.hook_gradients`


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """The facts that an engine was built with. They never change."""

    precision: Precision
    sharding: Sharding
    layout: FlatLayout
    entries: Entries  # parameters and buffers of the whole model
    pieces: list[Piece]  # the parts of parameters that this rank owns, in the order of `StepResult.by_piece`
    fingerprint: str  # hash of what two engines must share to exchange states

    @property
    def param_names(self) -> list[str]:
        return [entry.name for entry in self.entries.params]


class ShardedEngine:
    """Trains any module in half precision, with FP32 master weights sharded over the data-parallel ranks.

        engine = ShardedEngine(model, AdamW(lr=3e-4), Precision(torch.bfloat16))
        for tokens, targets in batches:
            engine.backward(loss_of(model(tokens), targets))
            engine.step()

    The module keeps its Parameters; their data become views into flat half buffers. Their first values are those of the
    first rank or, with `fill`, those that it writes. With `fill` the module needs no values (`without_values`).
    Gradients are averaged over ranks and over `grad_accum_steps` calls of `backward` per `step`, by weight.
    `clip_grad`: largest norm of the whole model's gradient; 0 turns clipping off.
    """

    __reduce__ = refusals.refuse_copy

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, precision: Precision | None = None,
        sharding: Sharding | None = None, clip_grad: float = 0.0, grad_accum_steps: int = 1,
        compile_update: bool = True, fill: Fill | None = None,
    ):  # fmt: skip
        precision = Precision() if precision is None else precision
        sharding = Sharding() if sharding is None else sharding  # with `or`, an empty list would not be refused
        refusals.check_arguments(model, optimizer, precision, sharding, clip_grad, grad_accum_steps)
        refuse_second_engine(model)
        refuse_shared_elements(model)
        self.module = model
        self.optimizer = optimizer.for_model(model)
        self.loss_scale = precision.loss_scale or StaticLossScale()
        self.clip_grad = float(clip_grad)
        self.grad_accum_steps = grad_accum_steps
        self.topology = sharding.topology or Topology.current()
        self.device = single_device(model)
        self.clock = Clock(self.device)

        # Parameters, their places and the links between ranks: arithmetic first, then one agreement of all ranks.
        census = take_census(model, self.optimizer, self.topology, sharding)
        layout = build_layout(census.specs, [axis.size for axis in census.axes], sharding.bucket_size)
        self._links = Links.connect(self.topology, census, precision, sharding, self.device)
        self.world = self._links.world  # all ranks of the model
        self.plan = self._agree(layout, census, precision, sharding, compile_update)

        # Memory, one bucket at a time: the module's own weights are freed as their bucket takes them over.
        owner_adds = sharding.owner_adds(grad_accum_steps)
        owners, groups = self._links.owners, census.groups
        self.buckets = make_buckets(layout, owners, groups, precision, sharding, self.device, owner_adds)
        take_over(model, self.buckets, self._links, precision.dtype, fill)
        for bucket in self.buckets:
            bucket.make_grads()
        self._connect_stages(census.groups, compile_update)

        # Counters on the device.
        self.loss_scale.to(self.device)
        self.applied_updates = torch.zeros((), dtype=torch.int64, device=self.device)
        self.skipped_steps = torch.zeros((), dtype=torch.int64, device=self.device)
        self._lr_table = put_table(self.optimizer.lr_table(), self.device)
        # A program may fill this tensor with a positive number on any rank. From the next step() on, `stop_requested`
        # is positive on every rank.
        self.stop_request = torch.zeros((), dtype=torch.float64, device=self.device)
        self.average_decay: float | Sequence[float] | None = None  # None: no average is kept

    def _agree(
        self, layout: FlatLayout, census: Census, precision: Precision, sharding: Sharding, compile_update: bool
    ) -> EnginePlan:
        """Return the plan that all ranks share. Raises: ValueError on every rank if one was given something else."""
        links = self._links
        entries = describe_whole(self.module, census.specs, links.pp, self.device)
        if links.world.axis.rank == 0:
            self.optimizer.log_warnings(self.module, {entry.name: entry.full_shape for entry in entries.params})
        refusals.require_equal(
            links.world,
            self.device,
            self.optimizer,
            precision.dtype,
            precision.own_grad_dtype,
            precision.reduce_dtype,
            self.clip_grad,
            self.grad_accum_steps,
            compile_update,
            self.loss_scale.settings(),
            sharding.shard,
            sharding.accumulate,
        )
        links.require_equal_order(layout.buckets)
        lengths = {spec.name: self.optimizer.state_lengths(spec.name, spec.full_shape) for spec in census.specs}
        states = [*(group.states for group in census.groups), *([name, own] for name, own in lengths.items() if own)]
        fingerprint = refusals.fingerprint(layout, states, precision.dtype, self.loss_scale.rule)
        shards = [plan.shard_pieces(links.owners[plan.axis].axis.rank) for plan in layout.buckets]
        return EnginePlan(precision, sharding, layout, entries, [*chain.from_iterable(shards)], fingerprint)

    def _connect_stages(self, groups: Sequence[UpdateGroup], compile_update: bool) -> None:
        """Build the stages of a step, in the order in which the data flows."""
        model, clock = self.module, self.clock
        buckets = self.buckets
        units, overlap = self.plan.sharding.units, self.plan.sharding.overlap
        self._observers = observers = list[StepObserver]()
        self._examiner: Examiner | None = None
        start_s = time.perf_counter()
        kernels = choose_kernels(self.optimizer, groups, buckets, self.world, compile_update)
        self.update_path, self.compile_s = kernels.path, time.perf_counter() - start_s
        self._row_stats = kernels.row_stats
        self._scalars = GroupScalars(self.optimizer, self.optimizer.kernel_groups(groups), self.device)
        self._gradient_hook: GradientHook | None = None
        self._grads = grads = GradReduce(buckets, self._links.replicas, kernels.row_stats, overlap, clock, observers)
        self.progress = StepProgress(
            self.grad_accum_steps,
            self.device,
            lambda: model.training and not grads.inside_backward,
            self.topology.parts.size,
        )
        self.progress.follow(model)
        readers = make_collectives(self.topology.readers, self.device)
        self._tallies = Tallies(model, readers, self.progress, self.device)
        self._unseen_writes = UnseenWrites(buckets, self.plan.param_names, self.progress, self.world.axis.rank == 0)
        self._gather: ParamGather | UnitGather
        if buckets[0].storage.frees_params:
            owners = self._links.owners[0]
            self._gather = UnitGather(
                model, units, overlap, buckets, owners, grads, self._unseen_writes, clock, observers
            )
        else:
            self._gather = ParamGather(model, units, overlap, buckets, grads, clock, observers)
        self._links.require_equal_order([bucket.plan for bucket in self._gather.order])
        self._update = self.optimizer.bucket_update(kernels.update, buckets, self.topology, clock, observers)
        self._guard = ModuleGuard(model, buckets)
        self._moving_buffers = MovingBuffers(model)

    def __getattr__(self, name: str) -> Any:
        raise refusals.attribute_error(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.progress.claim()
        try:
            return self.module(*args, **kwargs)
        except RuntimeError as error:
            refusals.explain_dtypes(error, args, kwargs, self.plan.precision.dtype)
            raise

    @contextmanager
    def observe(self, observer: StepObserver) -> Iterator[None]:
        """Show `observer` the gradients, transfers and updates of the steps inside the block."""
        if not isinstance(observer, StepObserver):
            raise TypeError(f"observe() takes a megamix.StepObserver, got {observer!r}; derive its class from it")
        self._observers.append(observer)
        try:
            yield
        finally:
            self._observers.remove(observer)

    def hook_gradients(self, hook: GradientHook | None) -> None:
        """Call `hook(name, grad, divisor, first)` in each step for each parameter, in the same order on every rank, in
        place of an earlier hook; None: no more. Every rank must call it.

        It runs in `step()`, between the sum over ranks and micro-batches and all that reads the sum: the overflow
        check, norm, clipping, update. It may change `grad` in place, and may not wait for the device.
        `grad` (n,): those elements of the flattened parameter's sum that this rank owns, from number `first` on,
        perhaps none, FP32 or half as `Precision` says, loss scale included. `divisor` FP64 (): the loss scale times the
        sum of weights, ranks times micro-batches as a rule; the mean is `grad / divisor`. Thus `grad.clamp_(-divisor,
        divisor)` clips the mean's elements to 1.
        """
        self._gradient_hook = hook

    def _change_gradients(self, hook: GradientHook) -> None:
        with noting("before gradients were changed: every rank must call hook_gradients()"):
            weight = self.world.table(self.progress.weight_sum.view(1)).sum()
        divisor = self.progress.scale_used.double() * weight.masked_fill(weight == 0, 1.0)
        for name, grad, first in chain.from_iterable(bucket.changeable() for bucket in self.buckets):
            hook(name, grad, divisor, first)

    def backward(self, loss: Tensor, weight: float = 1.0, last: bool = False) -> None:
        """Back-propagate `loss` (one element, the mean over this rank's micro-batch), times the loss scale.

        If only some targets count, give as `loss` the sum over the counted targets divided by the number of all
        targets, and as `weight` the share that counts. A step's loss and gradient are the sums over ranks and
        micro-batches divided by the sum of the weights: the exact mean over all counted targets of all ranks. If no
        target counts anywhere, both are zero.
        In the last micro-batch of a step each bucket's reduction starts as soon as its gradients are complete.
        `last=True` ends the step early. The ranks may end it after different numbers of micro-batches, except with
        shard="parameters" or accumulate="owner".
        """
        refusals.check_loss(loss, weight)
        number = self.progress.micro_batches
        if self._grads.passes == 0 or (self.progress.examined and number == 0):
            warn_of_foreign_params(loss, self.module.parameters())
        last = last or number == self.grad_accum_steps - 1
        completes = self._grads.names if last or self._grads.takes_each else ()
        with self._taking(1, last), self.backward_pass(number, completes, loss):
            self.progress.scaled(loss, weight, counts=self.topology.counts_loss).backward()  # type: ignore[no-untyped-call]  # untyped in torch

    @contextmanager
    def micro_batches(self, count: int) -> Iterator[None]:
        """Take `count` of the step's micro-batches, whose forwards and backwards the block runs in any order, as a
        pipeline does. Each loss goes through `progress.scaled`; each backward pass runs inside `backward_pass`.
        """
        with self._taking(count, last=False):
            # A pipeline never runs the whole module's forward, whose hooks call these.
            self.progress.claim()
            self._moving_buffers.begin()
            yield

    @contextmanager
    def _taking(self, micro_batches: int, last: bool) -> Iterator[None]:
        """Take the step's next micro-batches. After the last one, start all remaining sums over the ranks."""
        with self.progress.alone("engine.backward"):
            self._guard.check_gradients()
            self.progress.require_room(micro_batches)
            if self.progress.micro_batches == 0:
                self.progress.begin(self.loss_scale.loss_scale.clamp(min=SMALLEST_USED))
            try:
                yield
            except BaseException as error:
                refusals.explain_stale_loss(error)
                self._moving_buffers.note()
                self._forget_step()
                if isinstance(error, RuntimeError):
                    self._guard.check()  # if a changed module is the cause, this check names it
                raise
            self._moving_buffers.note()
            ends = self.progress.add(micro_batches, last)
            if ends or self._grads.takes_each:
                self._grads.end_micro_batch(ends)

    @contextmanager
    def backward_pass(self, micro_batch: int, completes: Collection[str], loss: Tensor | None = None) -> Iterator[None]:
        """Collect, by the ready hooks, the gradients of one backward pass through the model or through a stage of it.

        `completes`: names of the parameters whose gradients are complete after this pass. A bucket's sum over the ranks
        starts once all its gradients are complete. `loss`: the tensor to back-propagate; its graph is searched for
        parameters that it reads outside the model's output.
        """
        self.progress.claim()  # for forwards that backward runs again
        grads = self._grads.backward_pass(micro_batch, completes)
        gather = self._gather
        gathered = gather.backward_pass(grads, loss) if isinstance(gather, UnitGather) else gather.backward_pass(grads)
        with added_losses_times(self.progress.factor()), gathered:
            yield

    def collect(self, names: Iterable[str]) -> None:
        """Collect the gradients that a pass has put into `param.grad` of these parameters without firing hooks."""
        self._grads.collect(names)

    def set_lr(self, lr: float | Sequence[float]) -> None:
        """Replace the learning rate from the next `step()` on. The host does not wait.

        `lr`: a number, or a table with one entry per update as in the optimizer's constructor; update n reads entry n.
        Groups keep their factors.
        The first rank's learning rate holds for all ranks; other ranks need not call this. No state dict holds the
        learning rate: set it again after loading a state.
        """
        self.optimizer = replace(self.optimizer, lr=lr)  # refuses invalid values
        self._lr_table = put_table(self.optimizer.lr_table(), self.device)

    def set_grad_accum_steps(self, grad_accum_steps: int) -> None:
        """Replace the number of `backward` calls of a step, from the next step on. Every rank must call it.

        Raises: RuntimeError within a step; ValueError on every rank if ranks give different numbers, or if the owners
        would add up micro-batches (`accumulate="owner"`) and the engine was built without the memory for it.
        """
        self.progress.require_empty("set_grad_accum_steps()", "right after step()")
        refusals.check_grad_accum_steps(grad_accum_steps)
        refusals.require_equal(self.world, self.device, grad_accum_steps)
        if self.plan.sharding.owner_adds(grad_accum_steps) and not self._grads.takes_each:
            raise ValueError(
                f'grad_accum_steps {grad_accum_steps} with accumulate="owner" needs sums that an engine of one '
                "micro-batch does not hold; build it with the largest number, then set a smaller one"
            )
        self.grad_accum_steps = self.progress.grad_accum_steps = grad_accum_steps

    def wait(self) -> None:
        """Return once no transfer of parameters is under way. Then parameters may be read, unless `shard="parameters"`
        has freed them.

        Without `Sharding.units` no transfer is under way after `step()`. With units, forwards and `state_dict()` wait
        by themselves.
        """
        self._gather.wait_all()

    def discard_step(self) -> None:
        """Forget the micro-batches since the last `step()`, the changes that their forwards made to buffers, and
        `examine_next_step()`. Call it for instance when a forward has failed. A failed `backward` forgets the step by
        itself. Every rank must call it.
        """
        self._forget_step()
        self._gather.release()

    def _forget_step(self) -> None:
        self._grads.discard()
        self._end_examination()
        self.progress.reset()
        self._tallies.reset()
        self._moving_buffers.put_back(torch.ones_like(self.stop_request, dtype=torch.bool))

    def examine_next_step(self) -> None:
        """Examine the next step closely, for `StepResult.examination`. All other results stay the same, bit for bit."""
        self.progress.require_empty("examine_next_step()", "before the first")
        self._end_examination()
        self._examiner = Examiner(self.plan.param_names, self.grad_accum_steps, self.device)
        self._observers.append(self._examiner)
        self.progress.examined = True

    def _end_examination(self) -> None:
        self.progress.examined = False
        if self._examiner is not None:
            self._observers.remove(self._examiner)
            self._examiner = None

    def step(self) -> StepResult:
        """Agree on overflow and norm, update, and send the new parameters; the host never waits for the device.

        If any gradient on any rank is not finite, nothing changes anywhere except the loss scale and `skipped_steps`.
        """
        with self.progress.alone("step()"):
            by_piece, peaks, stats = self._sum_and_agree("step()")
            # The scale that this step's backward used. `update_` below may change the scale for the next step.
            scale_used = self.progress.scale_used
            examination = None if self._examiner is None else self._examiner.examination
            with ExitStack() as ends:  # also of an update that fails: the next step would use its sums as its own
                ends.callback(self._grads.reset)
                ends.callback(self._end_examination)
                with self.clock.span("update"):
                    number = self.applied_updates + 1
                    scalars, grad_norm = decide(stats, scale_used, self.clip_grad, number)
                    scalars = scalars._replace(frozen=self._scalars.frozen(number))
                    tallied = self._tallies.take()
                for bucket in self._update.in_turn(self._gather.order, scalars):
                    self._gather.updated(bucket)
                    if self.average_decay is not None:
                        with self.clock.span("update"):
                            bucket.move_average((~stats.found_inf).float() * entry(self._average_shares, number))
            self.applied_updates += ~stats.found_inf
            self.skipped_steps += stats.found_inf
            self.loss_scale.update_(stats.found_inf, stats.max_abs, scale_used)
            self._guard.note_written()
            self._tallies.move(tallied, stats.found_inf)
            self._moving_buffers.put_back(stats.found_inf)
            return StepResult(
                loss=(stats.loss_sum / stats.weight_sum).float(),
                found_inf=stats.found_inf,
                grad_norm=grad_norm.float(),
                max_abs=stats.max_abs.float(),
                loss_scale=scale_used.clone(),
                lr=scalars.lr,
                stop_requested=stats.stop_requested,
                by_piece=by_piece,
                peak_rows=peaks,
                recorded=stats.recorded,
                tallied=tallied,
                examination=examination,
            )

    def probe_loss_scale(self) -> None:
        """Show the gradients so far to the loss scale, then drop them; call it in place of the first `step()`.

        Nothing else changes, so the first step may take the same batch. Every rank must call it.
        """
        *_, stats = self._sum_and_agree("probe_loss_scale()")
        self._grads.reset()
        self._tallies.reset()
        self.loss_scale.update_(stats.found_inf, stats.max_abs, self.progress.scale_used)
        self._moving_buffers.put_back(torch.ones_like(stats.found_inf))

    def _sum_and_agree(self, call: str) -> tuple[Tensor, Tensor, GradStats]:
        """Finish the step's sums; return their statistics by piece, FP64 (2, pieces), their `peak_rows`, and the
        statistics of the whole model.
        """
        self.progress.require_complete(call)
        self._guard.check()
        self._unseen_writes.refuse_told()
        self._release_for_write(call)  # waits for gathers that no forward has awaited, e.g. of a skipped unit
        self._unseen_writes.look_if_due(self._kept_buckets)
        self._grads.wait_all()
        with self.clock.span("update"):
            if self._gradient_hook is not None:
                self._change_gradients(self._gradient_hook)
            rows = [bucket.row_stats(self._row_stats) for bucket in self.buckets]
            number = self.applied_updates + 1
            frozen = self._scalars.frozen(number)
            by_piece = stats_by_piece(self.buckets, rows, self.topology.saves_shard, frozen)
            lr = entry(self._lr_table, number)
            found = self._unseen_writes.found
            with self.clock.span("exposed_agreement"):
                stats = agree(by_piece, self.progress, self.stop_request, lr, found, self.world)
            self._unseen_writes.tell(stats.unseen_writes, stats.loss_sum, stats.found_inf)
        self.progress.reset()
        return by_piece, peak_rows(self.buckets, rows), stats

    @property
    def _kept_buckets(self) -> list[Bucket]:
        """Return the buckets whose half parameters have memory between steps."""
        return [bucket for bucket in self.buckets if not bucket.storage.frees_params]

    @contextmanager
    def whole_parameters(self) -> Iterator[None]:
        """Allow any read of the module's parameters inside the block. Every rank must enter and leave it.

        With `Sharding(shard="parameters")` parameters otherwise have memory only while their unit computes. A forward
        inside the block gathers nothing, so a single rank may run it. Writes inside the block are refused by the
        `step()` two steps later, or earlier if weights are handed out or saved.
        """
        self._require_between_steps("whole_parameters()", reads=True)
        with self._gather.whole():
            self._unseen_writes.asked |= not self._kept_buckets
            try:
                yield
            finally:
                if not self._kept_buckets:  # writes inside the block are lost with the memory, so compare now
                    self._unseen_writes.look(self.buckets)

    def begin_average(self, decay: float | Sequence[float] | None = None) -> None:
        """Let an average of the masters, kept from now on, start from their present values. Every rank must call it.

        `decay`: the share of it that stays at each update, or one for each update; None: as it is.
        """
        if decay is not None:
            self.average_decay = decay
            self._average_shares = put_table([1 - share for share in table_of(decay)], self.device)
        for bucket in self.buckets:
            bucket.begin_average()

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Show the average of the masters in their place inside the block: see `WeightAverage.weights`."""
        self._require_between_steps("WeightAverage.weights()", writes=True)
        self.refuse_unseen_writes()
        try:
            self._show(average=True)
            yield
            self._guard.check()  # writes inside the block are lost with it
            self._unseen_writes.look(self._kept_buckets)
            self._unseen_writes.asked = True
        finally:
            self._show(average=False)

    def _show(self, *, average: bool) -> None:
        """Make the half parameters the casts of the average, or of the masters; return when all have arrived."""
        self._gather.release_for_write()
        self.progress.shows_average = average
        for bucket in self.buckets:
            bucket.shows_average = average
        self._publish()
        self._gather.wait_all()

    def full_weights(self) -> dict[str, Tensor]:
        """Return the module's state dict on the host, with trained weights in FP32. Every rank must call it."""
        self._require_between_steps("full_weights()", reads=True)
        self.refuse_unseen_writes()
        return full_weights(self.module, self.buckets, self.plan.entries, self._links)

    def load_weights(self, state_dict: Mapping[str, Tensor]) -> None:
        """Set masters and half parameters, and copy frozen parameters and buffers; optimizer states stay, and an
        average of the weights starts anew.

        Give full FP32 weights under the module's own names, the same on every rank.
        Raises: ValueError, before anything is changed, naming the first missing, unknown and misshapen entries, or a
        parameter with NaN, inf or a value that its dtype cannot hold.
        """
        self._require_between_steps("load_weights()", writes=True)
        load_weights(state_dict, self.module, self.buckets, self.plan.entries)
        if self.average_decay is not None:
            self.begin_average()
        self._unseen_writes.forget()
        self._guard.note_written()

    def state_dict(self) -> dict[str, Any]:
        """Return copies of this rank's part of the run's state: masters, optimizer states, counters, loss scale."""
        self._require_between_steps("state_dict()")
        self.refuse_unseen_writes(on_every_rank=False)
        return {
            "layout": self.plan.fingerprint,
            "rank": self.topology.world.rank,
            "master": [bucket.master.clone() for bucket in self.buckets],
            "states": [state.clone() for state in self._states()],
            "average": [average.clone() for average in self._averages()],
            "applied_updates": self.applied_updates.clone(),
            "skipped_steps": self.skipped_steps.clone(),
            "loss_scale": self.loss_scale.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict` of the same rank and the same layout. Every rank must call it.

        Masters, states, counters and the loss scale are replaced; lr and all other settings stay this engine's own. An
        average that the state lacks starts from its masters; one that this engine does not keep is dropped.
        Raises: ValueError, before anything is changed, if the layout (with the optimizer's groups), the names of the
        optimizer's states, the loss scale's rule or the rank differ.
        """
        self._require_between_steps("load_state_dict()", writes=True)
        refusals.require_own_state(state, self.plan.fingerprint, self.topology.world.rank)
        masters = [bucket.master for bucket in self.buckets]
        averages = self._averages() if state.get("average") else []
        torch._foreach_copy_(  # checks all first
            [*masters, *self._states(), *averages],
            [*state["master"], *state["states"], *state.get("average", [])[: len(averages)]],
        )
        if self.average_decay is not None and not averages:
            self.begin_average()
        self.publish_masters()
        self.applied_updates.copy_(state["applied_updates"])
        self.skipped_steps.copy_(state["skipped_steps"])
        self.loss_scale.load_state_dict(state["loss_scale"])

    def _states(self) -> list[Tensor]:
        of_elements = [state for bucket in self.buckets for states in bucket.states for state in states.values()]
        return [*of_elements, *(state for held in self.held_states() for state in held.tensors.values())]

    def _averages(self) -> list[Tensor]:
        return [bucket.average for bucket in self.buckets if bucket.average is not None]

    def owned_ranges(self) -> list[OwnedRange]:
        """Return views of this rank's masters, their average if one is kept, and states. A caller that writes to them
        calls `publish_masters` then.
        """
        self._require_between_steps("owned_ranges()")
        return [owned for bucket in self.buckets for owned in bucket.owned_ranges()]

    def held_states(self) -> list[OwnedRange]:
        """Return views of the states of `Optimizer.matrix_states` that this rank holds. In each `spec`, the shapes are
        those of the state.
        """
        return [*self._update.held_states()]

    def publish_masters(self) -> None:
        """Cast all masters, which the caller has written, to half parameters on every rank. Every rank must call it."""
        self._require_between_steps("publish_masters()", writes=True)
        self._publish()
        self._unseen_writes.forget()

    def _publish(self) -> None:
        for bucket in self._gather.order:
            if not bucket.storage.frees_params:  # otherwise the next gather casts
                bucket.cast_shown()
                self._gather.updated(bucket)
        self._guard.note_written()

    def refuse_unseen_writes(self, on_every_rank: bool = True) -> None:
        """Compare this rank's half parameters with the casts of its masters; the host waits for the device.

        Only half parameters that have memory between steps are compared.
        Raises: RuntimeError naming the first parameter that differs. With `on_every_rank` all ranks must call it, and
        all raise. Without, this rank calls and raises alone.
        """
        self._unseen_writes.look(self._kept_buckets)
        self._unseen_writes.refuse(self.world if on_every_rank else None)

    def check_module(self) -> None:
        """Raise RuntimeError if the module's parameters are no longer as the engine has left them."""
        self._guard.check()

    def _require_between_steps(self, call: str, writes: bool = False, reads: bool = False) -> None:
        self.progress.require_empty(call, "right after step()", reads=reads)
        self._guard.check()
        if writes:
            self._release_for_write(call)
        else:
            self._gather.wait_all()

    def _release_for_write(self, call: str) -> None:
        """Wait for gathers and end reads of half parameters, since `call` is about to write the masters."""
        if self._gather.is_whole:
            raise RuntimeError(f"{call} inside engine.whole_parameters(): end the block first")
        self._gather.release_for_write()
