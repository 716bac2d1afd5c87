"""Watch of one step, which changes nothing of it: `megamix.audit`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megamix.comm.collectives import gather_json, make_collectives
from megamix.comm.topology import Topology
from megamix.mixed_precision.engine import ShardedEngine
from megamix.tools.audit.facts import FP8, NOWHERE, UNKNOWN, Facts, ParamFacts, describe, dtype_name, local, sum_of_bits
from megamix.tools.audit.finite import first_not_finite
from megamix.tools.audit.fp8_codes import codes_told
from megamix.tools.audit.holders import find_masters, innermost, is_compiled, wires_told
from megamix.tools.audit.report import AuditReport
from megamix.tools.audit.updates import engine_updates, optimizer_updates
from megamix.tools.audit.watch import Watch, losses_told
from megamix.tools.verify.core.observed_step import rank_device
from megamix.tools.verify.core.tape import fsdp_params


@contextmanager
def audit(model: nn.Module, optimizer: torch.optim.Optimizer | ShardedEngine) -> Iterator[AuditReport]:
    """Watch one step of your own loop: forward and backward of all its micro-batches, and `optimizer.step()`.

        with megamix.audit(model, optimizer) as report:
            loss_of(model(tokens), targets).backward()
            optimizer.step()
        print(report)

    `model`, `optimizer`: those that your loop calls, wrapped or not; or our engine as the second. The step computes the
    same, bit for bit. Afterwards the report has `rows`, `warnings` and `to_json()`, the same on every rank. Every rank
    must enter the block. Copies of the weights are held until the step is over.
    Raises: TypeError for a model that is no module, or another kind of optimizer; RuntimeError if there was no step, or
    several of an engine.
    """
    report, watch = AuditReport(), Watch()
    model = optimizer.module if isinstance(optimizer, ShardedEngine) else model
    if not isinstance(model, nn.Module):
        raise TypeError(f"audit: got a model of type {type(model).__name__}; write megamix.audit(model, optimizer)")
    facts = describe(model)
    if isinstance(optimizer, ShardedEngine):
        updates = engine_updates(optimizer, {one.name: one for one in facts.values()}, watch)
    else:
        updates = torch_updates(model, [optimizer], facts, watch)
    with updates, watched(model, facts, watch):
        yield report
    watch.first = watch.first or first_not_finite(watch.losses)
    finite = all(one.largest.get("gradient", 0.0) < torch.inf for one in facts.values())
    if not watch.steps and finite and not watch.overflowed:
        raise RuntimeError(
            "audit: no step was made inside the block: call optimizer.step() there, or scaler.step(optimizer) with a "
            "GradScaler, after the backward of its last micro-batch; give audit the optimizer that is stepped"
        )
    device = rank_device()
    collectives = make_collectives(Topology.current().world, device)
    notes = gather_json(collectives, make_note(facts, facts.values(), watch), device)
    report.fill(notes, skipped=not watch.steps)


def make_note(facts: Facts, judged: Iterable[ParamFacts], watch: Watch) -> dict[str, Any]:
    """Return what this rank has found, for JSON. `judged`: the facts that are complete."""
    first, not_finite = watch.first, None
    if first is not None:
        other = "the loss" if first.held is None else "a copy of a weight"
        where = next((one.name for param, one in facts.items() if param is first.held), other)
        not_finite = {"update": first.update, "kind": first.kind, "where": where}
    scale = watch.loss_scale if watch.loss_scale != 1 else None
    seen = {"loss_scale": scale, "sent": watch.sent, "divided": watch.divided}
    return {"facts": [asdict(one) for one in judged], "not_finite": not_finite, **seen}


@contextmanager
def torch_updates(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], facts: Facts, watch: Watch
) -> Iterator[None]:
    """Count the changes that each optimizer's step makes in the block, and note the dtypes that wrappers declare."""
    with ExitStack() as stack:
        stack.enter_context(wires_told(model, facts, watch.reduced))
        for optimizer in optimizers:
            stack.enter_context(optimizer_updates(innermost(optimizer), partial(find_masters, optimizer, facts), watch))
        yield
    for param, one in facts.items():
        if one.counts.get("held") and local(param) is param and param.isfinite().all():
            for sums in one.weight_sums.values():
                sums.append(sum_of_bits(param))


@contextmanager
def watched(model: nn.Module, facts: Facts, watch: Watch) -> Iterator[None]:
    """Watch every operation of the block, then note the dtypes that each parameter was computed with."""
    with ExitStack() as stack:
        stack.enter_context(watch.hooks)
        for hook in _follow(model, facts, watch):
            watch.hooks.enter_context(hook)
        stack.enter_context(losses_told(watch))
        stack.enter_context(codes_told(facts))
        stack.enter_context(watch)
        yield
    _settle_compute(facts, watch, {param for one in model.modules() if is_compiled(one) for param in one.parameters()})


def _follow(model: nn.Module, facts: Facts, watch: Watch) -> Iterator[RemovableHandle]:
    """Watch parameters, the tensors that FSDP2 gathers in their place, and the begin and end of the model's forward."""
    sharded = [(module, one) for module, one, _ in fsdp_params(model) if one.sharded_param in facts]
    for param in facts.keys() - {one.sharded_param for _, one in sharded}:
        watch.follow(facts[param], param)
    compiled = {inner for module in model.modules() if is_compiled(module) for inner in module.modules()}
    roots = {*model.children()} if isinstance(model, nn.ModuleDict) else {model}  # a ModuleDict has no forward
    for root in roots - compiled:
        yield root.register_forward_pre_hook(lambda *_: setattr(watch, "inside_forward", torch.is_grad_enabled()))
        yield root.register_forward_hook(lambda *_: setattr(watch, "inside_forward", False), always_call=True)
    for module, one in sharded:
        if module not in compiled:
            yield module.register_forward_pre_hook(partial(watch.follow_gathered, facts[one.sharded_param], one))


def _settle_compute(facts: Facts, watch: Watch, compiled: Collection[Tensor]) -> None:
    """Note the dtypes that each parameter was computed with: those seen, else those that a policy declares.

    `compiled`: the parameters of compiled modules.
    """
    for param, one in facts.items():
        if one.dtypes["compute"] == FP8:  # what its scales and codes are made in is no product
            continue
        if seen := watch.computed[one.name]:
            one.dtypes["compute"] = "/".join(sorted(map(dtype_name, seen)))
        elif one.dtypes["compute"] == NOWHERE and one.name in watch.moved:
            one.dtypes["compute"] = f"{UNKNOWN} it is only moved, as by cat; what uses the copy is not observed"
        elif one.dtypes["compute"] == NOWHERE and (param in compiled or "gradient" in one.largest):
            where = "inside torch.compile" if param in compiled else "with it, as those of a compiled function,"
            one.dtypes["compute"] = f"{UNKNOWN} the operations {where} are not observed"
            if one.trains:
                one.dtypes["gradient"] = f"{UNKNOWN} the casts {where} are not observed"
