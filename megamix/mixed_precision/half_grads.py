"""Backward's product: one flat gradient buffer per bucket, filled by hooks as each parameter's gradient becomes
ready.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from megamix.mixed_precision.flat_buffers import FlatBuffers
from megamix.mixed_precision.flat_layout import FlatLayout

log = logging.getLogger("megamix")


@dataclass(slots=True, eq=False)
class _ParamGrad:
    """One parameter's place in its bucket's buffer, and what has come there in this step."""

    name: str
    bucket: int
    view: Tensor  # gradient dtype, of the parameter's shape
    gap: Tensor  # the padding behind it
    counts: bool  # or is it another rank's that does
    touched: bool = False
    last_pass: int = 0  # in which it came last
    ready: bool = False  # whole: nothing more is to come in this step


class HalfGrads:
    """Sums each parameter's gradient over the micro-batches of a step, times the loss scale, in half or in FP32.

    `flat[k]`: gradient dtype (padded_numel,) of bucket k, one of `buffers`, with memory from its first gradient
    on; its padding is zero when backward ends. Between steps it may hold anything, since sums over the ranks may be
    written into it. A parameter's hook copies the first micro-batch's gradient into its view and adds the later ones
    (copying costs 4 bytes per parameter where zeroing and adding costs 8), then drops `param.grad`: an FP32 `.grad` on
    a half parameter would make torch.compile refuse the block.
    """

    def __init__(
        self, layout: FlatLayout, params: dict[str, nn.Parameter], dtype: torch.dtype, device: torch.device,
        buffers: FlatBuffers,
    ):  # fmt: skip
        self.buffers, self.flat = buffers, buffers.flat
        self._params, self._grads = params, dict[str, _ParamGrad]()  # in the order of the buckets
        self.names = self._grads.keys()
        self._sizes = [len(bucket.slots) for bucket in layout.buckets]
        for index, bucket in enumerate(layout.buckets):
            flat = buffers.add(bucket.padded_numel, dtype, device)
            for slot, padded_end in zip(bucket.slots, bucket.padded_ends(), strict=True):
                name, view = slot.spec.name, flat[slot.start : slot.end].view(slot.spec.shape)
                self._grads[name] = _ParamGrad(name, index, view, flat[slot.end : padded_end], slot.spec.counts)
                hook = partial(HalfGrads._on_grad, weakref.ref(self), name)
                params[name].register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]  # no types
            buffers.free(index)  # before the next one comes
        self.expect_step()
        self._warned: set[str] = set()
        self.inside_backward, self.passes = False, 0
        self._completes: Collection[str] = ()
        self._on_full: Callable[[int], None] = lambda bucket: None
        self._look: Callable[[str, Tensor], None] | None = None

    def expect_step(self) -> None:
        """Forget what has arrived so far: the next gradient is a step's first."""
        for grad in self._grads.values():
            grad.touched = grad.ready = False
        self._missing = [*self._sizes]  # per bucket: how many are not ready yet

    def discard(self) -> None:
        """Forget a step, and the gradients that a backward which failed has left."""
        for param in self._params.values():
            param.grad = None
        self.expect_step()

    @contextmanager
    def backward_pass(
        self, on_full: Callable[[int], None], completes: Collection[str],
        look: Callable[[str, Tensor], None] | None = None,
    ) -> Iterator[None]:  # fmt: skip
        """Take the gradients of one backward pass. Those of the parameters in `completes` are whole with it; when all
        of a bucket are, `on_full(bucket)` is called.

        In an examined step `look(parameter, gradient)` sees each gradient before it is added to any other.
        """
        self.inside_backward, self._on_full, self._completes, self._look = True, on_full, completes, look
        self.passes += 1
        try:
            yield
        finally:
            self.inside_backward, self._completes, self._look = False, (), None

    def came(self, name: str) -> bool:
        """Return whether a parameter's gradient has come in this backward pass."""
        return self._grads[name].last_pass == self.passes

    def take(self, names: Iterable[str]) -> None:
        """Do what the hooks do, for a pass that puts gradients into `param.grad` without firing them."""
        for name in names:
            if self._params[name].grad is not None:
                self._on_grad(weakref.ref(self), name, self._params[name])

    def fill_missing(self) -> None:
        """Let a parameter that got no gradient count as zeros, now that backward is over; the log names it once."""
        silent = [grad for grad in self._grads.values() if not grad.touched]
        for grad in silent:
            self.buffers.take(grad.bucket)
            grad.view.zero_()
            grad.gap.zero_()
        self.expect_step()
        new = [grad.name for grad in silent if grad.name not in self._warned]
        if new:
            self._warned.update(new)
            log.warning("no gradient reached %s: counted as zeros (said once per parameter)", ", ".join(new))

    @staticmethod
    def _on_grad(half_grads: weakref.ref[HalfGrads], name: str, param: Tensor) -> None:
        """The ready hook. It must not hold what holds the parameter: torch never frees such a cycle (2.13), nor with it
        the buffers and process groups of an engine that was dropped.
        """
        self = half_grads()
        if self is None:
            return
        place, grad, param.grad = self._grads[name], param.grad, None
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
        if place.ready and self._missing[place.bucket] == 0:
            raise RuntimeError(
                f"parameter {name} got a second gradient in one backward when its bucket was complete: a reentrant "
                "checkpoint recomputed its module. Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        if self._look is not None:
            self._look(name, grad)
        if not place.counts:
            grad = torch.where(grad.isfinite(), 0.0, grad)  # an overflow counts wherever it is
        if place.touched:
            place.view.add_(grad)
        else:
            self.buffers.take(place.bucket)
            place.view.copy_(grad)
            if place.gap.numel():  # the last step's sum may lie there
                place.gap.zero_()
            place.touched = True
        place.last_pass = self.passes
        if name in self._completes and not place.ready:
            place.ready = True
            self._missing[place.bucket] -= 1
            if self._missing[place.bucket] == 0:
                self._on_full(place.bucket)


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
            if isinstance(hook, partial) and hook.func is HalfGrads._on_grad:
                raise ValueError(f"parameter {name} belongs to another engine, or did; give a new engine a new model")
