"""`megamix.audit`: watches one step, and changes nothing of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from megamix.auditing.facts import NOWHERE, UNKNOWN, ParamFacts, describe, dtype_name, gather_facts
from megamix.auditing.holders import find_truths, fully_sharded, innermost, is_compiled, note_wires, settle_wires
from megamix.auditing.report import AuditReport
from megamix.auditing.updates import EngineUpdates, OptimizerUpdates
from megamix.auditing.watch import Watch
from megamix.mixed_precision.engine import ShardedEngine


@contextmanager
def audit(model: nn.Module, optimizer: torch.optim.Optimizer | ShardedEngine) -> Iterator[AuditReport]:
    """Watch one step of your own loop: forward and backward of all its micro-batches, and `optimizer.step()`.

        with megamix.audit(model, optimizer) as report:
            loss_of(model(tokens), targets).backward()
            optimizer.step()
        print(report)

    `model`, `optimizer`: as your loop calls them, wrapped or not; or our engine as the second. What the step computes
    stays the same, bit for bit. Afterwards the report has `rows`, `warnings` and `to_json()`, the same on every rank.
    Every rank must do it. Copies of the weights are held until the step is over.
    Raises: TypeError for another kind of optimizer; RuntimeError if there was no step, or several of an engine.
    """
    report = AuditReport()
    model = optimizer.module if isinstance(optimizer, ShardedEngine) else model
    facts, names = describe(model)
    watch = Watch(facts)
    with ExitStack() as stack:
        updates: EngineUpdates | OptimizerUpdates
        if isinstance(optimizer, ShardedEngine):
            updates = EngineUpdates(optimizer, facts)
        else:
            note_wires(model, names, facts)
            updates = OptimizerUpdates(innermost(optimizer), find_truths(optimizer, names, facts))
        stack.callback(lambda: [handle.remove() for handle in (*watch.handles, *updates.handles)])
        watch.handles += _follow(model, names, watch)
        stack.enter_context(watch)
        yield report
    updates.finish()
    if isinstance(updates, OptimizerUpdates):
        settle_wires(facts, watch)
    finite = all(one.largest.get("gradient", 0.0) < torch.inf for one in facts.values())
    if updates.steps == 0 and finite and not (updates.overflowed or watch.overflowed):
        raise RuntimeError(
            "audit: no step was made inside the block: call optimizer.step() there, or scaler.step(optimizer) with a "
            "GradScaler, after the backward of its last micro-batch; give audit the optimizer that is stepped"
        )
    _settle_compute(model, facts, names, watch)
    scale = updates.loss_scale or watch.loss_scale
    report.fill(gather_facts([*facts.values()]), scale, skipped=updates.steps == 0)


def _follow(model: nn.Module, names: Mapping[nn.Parameter, str], watch: Watch) -> Iterator[RemovableHandle]:
    """Watch parameters, what FSDP2 gathers in their place, and when the model's forward begins and ends."""
    sharded = list(fully_sharded(model, names))
    gathered = {name for _, params in sharded for name in params}
    for param, name in names.items():
        if name not in gathered:
            watch.follow(name, param)

    compiled = {inner for module in model.modules() if is_compiled(module) for inner in module.modules()}
    if model not in compiled:
        yield model.register_forward_pre_hook(lambda *_: setattr(watch, "inside_forward", True))
        yield model.register_forward_hook(lambda *_: setattr(watch, "inside_forward", False), always_call=True)
    for module, params in sharded:
        if module not in compiled:

            def follow(*_: object, params: Mapping[str, Any] = params) -> None:
                for name, param in params.items():
                    if hasattr(param.param, "_unsharded_param"):
                        watch.follow(name, param.param._unsharded_param)

            yield module.register_forward_pre_hook(follow)


def _settle_compute(
    model: nn.Module, facts: Mapping[str, ParamFacts], names: Mapping[nn.Parameter, str], watch: Watch
) -> None:
    """Say in which dtypes each parameter was computed with: what was seen, else what a policy says."""
    policies = {name: param.compute for _, params in fully_sharded(model, names) for name, param in params.items()}
    compiled = any(map(is_compiled, model.modules()))
    for name, one in facts.items():
        seen = watch.computed[name] or {policies[name]} if name in policies else watch.computed[name]
        unseen = f"{UNKNOWN} torch.compile runs it unseen" if compiled else NOWHERE
        one.dtypes["compute"] = "/".join(sorted(map(dtype_name, seen))) or unseen
        if one.dtypes["compute"][0] == UNKNOWN and one.trains:
            one.dtypes["gradient"] = f"{UNKNOWN} torch.compile ends it with casts unseen"
