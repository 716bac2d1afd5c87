"""The tensors that the optimizer updates for each parameter, and the dtypes that DDP and FSDP2 declare."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from megamix.tools.audit.facts import ALL, NOWHERE, UNKNOWN, Facts, ParamFacts, dtype_name, local
from megamix.tools.verify.core.tape import fsdp_params, tensors_in

_INSIDE = ("optim", "optimizer", "_optimizer", "base_optimizer")
_HOOKS = {"fp16_compress_hook": torch.float16, "bf16_compress_hook": torch.bfloat16, "allreduce_hook": None}


def held_by(*optimizers: Optimizer) -> list[nn.Parameter]:
    """Return the tensors that optimizers update, in the order of their groups."""
    return [param for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]]


def innermost(optimizer: object) -> Optimizer:
    """Return the optimizer whose step updates, inside `ZeroRedundancyOptimizer`, accelerate's and others' wrappers.

    Raises: TypeError for an object that is no optimizer.
    """
    inner = (getattr(optimizer, name, None) for name in _INSIDE)
    if (found := next((one for one in inner if isinstance(one, Optimizer)), None)) is not None:
        return innermost(found)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"audit takes a torch.optim.Optimizer or a megamix.ShardedEngine, got {type(optimizer).__name__}; give the "
            "optimizer whose step() your loop calls"
        )
    return optimizer


def find_masters(optimizer: Optimizer, facts: Facts) -> dict[Tensor, ParamFacts]:
    """Return the facts of each tensor that the optimizer updates, which is a parameter or a copy that rounds to it."""
    held = held_by(innermost(optimizer))
    masters: dict[Tensor, ParamFacts] = {param: facts[param] for param in held if param in facts}
    missing = {param: one for param, one in facts.items() if one.trains and param not in masters}
    copies = dict[Tensor, ParamFacts]()
    for copy in (tensor for tensor in held if tensor not in masters):
        alike = (param for param in missing if copy.shape == param.shape)
        param = next((one for one in alike if torch.equal(local(copy).to(one.dtype), local(one))), None)
        if param is not None:
            copies[copy] = missing.pop(param)
    saved = {local(tensor).data_ptr() for tensor in tensors_in(optimizer.state_dict() if copies else {})}
    for master, one in copies.items():
        one.count(unsaved=local(master).data_ptr() not in saved)
    for master, one in (masters | copies).items():
        one.dtypes["master"] = dtype_name(master.dtype)
        one.count(held=1)
    return masters | copies


def is_compiled(module: nn.Module) -> bool:
    """Return whether torch.compile has this module: a hook inside it would have it compiled anew."""
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"


@contextmanager
def wires_told(model: nn.Module, facts: Facts, reduced: Collection[torch.dtype]) -> Iterator[None]:
    """Note the dtypes in which DDP and FSDP2 say that they compute and send.

    After the step, a wire whose dtype DDP's hook hides gets the dtype that the ranks were seen to sum, if it is only
    one. DDP's own declaration counts only if the ranks were seen to sum something. A parameter without a wrapper has
    an unknown wire if they were.
    `reduced`: the dtypes that the ranks were seen to sum.
    """
    for ddp in model.modules():
        if isinstance(ddp, DistributedDataParallel):
            hook = getattr(ddp._comm_hooks[0][0], "__qualname__", "") if ddp._comm_hooks else "allreduce_hook"
            ranks = ", ".join(map(str, dist.get_process_group_ranks(ddp.process_group)))
            for name, param in ddp.module.named_parameters():
                if param in facts and param.requires_grad and name not in ddp.parameters_to_ignore:
                    sent = (ddp.mixed_precision and ddp.mixed_precision.reduce_dtype) or _HOOKS.get(hook) or param.dtype
                    facts[param].dtypes["wire"] = dtype_name(sent) if hook in _HOOKS else UNKNOWN
                    facts[param].weight_sums = {ranks if hook in _HOOKS else ALL: []}
    for _, gathered, dtypes in fsdp_params(model):
        if (param := gathered.sharded_param) in facts:
            facts[param].dtypes |= zip(("compute", "wire"), map(dtype_name, dtypes), strict=True)
    yield
    seen = " and ".join(sorted(map(dtype_name, reduced)))
    for one in facts.values():
        unsent = ALL not in one.weight_sums and not reduced  # a wrapper should have averaged them
        wire = UNKNOWN if unsent else one.dtypes["wire"]
        if wire == UNKNOWN and len(reduced) == 1:
            wire = seen
        elif wire == UNKNOWN or (wire == NOWHERE and seen and one.trains):
            wire = f"{UNKNOWN} the ranks summed {seen or 'nothing that was seen'}, and nothing says what of it"
        one.dtypes |= {"wire": wire, "sum": one.dtypes["sum"] if wire == NOWHERE else wire}
