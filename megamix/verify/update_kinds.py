"""Which kind of mistake a wrong update looks like: what each kind would have given is computed, as for gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megamix.mixed_precision.optimizers import MASTER
from megamix.verify.hypotheses import HALVES, nearest
from megamix.verify.verdict import Tensors

Rule = Callable[..., Tensors]  # of an optimizer: (name, grad, before, lr=, weight_decay=, update=) -> master and states


@dataclass(frozen=True, kw_only=True)
class AskedUpdate:
    """One parameter's update as it should have been."""

    rule: Rule
    name: str
    grad: Tensor  # FP64, as the update uses it: unscaled, clipped
    before: Tensors  # master and states
    lr: float
    weight_decay: float
    update: int  # its number
    attempts: int  # updates and skipped steps so far, with this one
    lrs: Mapping[str, float] = field(default_factory=dict)  # other learning rates, by whose they are
    decays: Mapping[str, float] = field(default_factory=dict)
    coefficient: float = 1.0  # of clipping, in the gradient
    loss_scale: float = 1.0

    def updated(self, grad: Tensor, before: Tensors | None = None, **other: Any) -> Tensors:
        at = {"lr": self.lr, "weight_decay": self.weight_decay, "update": self.update} | other
        return self.rule(self.name, grad, self.before if before is None else before, **at)

    def explain(self, state: str, after: Tensor, bound: float) -> str:
        """Say what kind of mistake `after`, which is master or a state, looks like; "" for no known one."""
        want, found = self.updated(self.grad)[state], after.double()
        for dtype, text in HALVES.items():
            if bool((found.to(dtype).double() == found).all()) and bool((want.to(dtype).double() != want).any()):
                lost = float(((found == self.before[state].double()) & (want != found)).double().mean())
                which = "no FP32 master" if state == MASTER else "no FP32 state"
                return f"kept in {text}: {which}; {lost:.0%} of its elements' updates round to nothing"
        return nearest(found, want, bound, ((text, one[state]) for text, one in self._kinds()))

    def _kinds(self) -> Iterator[tuple[str, Tensors]]:
        grad, before, once = self.grad, self.before, self.updated(self.grad)
        moments = [state for state in before if state != MASTER]
        yield "never updated", before
        yield "updated twice", self.updated(grad, once, update=self.update + 1)
        yield "updated twice with one number", self.updated(grad, once)
        for text, lr in self.lrs.items():
            yield f"updated with {text}, {lr:.4g}, not {self.lr:.4g}", self.updated(grad, lr=lr)
        for text, decay in {"no weight decay": 0.0, **self.decays}.items():
            yield f"{text}, {decay:.4g}, not {self.weight_decay:.4g}", self.updated(grad, weight_decay=decay)
        decayed = grad + self.weight_decay * before[MASTER].double()
        yield "weight decay added to the gradient, not to the weights", self.updated(decayed, weight_decay=0.0)
        for count in {self.update - 1, self.update + 1, self.attempts} - {self.update, 0}:
            text = "the skipped steps are counted" if count == self.attempts else f"that of update {count}"
            yield f"bias correction: {text}, where this is update {self.update}", self.updated(grad, update=count)
        yield "no bias correction", self.updated(grad, update=10**9)
        if moments:
            empty = {state: before[state] if state == MASTER else torch.zeros_like(before[state]) for state in before}
            yield "states lost: this update began with zeros", self.updated(grad, empty)
            yield "states and their count lost: updated as if it were the first", self.updated(grad, empty, update=1)
        for dtype, text in HALVES.items():
            rounded = before | {MASTER: before[MASTER].to(dtype).to(before[MASTER].dtype)}
            yield f"masters made from the {text} copy before this update", self.updated(grad, rounded)
            states = {state: before[state].to(dtype).to(before[state].dtype) for state in moments}
            yield f"states rounded to {text} before this update", self.updated(grad, before | states)
        for text, factor in (
            ("the gradient was not clipped", 1 / self.coefficient), ("the loss scale is left in", self.loss_scale),
            ("the gradient was divided by the loss scale twice", 1 / self.loss_scale),
            ("the gradient was clipped twice", self.coefficient), ("its sign is turned", -1.0),
            ("the gradient is zeros", 0.0),
        ):  # fmt: skip
            if factor != 1:
                yield text, self.updated(grad * factor)
