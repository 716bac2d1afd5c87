"""Tapes of the tensors into and out of every module, forward and backward, in whatever wraps them."""

from __future__ import annotations

import warnings
from collections.abc import Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megamix.base import names

# Tensors that are recorded of one module, in this order. Each is the first of its kind in a step: the first
# micro-batch's.
INPUT, OUTPUT, OUTPUT_GRADIENT, INPUT_GRADIENT = "input", "output", "output gradient", "input gradient"
Dtypes = tuple[torch.dtype, torch.dtype]  # in which a parameter computes, and sums its gradient
Tape = dict[tuple[str, str], Tensor]  # by module and kind of tensor, in the order in which they came

# Prefixes of names in DistributedDataParallel and Lightning Fabric. The engine takes no module that they wrap.
_LOOPS = {"module", "_forward_module"}


def plain_name(name: str) -> str:
    """Return the plain model's name of a wrapped model's parameter, buffer or module."""
    return ".".join(part for part in names.plain_name(name).split(".") if part not in _LOOPS)


@contextmanager
def recorded(model: nn.Module, *, wanted: bool = True, but: Container[str] = ()) -> Iterator[Tape]:
    """Record the tensors that pass through each module, except the modules named in `but`.

    Modules inside a compiled one are not seen. `wanted`: False records nothing.
    """
    tape: Tape = {}
    # A wrapper and the module that it wraps have one name; the latter is kept.
    modules = {plain_name(name): module for name, module in model.named_modules() if wanted and name not in but}

    def note(name: str, what: str, values: Any) -> None:
        found = [value for value in tensors_in(values) if value.is_floating_point()]
        if found and (name, what) not in tape:
            tape[name, what] = found[0].detach().to("cpu", copy=True)

    def hooks(name: str, module: nn.Module) -> Iterator[Any]:
        yield module.register_forward_pre_hook(lambda module, *given: note(name, INPUT, given), with_kwargs=True)
        yield module.register_forward_hook(lambda module, args, output: note(name, OUTPUT, output))
        yield module.register_full_backward_pre_hook(lambda module, grads: note(name, OUTPUT_GRADIENT, grads))
        yield module.register_full_backward_hook(lambda module, grads, _: note(name, INPUT_GRADIENT, grads))

    with ExitStack() as handles, warnings.catch_warnings():
        for name, module in modules.items():
            for handle in hooks(name, module):
                handles.enter_context(handle)
        # of modules whose inputs have no gradient, such as tokens
        warnings.filterwarnings("ignore", "Full backward hook is firing")
        yield tape


def fsdp_params(model: nn.Module) -> Iterator[tuple[nn.Module, Any, Dtypes]]:
    """Yield each parameter that FSDP2 divides: the module that gathers it, FSDP2's object, and the dtypes in which its
    policy computes and sums.
    """
    for module in model.modules():
        state: Any = getattr(module, "_get_fsdp_state", None)  # the import of FSDP2's class takes a second
        for group in state()._fsdp_param_groups if state else ():
            for param in group.fsdp_params:
                compute = group.mp_policy.param_dtype or param.sharded_param.dtype
                yield module, param, (compute, group.mp_policy.reduce_dtype or compute)


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Yield every tensor among nested arguments or results."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, Mapping):  # of a class that tree_leaves does not know
            yield from tensors_in(dict(leaf))
        elif isinstance(leaf, tuple | list):
            yield from tensors_in([*leaf])
