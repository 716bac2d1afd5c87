"""What the engine refuses, each with what to do instead: wrong kinds when it is built, later changes of the module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from megamix.mixed_precision.optimizers import Optimizer
from megamix.mixed_precision.settings import Precision, Sharding

# Wrappers that move the module's parameters or reduce its gradients themselves. By name: to import FSDP takes a second.
_WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")

# What people look for on an engine, since torch's optimizers, modules or wrappers have it.
_INSTEAD = {
    "param_groups": "it is no torch optimizer, and no torch scheduler can set its learning rate: give AdamW(lr=[...]) "
    "one per update, or call engine.set_lr(lr) before step()",
    "zero_grad": "there is nothing to clear: step() ends with no gradients; discard_step() forgets a step's so far",
    "parameters": "take engine.module.parameters(). Their .grad is None: set clip_grad to clip, and read the result of "
    "step() for the norm",
    "train": "call engine.module.train()",
    "eval": "call engine.module.eval()",
    "no_sync": "set grad_accum_steps: gradients travel in the last backward() of a step alone",
}

_REQUIRES_GRAD = attrgetter("requires_grad")


def attribute_error(name: str) -> AttributeError:
    """For an attribute that the engine does not have."""
    instead = f"; {_INSTEAD[name]}" if name in _INSTEAD else ""
    return AttributeError(f"ShardedEngine has no attribute {name!r}{instead}")


def check_kinds(model: nn.Module, optimizer: Optimizer, precision: Precision, sharding: Sharding) -> None:
    """Raises: TypeError or ValueError if one of them is something that the engine cannot take."""
    if isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer is torch.optim.{type(optimizer).__name__}, which would hold and update half parameters; pass "
            "megamix.AdamW(lr=3e-4) or megamix.NAG(lr=0.1), with ParamGroup(pattern=...) for groups: the engine gives "
            "it the FP32 masters"
        )
    for name, value, kind in (
        ("model", model, nn.Module), ("optimizer", optimizer, Optimizer), ("precision", precision, Precision),
        ("sharding", sharding, Sharding),
    ):  # fmt: skip
        if not isinstance(value, kind):
            example = {"model": "the nn.Module itself", "optimizer": "megamix.AdamW(lr=3e-4)"}.get(
                name, f"megamix.{kind.__name__}(...)"
            )
            raise TypeError(f"{name} is a {type(value).__name__}, not of {kind.__name__}; pass {example}")
    for name, module in model.named_modules():
        _check_module(f"module {name}" if name else "the model", module, precision.dtype)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if type(tensor.data) is not Tensor:
            raise ValueError(
                f"{name} is a {type(tensor.data).__name__}, which other code divides or packs (fully_shard, "
                "parallelize_module, quantization); pass the plain module, the engine shards it itself"
            )
        if tensor.is_meta:
            raise ValueError(
                f"{name} is on the meta device and has no values; call model.to_empty(device=...), fill it, then build "
                "the engine"
            )


def _check_module(place: str, module: nn.Module, dtype: torch.dtype) -> None:
    wrapper = next((kind.__name__ for kind in type(module).__mro__ if kind.__name__ in _WRAPPERS), None)
    if wrapper is not None:
        raise ValueError(
            f"{place} is wrapped by {wrapper}, which reduces or divides what the engine does itself; pass the module "
            "inside, before it is wrapped"
        )
    if (
        isinstance(module, nn.modules.batchnorm._BatchNorm)
        and dtype != torch.float32
        and module.weight is not None
        and module.running_mean is not None
    ):
        raise ValueError(
            f"{place} is a {type(module).__name__} whose {dtype} weights would stand beside FP32 running statistics, "
            "which torch does not compute. Use GroupNorm or LayerNorm, or affine=False (its statistics stay FP32, and "
            "are each rank's own), or Precision(torch.float32)"
        )


def explain_dtypes(
    error: RuntimeError, args: Sequence[object], kwargs: Mapping[str, object], dtype: torch.dtype
) -> None:
    """Note on an error of forward that inputs were not of the module's dtype, if that may be why."""
    if "type" not in str(error):
        return
    for path, leaf in tree_flatten_with_path((args, kwargs))[0]:
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != dtype:
            error.add_note(
                f"input {keystr(path[1:])} of the module is {leaf.dtype}, the engine's parameters are {dtype}: cast it "
                f"first, x.to({dtype}), or in the module's forward"
            )


class ModuleGuard:
    """Sees that the module keeps the parameters with which the engine was built, no more and no fewer.

    Modules may come and go, as long as the parameters and their names are the same.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self._names = {param: name for name, param in model.named_parameters()}
        self._trains = [param.requires_grad for param in self._names]
        self._note_parts()

    def _note_parts(self) -> None:
        self._modules = [*self._model.modules()]  # held, so that none of their ids is given to another
        self._parts = [part.values() for module in self._modules for part in (module._parameters, module._modules)]
        self._ids = self._ids_now()

    def _ids_now(self) -> list[int]:
        # By id: tensors would be compared by their elements. Twice a step, 0.2 us for each module.
        return [*map(id, chain.from_iterable(self._parts))]

    def check(self) -> None:
        """Raise RuntimeError if a parameter was added, replaced, taken out, frozen or thawed."""
        if self._ids_now() != self._ids:
            self._compare()
            self._note_parts()
        if [*map(_REQUIRES_GRAD, self._names)] != self._trains:
            for (param, name), trains in zip(self._names.items(), self._trains, strict=True):
                if param.requires_grad != trains:
                    raise RuntimeError(_frozen_or_thawed(name, trains))

    def _compare(self) -> None:
        now = dict(self._model.named_parameters(remove_duplicate=False))
        known = {*self._names.values()}
        for name, param in now.items():
            if param not in self._names:
                what = "is another Parameter now than the one that the engine trains" if name in known else "was added"
                raise RuntimeError(
                    f"parameter {name} {what}: nothing would train it; build the engine after the model is complete"
                )
        for name in known - now.keys():
            raise RuntimeError(
                f"parameter {name} is no longer in the module under this name: it was taken out, or its module "
                "wrapped; build the engine after the model is complete"
            )


def _frozen_or_thawed(name: str, trains: bool) -> str:
    if trains:
        return (
            f"parameter {name} was frozen after the engine was built: weight decay and momentum would go on moving it. "
            "Set requires_grad_(True) again; to freeze it, build the model anew with engine.full_weights(), freeze it "
            "there, and build an engine on that"
        )
    return (
        f"parameter {name} was frozen when the engine was built and is not now: it has no master, and nothing would "
        "train it. Build the engine with it trainable; lr_factor=0.0 of a ParamGroup keeps a parameter as it is"
    )
