"""The conductor: calls the stages of a mixed-precision step in the order in which the data flows."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from megamix.clock import Clock
from megamix.comm.collectives import make_collectives
from megamix.comm.topology import Topology
from megamix.mixed_precision.examination import Examination
from megamix.mixed_precision.fingerprint import fingerprint, require_equal
from megamix.mixed_precision.flat_layout import Run, build_layout
from megamix.mixed_precision.fused_update import CompiledUpdate, StepScalars, Update, choose_update
from megamix.mixed_precision.grad_reduce import GradReduce, connect_owners, make_grad_shards
from megamix.mixed_precision.grad_stats import GradStats, PieceStats, agree, clip_coefficient
from megamix.mixed_precision.half_grads import Accumulation, HalfGrads, refuse_second_engine
from megamix.mixed_precision.half_params import HalfParams, cast_frozen, describe_params, single_device
from megamix.mixed_precision.loss_scale import StaticLossScale
from megamix.mixed_precision.master_shard import MasterShard, OwnedRange
from megamix.mixed_precision.optimizers import Optimizer, lr_of
from megamix.mixed_precision.param_gather import ParamGather
from megamix.mixed_precision.settings import Precision, Sharding, StepResult, check_loss, check_settings
from megamix.mixed_precision.weights import full_weights, load_weights

log = logging.getLogger("megamix")


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
        precision, sharding = precision or Precision(), sharding or Sharding()
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
            for pattern in optimizer.idle_groups(self.param_names):
                log.warning("the optimizer's group %r matches no parameter of the model", pattern)
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
        for bucket, own in enumerate(self.owners):
            full = self.half_params.full_precision(bucket)
            own.broadcast(full)
            self.master_shard.take(bucket, full)
            self.half_params.install(full)
            del full  # before the next one comes
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
        self._lr_table = torch.tensor(optimizer.lr_table(), dtype=torch.float32, device=device)
        # Fill it with a positive number on any rank: from the next step() on that is every rank's `stop_requested`.
        self.stop_request = torch.zeros((), dtype=torch.float64, device=device)

    @property
    def update_path(self) -> str:
        """How this machine runs the update: "compiled", or "library" for torch's own kernels."""
        return "compiled" if isinstance(self._update, CompiledUpdate) else "library"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def backward(self, loss: Tensor, weight: float = 1.0) -> None:
        """Back-propagate `loss` (one element, the mean over this rank's micro-batch), times the loss scale.

        Where only some of its targets count, give the sum over those, divided by the number of all, and the share that
        counts as `weight`: a step's gradient and loss are the sums of what was given over the sum of the weights, the
        exact mean over all targets of all ranks. Where none counts anywhere they are zero.
        In the last micro-batch of a step each bucket's reduction starts as soon as its gradients are complete.
        """
        check_loss(loss, weight)
        last = self.accumulation.done == self.grad_accum_steps - 1
        completes = self._own_names if last else ()
        with self.accumulate(), self.accumulation.backward_pass(self.accumulation.done, completes):
            self.accumulation.scaled(loss, weight, counts=self.topology.tells_loss).backward()  # type: ignore[no-untyped-call]

    def accumulate(self, micro_batches: int = 1) -> AbstractContextManager[None]:
        """Within it, losses and gradients of the step's next micro-batches may come to `accumulation`: for a pipeline's
        schedule, which runs all of a step at once. `backward` does all of this for one.
        """
        self.half_params.check()
        return self.accumulation.expect(micro_batches)

    def discard_step(self) -> None:
        """Forget the micro-batches since the last `step()`, and `examine_next_step()`, for instance when a forward
        between them has failed; a `backward` that fails does it by itself. Every rank must call it.
        """
        self.accumulation.discard()

    def examine_next_step(self) -> None:
        """Look closely at the next step: `StepResult.examination`. What it computes stays the same, bit for bit."""
        if done := self.accumulation.done:
            raise RuntimeError(f"examine_next_step() after {done} backward() calls of a step; call it before the first")
        self.accumulation.examination = Examination(
            self.layout, self._shards, self.param_names, self.grad_accum_steps, self.accumulation.scale_used.device
        )

    def step(self) -> StepResult:
        """Agree, update and send out; the host never waits for the device.

        If any gradient on any rank is not finite, nothing changes anywhere but the loss scale and `skipped_steps`.
        """
        grad_shards, by_piece, stats = self._sum_and_agree("step()")
        with self.clock.span("update"):
            if self.accumulation.examination is not None:
                self.accumulation.examination.count(grad_shards)
            # The scale that backward used, not the one that follows from it: on a growing step they differ by the
            # growth factor.
            divisor = self.accumulation.scale_used.double() * stats.weight_sum
            grad_norm = stats.sum_of_squares.sqrt() / divisor
            multiplier = (clip_coefficient(grad_norm, self.clip_grad) / divisor).float()
            update = self.applied_updates + 1
            lr, coefficients = lr_of(self._lr_table, update), self.optimizer.coefficients(update.double())
            scalars = StepScalars(multiplier, stats.found_inf, lr, update.float(), coefficients)
        for bucket in self.param_gather.order_of_need:
            with self.clock.span("update"):
                self._update_bucket(bucket, grad_shards[bucket], scalars)
            self.param_gather.launch(bucket)
        examination, self.accumulation.examination = self.accumulation.examination, None
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
        if (done := self.accumulation.done) != self.grad_accum_steps:
            raise RuntimeError(f"{call} needs {self.grad_accum_steps} backward() calls (grad_accum_steps), got {done}")
        self.half_params.check()
        self.param_gather.wait_all()  # what no forward has awaited, e.g. of a unit it skipped, is about to be written
        grad_shards = [self.grad_reduce.wait(bucket) for bucket in range(len(self.layout.buckets))]
        with self.clock.span("update"):
            by_piece = self.piece_stats([self.grad_reduce.rows(bucket) for bucket in range(len(grad_shards))])
            stats = agree(
                by_piece, self.accumulation.loss_sum, self.accumulation.weight_sum, self.stop_request, self.collectives
            )
        self.grad_reduce.reset()
        self.accumulation.done = 0
        return grad_shards, by_piece, stats

    def _update_bucket(self, bucket: int, grad_shard: Tensor, scalars: StepScalars) -> None:
        master, states = self.master_shard.master[bucket], self.master_shard.states[bucket]
        half_shard = self.param_gather.half_shards[bucket]
        cuts: Iterable[tuple[Run, Update]] = ((run, self._update) for run in self.master_shard.runs[bucket])
        if self.accumulation.examination is not None:
            cuts = self.accumulation.examination.watched(self._update, bucket)
        for run, update in cuts:
            part = slice(run.start, run.end)
            run_states = tuple(state[part] for state in states)
            update(grad_shard[part], master[part], run_states, half_shard[part], run.group, scalars)

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
        rank = self.topology.world.rank
        if (state["layout"], state["rank"]) != (self._fingerprint, rank):
            raise ValueError(
                f"this state is rank {state['rank']}'s of layout {state['layout'][:12]}, here is rank {rank} of "
                f"{self._fingerprint[:12]}; build the engine as it was: model, ranks, bucket_size, dtype, optimizer "
                "and its groups, kind of loss scale"
            )
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
        if self.accumulation.done:
            raise RuntimeError(
                f"{call} after {self.accumulation.done} backward() calls of a step; call it right after step()"
            )
        self.half_params.check()
        self.param_gather.wait_all()
