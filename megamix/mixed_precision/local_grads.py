"""Backward's product: each parameter's gradient goes into its bucket by a hook, as soon as it is ready."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from megamix.mixed_precision.bucket import Bucket
from megamix.mixed_precision.grad_reduce import GradReduce
from megamix.mixed_precision.observer import StepObserver

log = logging.getLogger("megamix")


class LocalGrads:
    """Sums each parameter's gradient over the micro-batches of a step, times the loss scale, in half or in FP32.

    A parameter's hook hands the gradient to the bucket, then drops `param.grad`: an FP32 `.grad` on a half parameter
    would make torch.compile refuse the block. Within the pass that completes a step's gradients, each bucket that is
    full starts its sum over the ranks.
    """

    def __init__(self, buckets: Sequence[Bucket], observers: Sequence[StepObserver]):
        self._buckets = buckets
        self._observers = observers
        self._bucket_of = {name: bucket for bucket in buckets for name in bucket.param_grads}
        self._warned: set[str] = set()
        self.inside_backward = False
        self.passes = 0
        self._came = set[str]()  # in this pass
        self._micro_batch = 0
        self._completes: Collection[str] = ()
        self._reduce: GradReduce | None = None  # while some gradients are whole
        for name, param in self._params():
            hook = partial(LocalGrads._on_grad, weakref.ref(self), name)
            param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]  # no types

    @property
    def names(self) -> Collection[str]:
        return self._bucket_of.keys()

    def _params(self) -> Iterator[tuple[str, nn.Parameter]]:
        for bucket in self._buckets:
            yield from bucket.named_params.items()

    @contextmanager
    def backward_pass(self, micro_batch: int, completes: Collection[str], reduce: GradReduce) -> Iterator[None]:
        """Take the gradients of one backward pass. Those of the parameters in `completes` are whole with it; when all
        of a bucket are, `reduce` launches its sum.
        """
        self.inside_backward = True
        self.passes += 1
        self._came.clear()
        self._micro_batch = micro_batch
        self._completes = completes
        self._reduce = reduce
        try:
            yield
        finally:
            self.inside_backward = False
            self._completes = ()
            self._reduce = None

    def has_gradient(self, name: str) -> bool:
        """Return whether a parameter's gradient has come in this backward pass."""
        return name in self._came

    def collect(self, names: Iterable[str]) -> None:
        """Do what the hooks do, for a pass that puts gradients into `param.grad` without firing them."""
        for name in names:
            param = self._bucket_of[name].named_params[name]
            if param.grad is not None:
                self._on_grad(weakref.ref(self), name, param)

    def end_micro_batch(self) -> None:
        """Let a parameter that got no gradient count as zeros, now that backward is over; the log names it once."""
        new = [name for bucket in self._buckets for name in bucket.fill_missing() if name not in self._warned]
        if new:
            self._warned.update(new)
            log.warning("no gradient reached %s: counted as zeros (said once per parameter)", ", ".join(new))
        self.expect_step()

    def expect_step(self) -> None:
        """Forget what has arrived so far: the next gradient is a step's first."""
        for bucket in self._buckets:
            bucket.expect_grads()

    def discard(self) -> None:
        """Forget a step, and the gradients that a backward which failed has left."""
        for _, param in self._params():
            param.grad = None
        self.expect_step()

    @staticmethod
    def _on_grad(local_grads: weakref.ref[LocalGrads], name: str, param: Tensor) -> None:
        """The ready hook. It must not hold what holds the parameter: torch never frees such a cycle (2.13), nor with it
        the buffers and process groups of an engine that was dropped.
        """
        self = local_grads()
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
            raise RuntimeError(f"parameter {name} got a {grad.layout} gradient; build its module without sparse ones")
        for observer in self._observers:
            observer.on_gradient(name, self._micro_batch, grad)
        bucket = self._bucket_of[name]
        bucket.collect(name, grad, name in self._completes)
        self._came.add(name)
        if bucket.missing == 0 and self._reduce is not None:
            self._reduce.launch()


def refuse_second_engine(model: nn.Module) -> None:
    """Raises: ValueError if the model is or was another engine's: of two the first to run would rob the other; or if a
    parameter that is to be trained has a gradient already, which the first step would add.
    """
    for name, param in model.named_parameters():
        if param.requires_grad and param.grad is not None:
            raise ValueError(
                f"parameter {name} has a .grad already, and the first step would add it to its own; call "
                "model.zero_grad() before you build the engine"
            )
        for hook in (param._post_accumulate_grad_hooks or {}).values():
            if isinstance(hook, partial) and hook.func is LocalGrads._on_grad:
                raise ValueError(f"parameter {name} belongs to another engine, or did; give a new engine a new model")
