"""Changes of the masters by one update, and the part of them that their dtype has lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from megamix.mixed_precision.bucket import OwnedRange
from megamix.mixed_precision.engine import ShardedEngine
from megamix.mixed_precision.observer import DIRECTION, GRADIENT, SOURCE
from megamix.mixed_precision.update_slice import AVERAGE, MASTER, number_at
from megamix.tools.audit.facts import HALVES, NOWHERE, ParamFacts, dtype_name, local
from megamix.tools.audit.finite import first_not_finite
from megamix.tools.audit.watch import Watch
from megamix.tools.verify.core.observed_step import UsedValues

# States whose next value moves a weight even if the gradient is zero. Other states only divide.
_MOVES = ("exp_avg", "momentum_buffer", "velocity", "momentum")
_TRAINED = 3  # updates after which every master has moved, even if the warm-up began at a learning rate of 0
_FEWEST = 64  # elements; fewer may all be round by chance


class Update:
    """Copies of a master and its states, taken before an update. `updates`: number of updates made before."""

    def __init__(
        self, facts: ParamFacts, master: Tensor, states: Mapping[str, Tensor], updates: int, lr: float,
        betas: Sequence[float], decays: bool,
    ):  # fmt: skip
        self.facts, self._master, self._lr, self._decays = facts, master, lr, decays
        self._before = master.detach().clone()
        # An FP32 state moves whenever it should, so no copy of it is needed.
        self._half_states = {name: state.clone() for name, state in states.items() if dtype_name(state.dtype) in HALVES}
        facts.note_largest(lr=lr, **dict(zip(("beta exp_avg", "beta exp_avg_sq"), betas, strict=False)))
        if master.dtype == torch.float32 and updates >= _TRAINED and lr and master.numel() >= _FEWEST:
            facts.count(round_masters=only_half_values(master))

    def after(self, grad: Tensor, states: Mapping[str, Tensor], direction: Tensor | None = None) -> None:
        """Count the changes since.

        `grad`: the gradient that the update used, up to a factor. `direction`: moves the master in place of
        the gradient and the states.
        """
        facts, before, master = self.facts, self._before, self._master.detach()
        moments = {name: state for name, state in states.items() if state.shape == master.shape}
        facts.moments |= {name: dtype_name(state.dtype) for name, state in moments.items()}
        facts.dtypes["master"] = dtype_name(master.dtype)
        due = grad != 0
        for name, state in self._half_states.items():
            facts.count(**{f"due {name}": due.sum(), f"stuck {name}": (due & (moments[name] == state)).sum()})
        for name in moments.keys() & _MOVES:
            due = due | (moments[name] != 0)
        if direction is not None:
            due = direction != 0
        if self._decays:
            due = due | (before != 0)
        if self._lr and bool(master.isfinite().all()):  # else nothing that is left of it can be counted
            moved, weight = (torch.linalg.vector_norm(x.float()).double() for x in (master.float() - before, before))
            facts.count(due=due.sum(), lost=(due & (master == before)).sum())
            facts.count(update_squares=moved**2, weight_squares=weight**2)


def only_half_values(values: Tensor) -> bool:
    """Return whether an FP32 tensor holds only values of BF16, or only of FP16, and is not one number throughout."""
    whole = any(torch.equal(values.to(half).float(), values) for half in (torch.bfloat16, torch.float16))
    return whole and bool((values != values.flatten()[0]).any())


@contextmanager
def optimizer_updates(
    optimizer: Optimizer, find_masters: Callable[[], dict[Tensor, ParamFacts]], watch: Watch
) -> Iterator[None]:
    """Count the changes that a torch optimizer makes between the hooks of its step.

    `find_masters`: maps each tensor that the optimizer holds to its parameter's facts.
    """
    masters, under_way = find_masters(), dict[Tensor, Update]()

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        under_way.clear()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            copy()
            return None

        def then_copy() -> Any:  # the gradients are there once the closure has run; a line search runs it again
            loss = closure()
            if not under_way:
                copy()
            return loss

        return (optimizer, then_copy), {key: value for key, value in kwargs.items() if key != "closure"}

    @torch.no_grad()
    def copy() -> None:
        # A GradScaler hands its scale and its found_inf to a fused optimizer.
        scale, found_inf = (getattr(optimizer, name, None) for name in ("grad_scale", "found_inf"))
        watch.loss_scale = watch.loss_scale if scale is None else float(scale)
        if found_inf is not None and bool(found_inf):
            watch.overflowed = True
            return
        watch.steps += 1
        masters.update(find_masters())  # a step copies its masters into the parameters, which shows whose they are
        for group in optimizer.param_groups:
            states = _states(optimizer, group)
            for param in (one for one in group["params"] if one in masters and one.grad is not None):
                facts, state = masters[param], optimizer.state.get(param, {})
                if facts.dtypes["sum"] == NOWHERE:
                    facts.dtypes["sum"] = dtype_name(param.grad.dtype)
                made, lr, decays = int(state.get("step", 0)), float(group["lr"]), bool(group.get("weight_decay"))
                under_way[param] = Update(facts, local(param), states[param], made, lr, group.get("betas", ()), decays)

    @torch.no_grad()
    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        states = {param: held for group in optimizer.param_groups for param, held in _states(optimizer, group).items()}
        for param, update in under_way.items():
            assert param.grad is not None
            update.after(local(param.grad), states[param])
        watch.first = watch.first or first_not_finite(watch.losses, optimizer)

    with optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after):
        yield


def _states(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[Tensor, dict[str, Tensor]]:
    """Return the states of each parameter of a group that have its number of elements, in its shape.

    Some Muons keep one tensor for parameters of one shape, under the first of them or in the group: each parameter has
    a row of it.
    """
    params = group["params"]
    found: dict[Tensor, dict[str, Tensor]] = {param: {} for param in params}
    for first, param in enumerate(params):
        alike, shape = [one for one in params[first:] if one.shape == param.shape], local(param).shape
        for name, kept in [*optimizer.state.get(param, {}).items(), *(() if first else group.items())]:
            if isinstance(kept, Tensor) and kept.dim():
                kept = local(kept)
                stack = kept.shape[1:] == shape
                parts = kept if stack else [kept.reshape(shape)] if kept.numel() == shape.numel() else []
                for other, part in zip(alike, parts, strict=False):
                    found[other].setdefault(name, part)
    return found


@contextmanager
def engine_updates(engine: ShardedEngine, facts: Mapping[str, ParamFacts], watch: Watch) -> Iterator[None]:
    """Count the changes that one `step()` of an engine makes to the elements that this rank owns.

    Raises: RuntimeError if there were several steps, because the first one's sums are gone.
    """
    applied, skipped = int(engine.applied_updates), int(engine.skipped_steps)
    watch.loss_scale = float(engine.loss_scale.loss_scale)
    table = tuple(engine.optimizer.lr_table())
    updates = list[Update]()
    for owned in engine.owned_ranges():
        group = engine.optimizer.group_of(owned.spec.name, owned.spec.full_shape)
        factor, one = number_at(group.lr_factor, applied + 1), facts[owned.spec.name]
        lr, moments = number_at(table, applied + 1) * factor, _moments(owned) if factor else {}
        betas = [number_at(beta, applied + 1) for beta in group.betas]
        decays = number_at(group.weight_decay, applied + 1) > 0
        one.count(by_chance=getattr(engine.optimizer, "takes_chances", False))
        updates.append(Update(one, owned.tensors[MASTER], moments, applied, lr, betas, decays))
    for bucket in engine.buckets:
        wire = NOWHERE if bucket.owners.axis.size == 1 else dtype_name(bucket.grads.dtype)
        total = dtype_name(bucket.grad_sum.dtype)
        for one in (facts[name] for name in bucket.named_params):
            one.count(held=1)
            one.dtypes |= {"wire": wire, "sum": total, "checkpoint": dtype_name(torch.float32)}  # masters are saved
    used = UsedValues()
    with engine.observe(used):
        yield
    for (what, name), values in used.values.items():
        if what == SOURCE:
            facts[name].direction = dtype_name(values.dtype)
    watch.steps = int(engine.applied_updates) - applied
    watch.overflowed |= int(engine.skipped_steps) > skipped
    if watch.steps > 1:
        raise RuntimeError(f"audit: the engine made {watch.steps} updates inside the block; take one step")
    if watch.steps == 1:
        for update, owned in zip(updates, engine.owned_ranges(), strict=True):
            grad = used.values[GRADIENT, owned.spec.name]
            update.after(grad, _moments(owned), used.values.get((DIRECTION, owned.spec.name)))
            update.facts.note_largest(gradient=grad.abs().amax())


def _moments(owned: OwnedRange) -> dict[str, Tensor]:
    """Return the states that updates read: of the average of the weights none does."""
    return {name: one for name, one in owned.tensors.items() if name not in (MASTER, AVERAGE)}
