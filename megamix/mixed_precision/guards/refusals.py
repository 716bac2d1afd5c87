"""Refusals, each of which says what to do instead, and the check that all ranks were given the same."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from megamix.comm.collectives import Collectives
from megamix.comm.start_ranks import refuse_alone
from megamix.mixed_precision.optim.optimizer import Optimizer
from megamix.mixed_precision.settings import Precision, Sharding

# Wrappers that move the module's parameters or reduce its gradients themselves. They are known by name, because
# importing FSDP takes a second.
_WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")

# Names that people look for on an engine, since torch's optimizers, modules or wrappers have them.
_INSTEAD = {
    "param_groups": "the engine is no torch optimizer, and no torch scheduler can set its learning rate: give "
    "AdamW(lr=[...]) one rate per update, or call engine.set_lr(lr) before step()",
    "zero_grad": "there is nothing to clear: step() leaves no gradients; to drop an unfinished step's gradients call "
    "discard_step()",
    "parameters": "take engine.module.parameters(). Their .grad is None: set clip_grad to clip, and read the result of "
    "step() for the norm",
    "model": "the module is engine.module",
    "grad_norm": "read the result of step(): result.grad_norm",
    "lr_scheduler": "give AdamW(lr=[...]) one rate per update, or call engine.set_lr(lr) before step()",
    "train": "call engine.module.train()",
    "eval": "call engine.module.eval()",
    "save": "call megamix.Checkpoints(engine, folder).save({}) on every rank",
    "load": "call megamix.Checkpoints(engine, folder).load() on every rank",
    "no_sync": "set grad_accum_steps: gradients travel in the last backward() of a step alone",
}


def check_loss(loss: Tensor, weight: float) -> None:
    """Refuse a loss or a weight that `backward` cannot take. Raises: ValueError."""
    if isinstance(loss, Tensor) and loss.numel() != 1:
        raise ValueError(f"backward() takes a loss of one element, got shape {tuple(loss.shape)}; take its mean")
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        raise ValueError(
            f"backward() takes a loss that is computed from the module's parameters, got {type(loss).__name__} without "
            "a graph; give the tensor before .item() or .detach(), and not under torch.no_grad()"
        )
    if loss.dtype in (torch.float16, torch.bfloat16):
        fix = "compute it in FP32, as F.cross_entropy(engine(x).float(), y)"
        warnings.warn(f"backward() got a rounded loss, in {loss.dtype}; {fix}", stacklevel=3)  # Python shows it once
    if not 0 <= weight < math.inf:
        raise ValueError(f"backward() takes a weight of 0 or more, got {weight}; pass the share that counts")


def attribute_error(name: str) -> AttributeError:
    """Return the error for an attribute that the engine does not have."""
    instead = f"; {there}" if (there := _INSTEAD.get(name.removesuffix("_checkpoint"))) else ""
    return AttributeError(f"ShardedEngine has no attribute {name!r}{instead}")


def refuse_copy(engine: object) -> NoReturn:
    """Refuse copy, deepcopy and pickle. Raises: TypeError."""
    raise TypeError(
        "an engine is neither copied nor pickled, because it belongs to its module and ranks. Save it by "
        "megamix.Checkpoints(engine, folder); to copy weights take deepcopy(engine.module) or engine.full_weights()"
    )


def check_arguments(
    model: nn.Module,
    optimizer: Optimizer,
    precision: Precision,
    sharding: Sharding,
    clip_grad: float,
    grad_accum_steps: int,
) -> None:
    """Refuse arguments that the engine cannot take. Raises: TypeError or ValueError naming the argument."""
    if isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer is torch.optim.{type(optimizer).__name__}, which would hold and update half parameters; pass "
            "megamix.AdamW(lr=3e-4) or megamix.NAG(lr=0.1), with ParamGroup(pattern=...) for groups: the engine gives "
            "it the FP32 masters"
        )
    for name, value, kind, example in (
        ("model", model, nn.Module, "the nn.Module itself"),
        ("optimizer", optimizer, Optimizer, "megamix.AdamW(lr=3e-4)"),
        ("precision", precision, Precision, "megamix.Precision(...)"),
        ("sharding", sharding, Sharding, "megamix.Sharding(...)"),
    ):
        if not isinstance(value, kind):
            raise TypeError(f"{name} is a {type(value).__name__}, not of {kind.__name__}; pass {example}")
    for name, module in model.named_modules():
        _check_module(f"module {name}" if name else "the model", module, precision.dtype)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        with torch._C.DisableTorchFunctionSubclass():  # another engine may have freed the values
            own_class = type(tensor.data)
        if own_class is not Tensor:
            raise ValueError(
                f"{name} is a {own_class.__name__}, which other code divides or packs (fully_shard, "
                "parallelize_module, quantization); pass the plain module, the engine shards it itself"
            )
        if tensor.is_meta:
            raise ValueError(
                f"{name} is on the meta device and has no values; call model.to_empty(device=...), fill it, then build "
                "the engine"
            )
    known, given = {*model.modules()} - {model}, list[nn.Module]()
    for unit in sharding.units:
        if unit not in known or unit in given:
            wrong = "is given twice" if unit in given else "is not one"
            raise ValueError(
                f"units must be different submodules of the model; {type(unit).__name__} {wrong}. "
                "Pass e.g. [*model.blocks]"
            )
        forward = getattr(unit.forward, "__func__", None)  # torch.compile sets `forward` on the object
        if forward is nn.Module.forward and any(True for _ in unit.parameters()):
            raise ValueError(
                f"units must be modules that the model calls, but a {type(unit).__name__} has no forward, so nothing "
                "would await its weights. Pass the modules that it holds, e.g. [*model.blocks]"
            )
        given.append(unit)
    if precision.dtype == torch.float16 and precision.loss_scale is None:
        raise ValueError(
            "precision.loss_scale is None, but FP16 gradients need one; pass loss_scale=DynamicLossScale()"
        )
    if sharding.topology is None:
        refuse_alone()
    if not isinstance(clip_grad, Real) or isinstance(clip_grad, bool):
        raise TypeError(f"clip_grad must be a number, got {clip_grad!r}; 0 turns clipping off")
    if not clip_grad >= 0:  # NaN is refused, too
        raise ValueError(f"clip_grad must be a number of at least 0, got {clip_grad}; 0 turns clipping off")
    check_grad_accum_steps(grad_accum_steps)


def check_grad_accum_steps(grad_accum_steps: int) -> None:
    """Refuse what is no number of micro-batches. Raises: TypeError or ValueError."""
    if not isinstance(grad_accum_steps, Integral) or isinstance(grad_accum_steps, bool):
        raise TypeError(f"grad_accum_steps must be a whole number, got {grad_accum_steps!r}; leave it out for 1")
    if grad_accum_steps < 1:
        raise ValueError(f"grad_accum_steps must be at least 1, got {grad_accum_steps}")


def _check_module(place: str, module: nn.Module, dtype: torch.dtype) -> None:
    wrapper = next((kind.__name__ for kind in type(module).__mro__ if kind.__name__ in _WRAPPERS), None)
    if wrapper is not None:
        raise ValueError(
            f"{place} is wrapped by {wrapper}, which reduces gradients or divides parameters, as the engine itself "
            "does; pass the module inside, before it is wrapped"
        )
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
        raise ValueError(
            f"{place} is a {type(module).__name__} with max_norm {module.max_norm}, which writes its weight in forward "
            "and past the FP32 masters; leave max_norm out, and scale what the module returns"
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
    """Add a note to an error of forward if inputs had another dtype than the module, which may be the cause."""
    if "type" not in str(error):
        return
    for path, leaf in tree_flatten_with_path((args, kwargs))[0]:
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != dtype:
            error.add_note(
                f"input {keystr(path[1:])} of the module is {leaf.dtype}, the engine's parameters are {dtype}: cast it "
                f"first, x.to({dtype}), or in the module's forward"
            )


def explain_stale_loss(error: BaseException) -> None:
    """Add a note to an error of backward if the loss may be older than the weights."""
    if "modified by an inplace operation" in str(error):
        error.add_note(
            "if the variable is a parameter, the loss was computed before step() or a load wrote the weights: call "
            "engine.backward(loss) first"
        )


def fingerprint(*values: object) -> str:
    """Return the SHA-256 of the values' printed form."""
    return hashlib.sha256(repr(values).encode()).hexdigest()


