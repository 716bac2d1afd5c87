"""Audit of one update from inside a script that knows nothing of it, in each of its processes."""

from __future__ import annotations

import gc
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from megamix.tools.audit.audit import make_note, torch_updates, watched
from megamix.tools.audit.facts import describe
from megamix.tools.audit.finite import NotFinite, first_not_finite
from megamix.tools.audit.holders import held_by, innermost
from megamix.tools.audit.watch import Watch

WAIT_S = 60.0  # for ranks whose update takes longer
MOST_SKIPPED = 40  # attempts in a row that overflow
MOST_ANEW = 3  # updates in a row, each by an optimizer that is made for it

Kind = TypeVar("Kind")


class ScriptAudit:
    """Watches everything between two updates of the optimizer that steps first, and ends the process after the second.

    Optimizers that take turns are all watched. An attempt that overflows is watched anew, and so is the first update of
    an optimizer that is made anew for the same parameters.
    """

    def __init__(self, updates: int, folder: str, tell: Callable[..., None]):
        """`updates`: number of the update to watch, at least 2. `tell`: writes this process's note into `folder`."""
        self._updates, self._folder, self._tell = updates, Path(folder), tell
        self._leader: weakref.ref[Optimizer] | None = None
        self._first: Tensor | None = None  # parameter of the leader
        self._made, self._again, self._first_number = 0, 0, 1
        self._optimizers = list[Optimizer]()
        self._stepped = list[Optimizer]()  # since the watch began
        self._watch: Watch | None = None
        self._not_finite: NotFinite | None = None  # before the watch began
        self._stack = ExitStack()
        self._filled = weakref.WeakKeyDictionary[Optimizer, int]()  # its count after a step of zeros

    def after_update(self, optimizer: Optimizer, losses: Sequence[Tensor]) -> None:
        """Take note of an update. `losses`: of the last backward pass.

        Raises: ValueError that says why the script cannot be audited.
        """
        if innermost(optimizer) is not optimizer:  # a wrapper, whose inner optimizer has reported this update
            return
        if torch._C._current_graph_task_id() != -1:
            raise ValueError("its optimizers step inside backward, where no watch can begin; step them after it")
        if not losses and self._only_fills(optimizer):
            return
        if (filled := self._filled.pop(optimizer, 0)) and _count(optimizer) == filled + 1:
            self._first_number = max(self._first_number, filled + 1)
        if self._watch is None:
            self._not_finite = self._not_finite or first_not_finite(losses, optimizer, self._made + 1)
        else:
            self._stepped.append(optimizer)
        if not self._leads(optimizer):
            return
        if self._watch is None:
            self._made += 1
            if self._made == self._updates - 1:
                self._begin()
            return
        self._stack.close()
        if optimizer in self._optimizers and not self._watch.overflowed:
            self._end(self._watch)
        self._again += 1
        if self._watch.overflowed and self._again > MOST_SKIPPED:
            raise ValueError(f"{self._again} attempts in a row overflowed; audit it later: --updates 100")
        if not self._watch.overflowed and self._again > MOST_ANEW:
            raise ValueError("it makes an optimizer for each update; one optimizer must make two in a row")
        self._begin()

    def _only_fills(self, optimizer: Optimizer) -> bool:
        """Return whether a step before any backward pass was of zeros: it fills states, and moves their count."""
        if any(param.grad is not None and bool(param.grad.any()) for param in held_by(optimizer)):
            return False
        self._filled[optimizer] = _count(optimizer)
        optimizer.register_load_state_dict_post_hook(lambda loaded: self._filled.update({loaded: 0}))
        return True

    def _leads(self, optimizer: Optimizer) -> bool:
        """Return whether this is the optimizer that stepped first, or has taken its place."""
        first = held_by(optimizer)[0]
        leader = self._leader and self._leader()
        if leader is None or first is self._first:
            self._leader, self._first = weakref.ref(optimizer), first
        return first is self._first

    def _begin(self) -> None:
        self._optimizers = [one for one in _living(Optimizer) if innermost(one) is one]
        roots = trained_roots(self._optimizers)
        if not roots:
            raise ValueError(
                "no nn.Module holds what the optimizer moves, so its names are unknown; write "
                "with megamix.audit(model, optimizer): around a step of your loop, see docs/verify.md"
            )
        model = roots[0] if len(roots) == 1 else _together(roots)
        self._facts, self._watch, self._stepped = describe(model), Watch(), []
        self._stack.enter_context(torch_updates(model, self._optimizers, self._facts, self._watch))
        self._stack.enter_context(watched(model, self._facts, self._watch))

    def _end(self, watch: Watch) -> None:
        met = dist.is_available() and dist.is_initialized()
        world = dist.get_world_size() if met else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun's
        # Parameters whose optimizer has made no step meanwhile are not judged.
        moved = held_by(*(one for one in self._optimizers if one in self._stepped))
        waiting = {*held_by(*self._optimizers)}.difference(moved)
        judged = [one for param, one in self._facts.items() if param not in waiting]
        for one in judged:
            one.counts.pop("unsaved", None)  # the script may save copies of masters by itself
        unseen = len({*held_by(*self._stepped)}) - sum("held" in one.counts for one in judged)
        watch.first = self._not_finite or (watch.first and replace(watch.first, update=self._updates))
        note = make_note(self._facts, judged, watch) | {"waiting": len(self._facts) - len(judged)}
        self._tell("facts", **note, world=world, unseen=unseen, first=self._first_number)
        end = time.monotonic() + WAIT_S
        while len([*self._folder.glob("*.facts")]) < world and time.monotonic() < end:
            time.sleep(0.05)
        # The script's own way out would save checkpoints, or call this an error.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def trained_roots(optimizers: Sequence[Optimizer]) -> list[nn.Module]:
    """Return the outermost modules whose parameters these optimizers hold.

    If they hold copies, parameters with a gradient count as held. If several modules hold the same parameters, as a
    module and its compiled form do, only the first one is returned.
    """
    modules = [*_living(nn.Module)]
    held = {*held_by(*optimizers)}
    copies = bool(held.difference(*(module.parameters() for module in modules)))

    def trained(module: nn.Module) -> set[nn.Parameter]:
        return {param for param in module.parameters() if param in held or (copies and param.grad is not None)}

    inner = {inside for module in modules for inside in module.children()}
    by_root = {module: found for module in modules if module not in inner and (found := trained(module))}
    roots, covered = list[nn.Module](), set[nn.Parameter]()
    for root, found in sorted(by_root.items(), key=lambda one: -len(one[1])):
        if not found <= covered:
            roots.append(root)
            covered |= found
    return roots


def _count(optimizer: Optimizer) -> int:
    """Return the number of updates that an optimizer has counted; 0 if it counts none."""
    return max((int(held.get("step", 0)) for held in (*optimizer.state.values(), *optimizer.param_groups)), default=0)


def _living(kind: type[Kind]) -> Iterator[Kind]:
    """Yield every living object of a class. It asks for types: a lazy object asked for its class may import."""
    return (found for found in gc.get_objects() if issubclass(type(found), kind))


def _together(roots: Sequence[nn.Module]) -> nn.Module:
    """Return a module in which each root has the name of its class, and a number if there are others of it."""
    kinds = [type(root).__name__ for root in roots]
    names = [f"{kind}{kinds[:at].count(kind)}" if kinds.count(kind) > 1 else kind for at, kind in enumerate(kinds)]
    return nn.ModuleDict(dict(zip(names, roots, strict=True)))
