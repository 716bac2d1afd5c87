"""The conductor: calls the stages of a mixed-precision step in the order in which the data flows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megamix.clock import Clock
from megamix.comm.collectives import make_collectives
from megamix.comm.topology import Topology
from megamix.mixed_precision.examination import Examination
from megamix.mixed_precision.fingerprint import fingerprint, require_equal, require_own_state
from megamix.mixed_precision.flat_layout import build_layout
from megamix.mixed_precision.fused_update import CompiledUpdate, StepScalars, choose_update
from megamix.mixed_precision.grad_reduce import GradReduce, connect_owners, make_grad_shards
from megamix.mixed_precision.grad_stats import GradStats, PieceStats, agree, clip_coefficient
from megamix.mixed_precision.guards import attribute_error, check_kinds, explain_dtypes
from megamix.mixed_precision.half_grads import Accumulation, HalfGrads, refuse_second_engine
from megamix.mixed_precision.half_params import HalfParams, cast_frozen, describe_params, single_device
from megamix.mixed_precision.loss_scale import StaticLossScale
from megamix.mixed_precision.master_shard import MasterShard, OwnedRange
from megamix.mixed_precision.optimizers import Optimizer, lr_of, put_lr_table
from megamix.mixed_precision.param_gather import ParamGather
from megamix.mixed_precision.settings import Precision, Sharding, StepResult, check_loss, check_settings
from megamix.mixed_precision.weights import full_weights, load_weights, take_over


class ShardedEngine:
    """Trains any module in half precision with the FP32 truth sharded over the data-parallel ranks.

        engine = ShardedEngine(model, AdamW(lr=3e-4), Precision(torch.bfloat16))
        for tokens, targets in batches:
            engine.backward(loss_of(model(tokens), targets))
            engine.step()

    The module keeps its Parameters; their data become views into flat half buffers, starting from the first rank's
    values. Gradients are averaged over ranks and over `grad_accum_steps` calls of `backward` per `step`, by weight.
    `clip_grad`: largest global norm; 0 is off.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        precision: Precision | None = None,
        sharding: Sharding | None = None,
        clip_grad: float = 0.0,
        grad_accum_steps: int = 1,
        compile_update: bool = True,
    ):
        precision = Precision() if precision is None else precision
        sharding = Sharding() if sharding is None else sharding
        check_kinds(model, optimizer, precision, sharding)
        check_settings(precision, clip_grad, grad_accum_steps)
        refuse_second_engine(model)
        self.module, self.optimizer = model, optimizer
        self.clip_grad, self.grad_accum_steps = clip_grad, grad_accum_steps
        device = single_device(model)
        grad_dtype = precision.own_grad_dtype

        topology = self.topology = sharding.topology or Topology.current()
        specs, groups, axes, self.params = describe_params(model, optimizer, topology, sharding.placements)
        self.param_names = [spec.name for spec in self.params]  # of the whole model, in registration order
        if topology.world.rank == 0:
            optimizer.warn_of_idle_groups(self.param_names)
        self._own_names = frozenset(spec.name for spec in specs)
        self.layout = build_layout(specs, [axis.size for axis in axes], sharding.bucket_size)
        self.collectives = make_collectives(topology.world, 0, grad_dtype, device)  # among all ranks of the model
        self._tp, self._pp = (make_collectives(axis, 0, grad_dtype, device) for axis in (topology.tp, topology.pp))
        by_axis = connect_owners(self.layout, axes, precision, device)
        self.owners = [by_axis[bucket.owners] for bucket in self.layout.buckets]
        self.clock = Clock(device)
        self.loss_scale = precision.loss_scale or StaticLossScale()
        self._fingerprint = fingerprint(self.layout, optimizer.state_names, precision.dtype, self.loss_scale.rule)
        settings = (clip_grad, grad_accum_steps, precision.dtype, grad_dtype, precision.reduce_dtype, compile_update)
        require_equal(self.collectives, device, optimizer, self.loss_scale.settings(), settings)
        for number, own in enumerate(by_axis):
            require_equal(own, device, [bucket for bucket in self.layout.buckets if bucket.owners == number])

        self.half_params = HalfParams(model, self.layout, precision.dtype, device)
        self.master_shard = MasterShard(self.layout, self.owners, len(optimizer.state_names), device)
        take_over(self.half_params, self.master_shard, self.owners)
        trained = [self.half_params.params[spec.name] for spec in specs]
        for tensor in cast_frozen(model, trained, precision.dtype):
            by_axis[0].broadcast(tensor)

        self.loss_scale.to(device)
        self.half_grads = HalfGrads(self.layout, self.half_params.params, grad_dtype, device)
        self.param_gather = ParamGather(
            model, sharding.units, self.layout, self.half_params.flat, self.owners, sharding.overlap, self.clock
        )
        for own in by_axis:
            order = [self.layout.buckets[k] for k in self.param_gather.order_of_need if self.owners[k] is own]
            require_equal(own, device, order)
        grad_shards = make_grad_shards(self.half_grads.flat, self.owners, precision)
        self._update, row_stats = choose_update(
            optimizer, groups, self.half_params.flat[0], [shard.dtype for shard in grad_shards], self.collectives,
            compile_update,
        )  # fmt: skip
        self.grad_reduce = GradReduce(
            self.half_grads.flat, grad_shards, row_stats, self.owners, sharding.overlap, self.clock
        )
        self.accumulation = Accumulation(self.half_grads, self.grad_reduce, self.loss_scale, grad_accum_steps)
        self._shards = [own.axis.rank for own in self.owners]  # of each bucket, which one this rank owns
        self.piece_stats = PieceStats(self.layout, self._shards, device)

        self.applied_updates = torch.zeros((), dtype=torch.int64, device=device)
        self.skipped_steps = torch.zeros((), dtype=torch.int64, device=device)
        self._lr_table = put_lr_table(optimizer.lr_table(), device)
        # Fill it with a positive number on any rank: from the next step() on that is every rank's `stop_requested`.
        self.stop_request = torch.zeros((), dtype=torch.float64, device=device)

    @property
    def update_path(self) -> str:
        """How this machine runs the update: "compiled", or "library" for torch's own kernels."""
        return "compiled" if isinstance(self._update, CompiledUpdate) else "library"

    def __getattr__(self, name: str) -> Any:
        raise attribute_error(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.module(*args, **kwargs)
        except RuntimeError as error:
            explain_dtypes(error, args, kwargs, self.half_params.dtype)
            raise

    def backward(self, loss: Tensor, weight: float = 1.0, last: bool = False) -> None:
        """Back-propagate `loss` (one element, the mean over this rank's micro-batch), times the loss scale.

        Where only some of its targets count, give the sum over those, divided by the number of all, and the share that
        counts as `weight`: a step's gradient and loss are the sums of what was given over the sum of the weights, the
        exact mean over all targets of all ranks. Where none counts anywhere they are zero.
        In the last micro-batch of a step each bucket's reduction starts as soon as its gradients are complete. `last`:
        this one is, though fewer than `grad_accum_steps` were given; ranks may end a step after different numbers.
        """
        check_loss(loss, weight)
        last = last or self.accumulation.done == self.grad_accum_steps - 1
        completes = self._own_names if last else ()
        with self.accumulate(last=last), self.accumulation.backward_pass(self.accumulation.done, completes):
            self.accumulation.scaled(loss, weight, counts=self.topology.tells_loss).backward()  # type: ignore[no-untyped-call]

    def accumulate(self, micro_batches: int = 1, last: bool = False) -> AbstractContextManager[None]:
        """Within it, losses and gradients of the step's next micro-batches may come to `accumulation`: for a pipeline's
        schedule, which runs all of a step at once. `backward` does all of this for one.
        """
        self.half_params.check()
        return self.accumulation.expect(micro_batches, last)

    def set_lr(self, lr: float | Sequence[float]) -> None:
        """Replace the learning rate, from the next `step()` on: a number, or one per update as in the constructor, of
        which the entry of the next update comes next. Groups keep their factors. The host does not wait.

        The first rank's holds for all, and travels with the step's agreement; other ranks need not call it. No state
        keeps it: whoever loads a state sets it again.
        """
        self.optimizer = replace(self.optimizer, lr=lr)  # refuses what cannot be
        self._lr_table = put_lr_table(self.optimizer.lr_table(), self._lr_table.device)

    def wait(self) -> None:
        """Return once the module's parameters may be read in any way. Without `Sharding.units` they always may, after
        `step()`; with them a forward and `state_dict()` await them. On NCCL the current stream waits, not the host.
        """
        self.param_gather.wait_all()

    def discard_step(self) -> None:
        """Forget the micro-batches since the last `step()`, and `examine_next_step()`, for instance when a forward
        between them has failed; a `backward` that fails does it by itself. Every rank must call it.
        """
        self.accumulation.discard()

    def examine_next_step(self) -> None:
        """Look closely at the next step: `StepResult.examination`. What it computes stays the same, bit for bit."""
        self.accumulation.require_empty("examine_next_step()", "before the first")
        self.accumulation.examination = Examination(
            self.layout, self._shards, self.param_names, self.grad_accum_steps, self.accumulation.scale_used.device
        )

    def step(self) -> StepResult:
        """Agree, update and send out; the host never waits for the device.

        If any gradient on any rank is not finite, nothing changes anywhere but the loss scale and `skipped_steps`.
        """
        grad_shards, by_piece, stats = self._sum_and_agree("step()")
        examination, self.accumulation.examination = self.accumulation.examination, None
        with self.clock.span("update"):
            if examination is not None:
                examination.count(grad_shards)
            # The scale that backward used, not the one that follows from it: on a growing step they differ by the
            # growth factor.
            divisor = self.accumulation.scale_used.double() * stats.weight_sum
            grad_norm = stats.sum_of_squares.sqrt() / divisor
            multiplier = (clip_coefficient(grad_norm, self.clip_grad) / divisor).float()
            update = self.applied_updates + 1
            coefficients = self.optimizer.coefficients(update.double())
            scalars = StepScalars(multiplier, stats.found_inf, stats.lr, update.float(), coefficients)
        for bucket in self.param_gather.order_of_need:
            with self.clock.span("update"):
                half_shard = self.param_gather.half_shards[bucket]
                self.master_shard.update(bucket, grad_shards[bucket], half_shard, self._update, scalars, examination)
            self.param_gather.launch(bucket)
        self.param_gather.launched()
        self.applied_updates += ~stats.found_inf
        self.skipped_steps += stats.found_inf
        self.loss_scale.update_(stats.found_inf, stats.max_abs, self.accumulation.scale_used)
        return StepResult(
            (stats.loss_sum / stats.weight_sum).float(), stats.found_inf, grad_norm.float(), stats.max_abs.float(),
            self.accumulation.scale_used.clone(), scalars.lr, stats.stop_requested, by_piece, examination,
        )  # fmt: skip

    def probe_loss_scale(self) -> None:
        """In place of the first `step()`: the loss scale takes note of these gradients, and they are forgotten.

        Nothing else changes, so the first step may take the same batch. Every rank must call it.
        """
        _, _, stats = self._sum_and_agree("probe_loss_scale()")
        self.loss_scale.update_(stats.found_inf, stats.max_abs, self.accumulation.scale_used)

    def _sum_and_agree(self, call: str) -> tuple[list[Tensor], Tensor, GradStats]:
        """End the step's sums: each bucket's shard, its statistics by piece (FP64 (2, pieces)), those of the model."""
        self.accumulation.require_complete(call)
        self.half_params.check()
        self.param_gather.wait_all()  # what no forward has awaited, e.g. of a unit it skipped, is about to be written
        grad_shards = [self.grad_reduce.wait(bucket) for bucket in range(len(self.layout.buckets))]
        with self.clock.span("update"):
            by_piece = self.piece_stats([self.grad_reduce.rows(bucket) for bucket in range(len(grad_shards))])
            lr = lr_of(self._lr_table, self.applied_updates + 1)
            loss_sum, weight_sum = self.accumulation.loss_sum, self.accumulation.weight_sum
            stats = agree(by_piece, loss_sum, weight_sum, self.stop_request, lr, self.collectives)
        self.accumulation.reset()
        return grad_shards, by_piece, stats

    def full_weights(self) -> dict[str, Tensor]:
        """The module's state dict, trained weights in FP32 from the masters, on the host. Every rank must call it."""
        self._require_between_steps("full_weights()")
        return full_weights(self.module, self.half_params, self.master_shard, self.params, self._tp, self._pp)

    def load_weights(self, state_dict: Mapping[str, Tensor]) -> None:
        """Set masters and half parameters, and copy frozen parameters and buffers; optimizer states stay.

        Give full FP32 weights under the module's own names, the same on every rank.
        Raises: ValueError naming every missing, unknown or misshapen entry; nothing is changed then.
        """
        self._require_between_steps("load_weights()")
        load_weights(state_dict, self.module, self.half_params, self.master_shard, self.params)

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the run's state (copies): masters, optimizer states, counters, loss scale."""
        self._require_between_steps("state_dict()")
        return {
            "layout": self._fingerprint,
            "rank": self.topology.world.rank,
            "master": [master.clone() for master in self.master_shard.master],
            "states": [tuple(state.clone() for state in states) for states in self.master_shard.states],
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
        self._require_between_steps("load_state_dict()")
        require_own_state(state, self._fingerprint, self.topology.world.rank)
        self.master_shard.restore(state["master"], state["states"])
        self.publish_masters()
        self.applied_updates.copy_(state["applied_updates"])
        self.skipped_steps.copy_(state["skipped_steps"])
        self.loss_scale.load_state_dict(state["loss_scale"])

    def owned_ranges(self) -> list[OwnedRange]:
        """What this rank owns of masters and states: views, to read or, before `publish_masters`, to write."""
        self._require_between_steps("owned_ranges()")
        return list(self.master_shard.owned_ranges())

    def publish_masters(self) -> None:
        """Make every half parameter the cast of its master, which was written. Every rank must call it."""
        self._require_between_steps("publish_masters()")
        self.param_gather.publish(self.master_shard.master)

    def _require_between_steps(self, call: str) -> None:
        self.accumulation.require_empty(call, "right after step()")
        self.half_params.check()
        self.param_gather.wait_all()
