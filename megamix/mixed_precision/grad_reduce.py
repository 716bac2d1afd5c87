"""The reduction of gradients: hooks move each gradient into its bucket as soon as it is ready, and each full bucket is
summed over its owners while backward still fills the next ones.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from megamix.base.clock import Clock
from megamix.comm.collectives import Collectives
from megamix.mixed_precision.bucket import Bucket
from megamix.mixed_precision.observer import StepObserver
from megamix.mixed_precision.row_stats import RowStats

log = logging.getLogger("megamix")


class GradReduce:
    """Sums each parameter's gradient over a step's micro-batches, and each bucket over its owners. The sums are not
    unscaled.

    A parameter's hook hands the gradient to the bucket, then drops `param.grad`: an FP32 `.grad` on a half parameter
    would make torch.compile refuse the block. In the pass that completes a step's gradients, a full bucket starts its
    sum, strictly in bucket order: collectives are matched by order of issue, and ranks may fill equal buckets in
    different orders (if one skips a parameter that another uses). So a bucket that is full before its predecessor waits
    for the predecessor.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        replicas: Collectives,
        row_stats: RowStats,
        overlap: bool,
        clock: Clock,
        observers: Sequence[StepObserver],
    ):
        self._buckets = buckets
        self._replicas = replicas
        self._row_stats = row_stats
        self._overlap = overlap
        self._clock = clock
        self._observers = observers
        self._queue = deque(buckets)  # buckets whose sum is not launched yet
        self._travelling: Bucket | None = None  # the bucket whose sum was launched last
        self._bucket_of = {name: bucket for bucket in buckets for name in bucket.param_grads}
        self.takes_each = buckets[0].total is not None  # True: each micro-batch is reduced by itself
        self.inside_backward = False
        self.passes = 0
        self._came = set[str]()  # parameters with a gradient in this pass
        self._micro_batch = 0
        self._completes: Collection[str] = ()
        self._warned = set[str]()
        for name, param in self._params():
            hook = partial(GradReduce._on_grad, weakref.ref(self), name)
            param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]  # untyped in torch

    @property
    def names(self) -> Collection[str]:
        return self._bucket_of.keys()

    def _params(self) -> Iterator[tuple[str, nn.Parameter]]:
        for bucket in self._buckets:
            yield from bucket.named_params.items()

    @contextmanager
    def backward_pass(self, micro_batch: int, completes: Collection[str]) -> Iterator[None]:
        """Collect the gradients of one backward pass.

        The pass completes this step's gradients of the parameters in `completes`. A bucket's sum starts once all its
        gradients are complete.
        """
        self.inside_backward = True
        self.passes += 1
        self._came.clear()
        self._micro_batch = micro_batch
        self._completes = completes
        try:
            yield
            for bucket in self._buckets:
                bucket.add_waiting()
        finally:
            self.inside_backward = False
            self._completes = ()

    def has_gradient(self, name: str) -> bool:
        """Return whether a gradient of this parameter has arrived in this backward pass."""
        return name in self._came

    def collect(self, names: Iterable[str]) -> None:
        """Collect the gradients of a pass that sets `param.grad` without firing hooks. Skip names that are not trained,
        such as empty parameters.
        """
        for name in filter(self._bucket_of.__contains__, names):
            param = self._bucket_of[name].named_params[name]
            if param.grad is not None:
                self._on_grad(weakref.ref(self), name, param)

    def end_micro_batch(self, ends: bool) -> None:
        """Start the remaining sums after backward. Parameters without a gradient count as zeros; the log names each
        once.

        `ends`: this micro-batch ends the step; otherwise the next micro-batch's gradients follow.
        """
        self._fill_missing(self._buckets)
        for bucket in self._in_turn(all_are_full=True):
            bucket.launch_sum(self._row_stats)
        for bucket in self._buckets:
            bucket.expect_grads()
        if not ends:
            self._expect_sums()

    def complete(self, buckets: Sequence[Bucket]) -> None:
        """Count missing gradients of these buckets as zeros, and let their sums start in bucket order. Do nothing
        unless this pass completes a step's gradients. The caller knows that no more gradients of these buckets will
        come.
        """
        late = [bucket for bucket in buckets if bucket.missing]
        if self._completes and late:
            self._fill_missing(late)
            for bucket in late:
                bucket.close()
            for bucket in self._in_turn():
                bucket.launch_sum(self._row_stats)

    def _fill_missing(self, buckets: Sequence[Bucket]) -> None:
        new = [name for bucket in buckets for name in bucket.fill_missing() if name not in self._warned]
        if new:
            self._warned.update(new)
            log.warning("no gradient reached %s: counted as zeros (said once per parameter)", ", ".join(new))

    def _in_turn(self, *, all_are_full: bool = False) -> Iterator[Bucket]:
        """Yield, in bucket order, the buckets whose sums are to start; the caller launches each sum. During backward
        only full buckets are yielded, after it all remaining ones.
        """
        while self._queue and (all_are_full or (self._overlap and self._queue[0].missing == 0)):
            bucket = self._queue.popleft()
            # A backend whose scratch buffers are all in use finishes an earlier bucket first. That counts as waiting,
            # too.
            with self._clock.span("exposed_reduce_scatter"):
                yield bucket
                for observer in self._observers:
                    observer.on_transfer("reduce_scatter", bucket, bucket.sum_sent)
                if self._travelling is not None and not self.takes_each:
                    self._sum_across(self._travelling)
                if not self._overlap:
                    self.wait(bucket)
                elif self._travelling is not None and bucket.storage.frees_grads:
                    self._travelling.wait_for_sum()  # only two buckets of gradients have memory at a time
            self._travelling = bucket

    def _sum_across(self, bucket: Bucket) -> None:
        """Start a bucket's sum over the replicas, unless it is started, once its sum over the owners has arrived.
        During backward that sum has had the time of one more bucket to arrive.
        """
        if self._replicas.axis.size > 1 and not bucket.is_summed_across:
            sent = bucket.launch_sum_across(self._replicas)
            for observer in self._observers:
                observer.on_transfer("sum_across", bucket, sent)

    def wait(self, bucket: Bucket) -> None:
        """Return once a bucket's `grad_sum` is the sum over its owners and this step's micro-batches so far."""
        with self._clock.span("exposed_reduce_scatter"):
            bucket.wait_for_sum()

    def wait_all(self) -> None:
        """Return once each bucket's `grad_sum` is the sum over all ranks and micro-batches, on this rank's part."""
        for bucket in self._buckets:
            with self._clock.span("exposed_reduce_scatter"):
                self._sum_across(bucket)
        for bucket in self._buckets:
            self.wait(bucket)

    def discard(self) -> None:
        """Drop the step's gradients, including those that a failed backward has left in `param.grad`."""
        for _, param in self._params():
            param.grad = None
        for bucket in self._buckets:
            bucket.expect_grads()
        self.reset()

    def reset(self) -> None:
        """Free the sums, which the step has used or a failed backward has left, and expect those of the next step.

        Sums that a failed backward has launched are finished first. Otherwise a later wait would write them over the
        gradients of the next attempt.
        """
        self._expect_sums()
        for bucket in self._buckets:
            bucket.discard_sum()
        for owners in {bucket.owners for bucket in self._buckets}:
            owners.release()

    def _expect_sums(self) -> None:
        for bucket in self._buckets:
            bucket.expect_sum()
        self._queue = deque(self._buckets)
        self._travelling = None

    @staticmethod
    def _on_grad(grad_reduce: weakref.ref[GradReduce], name: str, param: Tensor) -> None:
        """Hand a ready gradient to its bucket. This is the hook of each parameter.

        The hook holds this object weakly. torch (2.13) never frees a cycle from a parameter through its hook, so a
        strong reference would keep the buffers and process groups of a dropped engine alive.
        """
        self = grad_reduce()
        if self is None:
            return
        grad, param.grad = param.grad, None
        if grad is None:
            raise RuntimeError(
                f"a hook on parameter {name} has set its .grad to None before the engine took it: remove the hook, or "
                "register it after the engine is built"
            )
        if not self.inside_backward:
            raise RuntimeError(
                f"a gradient reached parameter {name} outside the engine: loss.backward() knows no loss scale and "
                "no reduction. Call engine.backward(loss) instead"
            )
        if grad.layout != torch.strided:
            raise RuntimeError(
                f"parameter {name} got a {grad.layout} gradient; build its module without sparse gradients"
            )
        for observer in self._observers:
            observer.on_gradient(name, self._micro_batch, grad)
        bucket = self._bucket_of[name]
        bucket.collect(name, grad, name in self._completes)
        self._came.add(name)
        if bucket.missing == 0:
            for full in self._in_turn():
                full.launch_sum(self._row_stats)


def refuse_second_engine(model: nn.Module) -> None:
    """Refuse a model that belongs or belonged to another engine, or whose trained parameters already have gradients.

    If two engines shared a model, the hook that runs first would take each gradient, and the other engine would get
    none. A gradient from before would become part of the first step's.
    Raises: ValueError naming the parameter.
    """
    for name, param in model.named_parameters():
        if param.requires_grad and param.grad is not None:
            raise ValueError(
                f"parameter {name} has a .grad already, and the first step would add it to its own; call "
                "model.zero_grad() before you build the engine"
            )
        for hook in (param._post_accumulate_grad_hooks or {}).values():
            if isinstance(hook, partial) and hook.func is GradReduce._on_grad:
                raise ValueError(f"parameter {name} belongs to another engine, or did; give a new engine a new model")
