"""An update as it should have been, its bound, and kinds of mistakes, whose results are computed as for gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megamix.mixed_precision.update_slice import MASTER
from megamix.tools.verify.core.hypotheses import HALVES, nearest
from megamix.tools.verify.core.verdict import NOISE, U32, UNIT, Tensors, Verdict, max_abs

Rule = Callable[..., Tensors]  # (grad, before, lr=, weight_decay=, update=) -> master and states of an optimizer


@dataclass(frozen=True, kw_only=True)
class RightUpdate:
    """One parameter's update as it should have been."""

    rule: Rule
    name: str
    grad: Tensor  # FP64, as the update uses it: unscaled, clipped
    before: Tensors  # master and states
    lr: float
    weight_decay: float
    update: int  # number of the update
    attempts: int  # updates and skipped steps so far, with this one
    lrs: Mapping[str, float] = field(default_factory=dict)  # learning rates, by their owners
    decays: Mapping[str, float] = field(default_factory=dict)
    rules: Mapping[str, Rule] = field(default_factory=dict)  # wrong rules, by what is wrong with them
    peers: Mapping[str, Tensors] = field(default_factory=dict)  # parameters' states, of the same shapes
    past: Sequence[Tensor] = ()  # weights before earlier steps
    coefficient: float = 1.0  # clip coefficient in the gradient
    loss_scale: float = 1.0
    of_rows: bool = False  # True: the rule may be asked for some rows alone
    lacking: str = ""  # states that the rule needs and this optimizer lacks

    def updated(self, grad: Tensor, before: Tensors | None = None, **other: Any) -> Tensors:
        at = {"lr": self.lr, "weight_decay": self.weight_decay, "update": self.update} | other
        return self.rule(grad, self.before if before is None else before, **at)

    def note(self, verdict: Verdict, after: Tensors, dtypes: Mapping[str, torch.dtype], unseen: float = 0.0) -> None:
        """Compare master and states after the update with the equation in FP64.

        Bound: 64 FP32 roundings of the largest number that enters. The norm in the clip coefficient has 34 of them,
        unscaling and the equation fewer than 16; a square has the gradient's twice. A step of the master is at most
        about 4 lr in AdamW, whatever the gradient, and lr times gradient and momentum in NAG. A half state is rounded
        once more, in its dtype. In an equation that jumps, as a sign does, 64 roundings of the gradient may decide. A
        master that comes of halves, as Muon's, may be off by NOISE times the effect of their rounding in the gradient.
        `unseen`: how far the gradient may be from the one that the update used. The update may be off by the effect of
        that, which is computed at four points.
        Shapes: each of `after` as in `before`.
        """
        grad = self.grad
        verdict.needs("the update: lr was 0 in every step; verify longer, or another schedule", self.lr != 0)
        for state, new in self.updated(grad).items():
            error = (after[state].double() - new).abs()
            enters = max_abs(grad)
            if state == MASTER:
                enters = self.lr * max(8.0, enters)
            elif state == "exp_avg_sq":
                enters = 2 * max(enters, enters**2)
            bound = 64 * U32 * max(max_abs(self.before[state]), max_abs(new), enters)
            if dtypes[state] != torch.float32:
                # stochastic rounding included; 2**-25: FP16's subnormals
                bound += 2 * UNIT[dtypes[state]] * max_abs(new) + 2.0**-25
            if error.max() > bound:
                others = [grad * (1 - 64 * U32), grad * (1 + 64 * U32)]
                others += [grad + unseen * part for part in (-1.0, -0.5, 0.5, 1.0) if unseen]
                spread = sum(((self.updated(other)[state] - new).abs() for other in others), torch.zeros_like(error))
                error = error - spread
            if state == MASTER and error.max() > bound:
                with Halves() as halves:  # type: ignore[no-untyped-call]  # its base class is untyped
                    self.updated(grad)
                signs = torch.randint(2, grad.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
                bound += NOISE * max_abs(self.updated(grad * (1 + halves.unit * signs))[state] - new)
            check = "weight" if state == MASTER else state
            worst = max(0.0, float(error.max())) if after[state].isfinite().all() else math.inf
            verdict.note(check, self.name, worst, bound, partial(self.explain, state, after[state], bound))

    def explain(self, state: str, after: Tensor, bound: float) -> str:
        """Say which kind of mistake `after`, a master or a state, looks like; "" for no known one."""
        if self.lacking:
            return f"another optimizer's: the plain one keeps {self.lacking}"
        want, found = self.updated(self.grad)[state], after.double()
        for dtype, text in HALVES.items():
            if bool((found.to(dtype).double() == found).all()) and bool((want.to(dtype).double() != want).any()):
                lost = float(((found == self.before[state].double()) & (want != found)).double().mean())
                which = "no FP32 master" if state == MASTER else "no FP32 state"
                return f"kept in {text}: {which}; {lost:.0%} of its elements' updates round to nothing"
        kind = nearest(found, want, bound, ((text, one[state]) for text, one in self._kinds()))
        return kind or (self._average(found, want, bound) if state == MASTER else "")

    def _average(self, found: Tensor, want: Tensor, bound: float) -> str:
        """Return a kind if the weights are a mean of this update's and of earlier ones, whatever the shares."""
        before = self.before[MASTER].double()
        moves = torch.stack([one.double().flatten() for one in (want, *self.past)]) - before.flatten()
        if not moves.isfinite().all():
            return ""
        shares = torch.linalg.pinv(moves @ moves.T, hermitian=True) @ (moves @ (found - before).flatten())
        near = max_abs((shares @ moves).view_as(before) - (found - before)) <= bound
        is_mean = bool((shares > -1e-3).all()) and float(shares.sum()) < 1.001
        return f"an average of the weights left in the model, {shares[0]:.3g} of it new" if near and is_mean else ""

    def _kinds(self) -> Iterator[tuple[str, Tensors]]:
        grad, before, once = self.grad, self.before, self.updated(self.grad)
        moments = [state for state in before if state != MASTER]
        yield "never updated", before
        yield "updated twice", self.updated(grad, once, update=self.update + 1)
        yield "updated twice with one number", self.updated(grad, once)
        for text, lr in self.lrs.items():
            yield f"updated with {text}, {lr:.4g}, not {self.lr:.4g}", self.updated(grad, lr=lr)
        decays = {"no weight decay": 0.0, "weight decay twice": 2 * self.weight_decay, **self.decays}
        decays |= {"weight decay not multiplied by the lr": self.weight_decay / self.lr} if self.lr else {}
        for text, decay in decays.items():
            yield f"{text}, {decay:.4g}, not {self.weight_decay:.4g}", self.updated(grad, weight_decay=decay)
        decayed = grad + self.weight_decay * before[MASTER].double()
        yield "weight decay added to the gradient, not to the weights", self.updated(decayed, weight_decay=0.0)
        plain = self.updated(grad, weight_decay=0.0)
        shrunk = plain[MASTER] - self.lr * self.weight_decay * before[MASTER].double()
        yield "weight decay taken from the weights, not added to the gradient", plain | {MASTER: shrunk}
        for count in {self.update - 1, self.update + 1, self.attempts} - {self.update, 0}:
            text = "the skipped steps are counted" if count == self.attempts else f"that of update {count}"
            yield f"bias correction: {text}, where this is update {self.update}", self.updated(grad, update=count)
        yield "no bias correction", self.updated(grad, update=10**9)
        if moments:
            empty = {state: before[state] if state == MASTER else torch.zeros_like(before[state]) for state in before}
            yield "states lost: this update began with zeros", self.updated(grad, empty)
            yield "states and their count lost: updated as if it were the first", self.updated(grad, empty, update=1)
        for text, rule in self.rules.items():
            yield text, replace(self, rule=rule).updated(grad)
        for other, states in self.peers.items():
            yield f"with the states of {other}", self.updated(grad, before | states)
        by_row = self.of_rows and grad.dim() > 1 and all(one.shape == grad.shape for one in before.values())
        for parts in (2, 4) if by_row else ():
            cut = [one.chunk(parts) for one in (grad, *before.values())]
            made = [self.updated(some, dict(zip(before, rest, strict=True))) for some, *rest in zip(*cut, strict=True)]
            text = f"each of {parts} parts of its rows updated by itself, as a partition or a block of it"
            yield text, {state: torch.cat([one[state] for one in made]) for state in before}
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


class Halves(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Watch that notes the largest rounding of a half dtype in which any operation returns a tensor."""

    unit = 0.0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = function(*args, **(kwargs or {}))
        if isinstance(given, Tensor) and given.dtype in HALVES:
            self.unit = max(self.unit, UNIT[given.dtype])
        return given
