"""Memory that exists only while a step needs it: buffers whose storage is resized, and parameters that raise when they
are read without values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from megamix.mixed_precision.settings import Shard


@dataclass(frozen=True, slots=True)
class Storage:
    """Says which of a bucket's buffers have memory only for a time."""

    frees_grads: bool  # gradients have memory from the first gradient to their sum; sums have it until the step ends
    frees_params: bool  # half parameters have memory while their unit computes

    @staticmethod
    def of(shard: Shard) -> Storage:
        return Storage(frees_grads=shard != "states", frees_params=shard == "parameters")


def allocate(flat: Tensor) -> None:
    """Give a buffer memory unless it has some. Fresh memory holds arbitrary values."""
    storage = flat.untyped_storage()
    if storage.nbytes() == 0:
        storage.resize_(flat.nbytes)


def free(flat: Tensor) -> bool:
    """Free a buffer's memory; return False if it stays because NumPy or another process has a view of it.

    The storage is resized, so tensors, their views and all references to them stay as they are. Until `allocate`
    nothing may make new views of them, or read them: torch would read from address 0.
    """
    storage = flat.untyped_storage()
    if not storage.resizable() or (storage.device.type == "cpu" and storage.is_shared()):
        return False
    storage.resize_(0)
    return True


# Calls that are allowed on a parameter whose values are freed.
_OF_ANY_VALUES: set[object] = {
    *(
        getattr(Tensor, name)
        for name in ("size", "dim", "numel", "stride", "storage_offset", "element_size", "is_floating_point",
                     "is_contiguous", "ndimension", "nelement", "register_hook", "requires_grad_",
                     "register_post_accumulate_grad_hook")
    ),
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "layout", "ndim", "nbytes", "itemsize", "requires_grad", "grad",
                     "grad_fn", "is_leaf", "is_meta", "is_cpu", "is_cuda", "is_sparse", "is_quantized", "_version",
                     "_backward_hooks", "_post_accumulate_grad_hooks")
    ),
    *(getattr(Tensor, name).__set__ for name in ("requires_grad", "grad")),
}  # fmt: skip


class FreedParameter(nn.Parameter):
    """The class of a parameter while its values have no memory: reading them raises, where torch would read
    address 0.
    """

    names: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # names of all such parameters, for messages

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _OF_ANY_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is Tensor.__repr__:
            return (
                f"Parameter of shape {tuple(args[0].shape)}, {args[0].dtype}, whose values lie in shards on all ranks"
            )
        param = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        is_property = getattr(func, "__name__", "") in ("__get__", "__set__")
        asked = getattr(func, "__self__", func) if is_property else func
        name = getattr(asked, "__name__", str(asked))
        if name.endswith("_") and not name.endswith("__") and isinstance(args[0], cls):  # load_state_dict, initialisers
            raise RuntimeError(
                f"{name} writes parameter {cls.names[param]}, which has no memory: to change weights call "
                "engine.load_weights(state_dict)"
            )
        raise RuntimeError(
            f"{name} reads parameter {cls.names[param]}, which has no memory: with "
            'shard = "parameters" a parameter has values only while its unit computes. A parameter that a forward also '
            "reads elsewhere must be outside of `units`, or in one unit with its reader. For other reads enter "
            "`with engine.whole_parameters():` on every rank, or take engine.full_weights()"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return FreedParameter.__torch_function__(Tensor.__reduce_ex__, (), (self,))
