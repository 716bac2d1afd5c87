"""Backward's product: one flat gradient buffer per bucket, filled by hooks as each parameter's gradient becomes
ready.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megamix.mixed_precision.examination import Examination
from megamix.mixed_precision.flat_layout import FlatLayout
from megamix.mixed_precision.grad_reduce import GradReduce
from megamix.mixed_precision.loss_scale import SMALLEST_USED, StaticLossScale

log = logging.getLogger("megamix")


class HalfGrads:
    """Sums each parameter's gradient over the micro-batches of a step, times the loss scale, in half or in FP32.

    `flat[k]`: gradient dtype (padded_numel,) of bucket k; its padding is zero when backward ends. Between steps it
    may hold anything, since sums over the ranks are written into it. A parameter's hook copies the first
    micro-batch's gradient into its view and adds the later ones (copying costs 4 bytes per parameter where zeroing
    and adding costs 8), then drops `param.grad`: an FP32 `.grad` on a half parameter would make torch.compile refuse
    the block.
    """

    def __init__(self, layout: FlatLayout, params: dict[str, nn.Parameter], dtype: torch.dtype, device: torch.device):
        self.flat = [torch.zeros(bucket.padded_numel, dtype=dtype, device=device) for bucket in layout.buckets]
        self._views: list[list[Tensor]] = []
        self._gaps: list[list[Tensor]] = []  # the padding behind each parameter
        self._names = [[slot.spec.name for slot in bucket.slots] for bucket in layout.buckets]
        self._params, self._places = params, dict[str, _Place]()
        for bucket_index, bucket in enumerate(layout.buckets):
            flat, views, gaps = self.flat[bucket_index], [], []
            for index, (slot, padded_end) in enumerate(zip(bucket.slots, bucket.padded_ends(), strict=True)):
                views.append(flat[slot.start : slot.end].view(slot.spec.shape))
                gaps.append(flat[slot.end : padded_end])
                place = self._places[slot.spec.name] = _Place(bucket_index, index, slot.spec.counts)
                hook = partial(_on_grad, weakref.ref(self), place)
                params[slot.spec.name].register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            self._views.append(views)
            self._gaps.append(gaps)
        self.expect_step()
        self._warned: set[str] = set()
        self._inside_backward = False
        self._completes: Collection[str] = ()
        self._on_full: Callable[[int], None] = lambda bucket: None
        self._look: Callable[[str, Tensor], None] | None = None

    def expect_step(self) -> None:
        """Forget what has arrived so far: the next gradient is a step's first."""
        self._touched = [[False] * len(views) for views in self._views]
        self._ready = [[False] * len(views) for views in self._views]  # whole: nothing more is to come in this step
        self._missing = [len(views) for views in self._views]  # per bucket: how many are not ready yet

    def open(
        self, on_full: Callable[[int], None], completes: Collection[str],
        look: Callable[[str, Tensor], None] | None = None,
    ) -> None:  # fmt: skip
        """Expect the gradients of one backward pass. Those of the parameters in `completes` are whole with it; when all
        of a bucket are, `on_full(bucket)` is called.

        In an examined step `look(parameter, gradient)` sees each gradient before it is added to any other.
        """
        self._inside_backward, self._on_full, self._look = True, on_full, look
        self._completes = completes

    def close(self) -> None:
        """The pass has returned, or failed."""
        self._inside_backward, self._look, self._completes = False, None, ()

    def take(self, names: Iterable[str]) -> None:
        """What the hooks do, for a pass that puts gradients into `param.grad` without firing them."""
        for name in names:
            if self._params[name].grad is not None:
                self._accumulate(self._places[name], self._params[name])

    def fill_missing(self) -> None:
        """Backward is over: a parameter that got no gradient counts as zeros, and is named once in the log."""
        silent = []
        for views, gaps, touched, names in zip(self._views, self._gaps, self._touched, self._names, strict=True):
            for index, view in enumerate(views):
                if not touched[index]:
                    view.zero_()
                    gaps[index].zero_()
                    silent.append(names[index])
        self.expect_step()
        new = [name for name in silent if name not in self._warned]
        if new:
            self._warned.update(new)
            log.warning("no gradient reached %s: counted as zeros (said once per parameter)", ", ".join(new))

    def _accumulate(self, place: _Place, param: Tensor) -> None:
        bucket, index, counts = place
        grad, param.grad = param.grad, None
        assert grad is not None
        name = self._names[bucket][index]
        if not self._inside_backward:
            raise RuntimeError(
                f"a gradient reached parameter {name} outside the engine: loss.backward() knows no loss scale and "
                "no reduction. Call engine.backward(loss) instead"
            )
        if grad.layout != torch.strided:
            raise RuntimeError(f"parameter {name} got a {grad.layout} gradient; build its module without sparse ones")
        if self._ready[bucket][index] and self._missing[bucket] == 0:
            raise RuntimeError(
                f"parameter {name} got a second gradient in one backward when its bucket was complete: a reentrant "
                "checkpoint recomputed its module. Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        if self._look is not None:
            self._look(name, grad)
        if not counts:
            grad = torch.where(grad.isfinite(), 0.0, grad)  # an overflow counts wherever it is
        if self._touched[bucket][index]:
            self._views[bucket][index].add_(grad)
        else:
            self._views[bucket][index].copy_(grad)
            if self._gaps[bucket][index].numel():  # the last step's sum may lie there
                self._gaps[bucket][index].zero_()
            self._touched[bucket][index] = True
        if name in self._completes and not self._ready[bucket][index]:
            self._ready[bucket][index] = True
            self._missing[bucket] -= 1
            if self._missing[bucket] == 0:
                self._on_full(bucket)


class _Place(NamedTuple):
    """Of a parameter's gradient."""

    bucket: int
    slot: int  # in the bucket
    counts: bool  # or is it another rank's that does


def _on_grad(half_grads: weakref.ref[HalfGrads], place: _Place, param: Tensor) -> None:
    """The ready hook. It must not hold what holds the parameter: torch never frees such a cycle (2.13), nor with it
    the buffers and process groups of an engine that was dropped.
    """
    if (owner := half_grads()) is not None:
        owner._accumulate(place, param)


class Accumulation:
    """A step on this rank until its last micro-batch is in: losses through `scaled`, gradients within `backward_pass`.

    `scale_used` FP32 (): the loss scale of this step's backward. `loss_sum` FP32 () and `weight_sum` FP64 (): of the
    losses so far that this rank counts, without the scale. `done`: micro-batches so far.
    """

    def __init__(self, half_grads: HalfGrads, grad_reduce: GradReduce, loss_scale: StaticLossScale, steps: int):
        self._half_grads, self._grad_reduce, self._loss_scale = half_grads, grad_reduce, loss_scale
        self._steps, self._ended = steps, False
        self.scale_used = loss_scale.loss_scale.clone()
        self.loss_sum = torch.zeros_like(self.scale_used)
        self.weight_sum = torch.zeros_like(self.scale_used, dtype=torch.float64)
        self.done = 0
        self.examination: Examination | None = None  # of this step, if it was asked for

    @property
    def complete(self) -> bool:
        """All of the step's micro-batches are in."""
        return self._ended or self.done == self._steps

    def require_complete(self, call: str) -> None:
        if not self.complete:
            raise RuntimeError(
                f"{call} needs {self._steps} backward() calls (grad_accum_steps), got {self.done}; to end a step with "
                "fewer, call backward(loss, last=True)"
            )

    def require_empty(self, call: str, when: str) -> None:
        if self.done:
            raise RuntimeError(f"{call} after {self.done} backward() calls of a step; call it {when}")

    @contextmanager
    def expect(self, micro_batches: int, last: bool = False) -> Iterator[None]:
        """The step's next micro-batches; with the last one, what is left of the sums over the ranks begins. `last`: the
        step ends with these, however few came before.
        """
        if self._ended or self.done + micro_batches > self._steps:
            given = f"{self.done} times already" + (", with last=True" if self._ended else "")
            raise RuntimeError(
                f"backward() was called {given}, {micro_batches} more is too many for "
                f"grad_accum_steps {self._steps}; call step() now, or discard_step() to begin it anew"
            )
        if self.done == 0:
            self.scale_used.copy_(self._loss_scale.loss_scale.clamp(min=SMALLEST_USED))
            self.loss_sum.zero_()
            self.weight_sum.zero_()
        try:
            yield
        except BaseException:
            self.discard()
            raise
        self.done += micro_batches
        self._ended = last
        if self.complete:
            self._half_grads.fill_missing()
            self._grad_reduce.launch_rest()

    def discard(self) -> None:
        """The step begins anew: what has arrived would be added to the next attempt's gradients."""
        self._half_grads.expect_step()
        self.examination = None
        self.reset()

    def reset(self) -> None:
        """The next micro-batch is a step's first."""
        self._grad_reduce.reset()
        self.done, self._ended = 0, False

    def scaled(self, loss: Tensor, weight: float, *, counts: bool) -> Tensor:
        """What is to be back-propagated of a micro-batch's loss. `counts`: it goes into the step's loss; of the ranks
        that compute one loss together, one counts it.
        """
        if counts:
            self.loss_sum += loss.detach().view(())
            self.weight_sum += weight
        return loss.float() * self.scale_used

    @contextmanager
    def backward_pass(self, micro_batch: int, completes: Collection[str]) -> Iterator[None]:
        """One pass through the model, or through a stage of it: the ready hooks take its gradients.

        `completes`: the parameters whose gradients of this step are whole with it; a bucket's sum over the ranks begins
        when all of it is.
        """
        look = None if self.examination is None else self.examination.look(micro_batch)
        self._half_grads.open(self._grad_reduce.bucket_full, completes, look)
        try:
            yield
        finally:
            self._half_grads.close()


def refuse_second_engine(model: nn.Module) -> None:
    """Raises: ValueError if the model is or was another engine's: of two the first to run would rob the other."""
    for name, param in model.named_parameters():
        for hook in (param._post_accumulate_grad_hooks or {}).values():
            if isinstance(hook, partial) and hook.func is _on_grad:
                raise ValueError(f"parameter {name} belongs to another engine, or did; give a new engine a new model")
