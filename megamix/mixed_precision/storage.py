"""Memory that is there only while a step needs it: buffers whose storage is resized, and parameters that nobody may
read while their values are gone.
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
    """Says which of a bucket's buffers come and go."""

    grads_pass: bool  # gradients from the first one to their sum, and sums to the end of the step
    params_pass: bool  # half parameters, with the unit that computes with them


STORAGE: dict[Shard, Storage] = {
    "states": Storage(grads_pass=False, params_pass=False),
    "gradients": Storage(grads_pass=True, params_pass=False),
    "parameters": Storage(grads_pass=True, params_pass=True),
}


def take(flat: Tensor) -> None:
    """Let a buffer have memory. What it holds already stays; fresh memory holds anything."""
    storage = flat.untyped_storage()
    if storage.nbytes() == 0:
        storage.resize_(flat.nbytes)


def free(flat: Tensor) -> bool:
    """Give a buffer's memory back. Its storage is resized, so that tensors, their views and whatever holds these stay
    as they are; until `take` nothing may read them, for torch would read from address 0, nor make new views of them.

    Return False where it stays, since NumPy or another process has a view of it.
    """
    storage = flat.untyped_storage()
    if not storage.resizable() or (storage.device.type == "cpu" and storage.is_shared()):
        return False
    storage.resize_(0)
    return True


# These may be asked of a parameter whose values are not there.
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
    """The class of a parameter while its values have no memory: whoever reads them is told, where torch would read
    address 0.
    """

    names: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # of all parameters that come and go, for the message

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _OF_ANY_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is Tensor.__repr__:
            return (
                f"Parameter of shape {tuple(args[0].shape)}, {args[0].dtype}, whose values are on all ranks in shards"
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
            'shard = "parameters" values are there while their unit is called. What a forward reads elsewhere, too, '
            "must be outside of `units`, or in one with its reader. Other reads: on every rank inside "
            "`with engine.whole_parameters():`, or of engine.full_weights()"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return FreedParameter.__torch_function__(Tensor.__reduce_ex__, (), (self,))