def require_equal(collectives: Collectives, device: torch.device, *values: object) -> None:
    """Refuse ranks whose values have another fingerprint. Every rank must call it. Raises: ValueError on every rank."""
    mine = torch.tensor([int(fingerprint(*values)[:15], 16)], device=device)
    axis = collectives.axis
    different = [axis.ranks[place] for place in (collectives.table(mine) != mine).nonzero()[:, 0].tolist()]
    if different:
        raise ValueError(
            f"rank {axis.ranks[axis.rank]} and ranks {different} hold different models or settings: parameter "
            "names, shapes, dtypes, optimizer, loss_scale, clip_grad, grad_accum_steps, compile_update and the order "
            "of the parameters in units must be equal on every rank"
        )


def require_own_state(state: Mapping[str, Any], own: str, rank: int) -> None:
    """Refuse a state that is a module's, another rank's, or of a layout with another fingerprint. Raises:
    ValueError.
    """
    if not {"layout", "rank"} <= set(state):
        raise ValueError(
            "load_state_dict() of the engine takes what engine.state_dict() returned; to set the module's weights from "
            "model.state_dict() call engine.load_weights(state_dict)"
        )
    if (state["layout"], state["rank"]) != (own, rank):
        raise ValueError(
            f"this state was saved by rank {state['rank']} with layout {state['layout'][:12]}, but this is rank {rank} "
            f"with layout {own[:12]}; build the engine as it was then: the same model, ranks, shard, units, "
            "bucket_size, dtype, optimizer and its groups, and kind of loss scale"
        )
