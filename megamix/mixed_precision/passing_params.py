"""Half parameters whose memory comes and goes. While it is gone, whoever reads one is told so."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from megamix.comm.collectives import Collectives
from megamix.mixed_precision.flat_buffers import PassingBuffers
from megamix.mixed_precision.flat_layout import FlatLayout
from megamix.mixed_precision.half_params import HalfParams

log = logging.getLogger("megamix")

# What may be asked of a parameter whose values are not there.
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


_names: MutableMapping[Tensor, str] = WeakTensorKeyDictionary()  # for who reads one that is freed


class FreedParameter(nn.Parameter):
    """The class of a parameter while its values have no memory: whoever reads them is told, where torch would read
    address 0.
    """

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
                f"{name} writes parameter {_names.get(param)}, which has no memory: to change weights call "
                "engine.load_weights(state_dict)"
            )
        raise RuntimeError(
            f"{name} reads parameter {_names.get(param)}, which has no memory: with "
            'shard = "parameters" values are there while their unit is called. What a forward reads elsewhere, too, '
            "must be outside of `units`, or in one with its reader. Other reads: on every rank inside "
            "`with engine.whole_parameters():`, or of engine.full_weights()"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return FreedParameter.__torch_function__(Tensor.__reduce_ex__, (), (self,))


def warn_of_rest(layout: FlatLayout, units: Sequence[str]) -> None:
    """Log how much of the model is in no unit, by the units' paths, if that is over a quarter. What has several names,
    as a tied table, can be in none.
    """
    specs = [slot.spec for bucket in layout.buckets for slot in bucket.slots]
    inside = tuple(f"{unit}." for unit in units)
    rest = [spec for spec in specs if not (spec.aliases or spec.name.startswith(inside))]
    left, whole = (sum(spec.numel for spec in some) for some in (rest, specs))
    if left > whole / 4:
        log.warning(
            'shard = "parameters": %d of %d parameters, such as %s, are in none of `units`, so every rank holds them '
            "from a forward to the end of its backward. Let the modules that hold them be units, too; what is read "
            "outside of its module, as a tied table, cannot be",
            left, whole, rest[-1].name,
        )  # fmt: skip


class PassingHalfParams(HalfParams):
    """Half parameters of which nothing is kept: a gather casts the masters. Those of `flat[k]` come with `take`, may be
    read by all after `show`, and go with `free`.
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._buffers = PassingBuffers()
        self._buffers.flat = self.flat
        _names.update((param, name) for name, param in self.params.items())
        # With each one's own class, which may be a subclass.
        self._by_bucket = [
            [(self.params[slot.spec.name], type(self.params[slot.spec.name])) for slot in bucket.slots]
            for bucket in self.layout.buckets
        ]

    def install(self, full: Tensor, among: Collectives) -> None:
        super().install(full, among)
        self.free(len(self.flat) - 1)

    def copies(self) -> list[Tensor]:
        return []

    def put(self, bucket: int, full: Tensor) -> None:
        """Do nothing: the next gather casts the masters."""

    def take(self, bucket: int) -> None:
        self._buffers.take(bucket)

    def show(self, bucket: int) -> None:
        """Let everybody read the bucket's parameters, which are there."""
        for param, own_class in self._by_bucket[bucket]:
            param.__class__ = own_class

    def refuse_views(self, buckets: Iterable[int], unit: str, given: Iterable[Tensor]) -> None:
        """Raises: RuntimeError if a unit has given a parameter of its buckets or a view of one."""
        own = {self.flat[bucket].untyped_storage()._cdata for bucket in buckets}
        for tensor in given:
            if tensor.layout == torch.strided and tensor.untyped_storage()._cdata in own:
                raise RuntimeError(
                    f"{unit} returns a parameter or a view of one, which has no memory after its forward: return a "
                    "copy, as tensor.clone(), or leave it out of `units`"
                )

    def free(self, bucket: int) -> None:
        """Let nobody read them any more, and give their memory back."""
        for param, _ in self._by_bucket[bucket]:
            param.__class__ = FreedParameter
        self._buffers.free(bucket)
