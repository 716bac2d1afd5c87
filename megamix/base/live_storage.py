"""Bytes of live tensor storage, and their peak: each storage is counted once, on any device. torch keeps no such figure
for CPUs.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_iter


class LiveStorage(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Counts, while active, the storages that operations return or touch, until each is freed.

    It sees forward, backward and optimizer alike, but not the scratch memory inside a single operation. It slows down
    every operation, so time is never measured under it. `counts_meta`: count tensors of the meta device as if they had
    memory.
    """

    def __init__(self, *, counts_meta: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._counts_meta = counts_meta
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            # A DTensor's own storage only pretends to be as large as the whole tensor. Let it call the operations on
            # its local tensors, which then come here themselves.
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for leaf in tree_iter((args, kwargs, result)):
            if not isinstance(leaf, Tensor) or leaf.layout != torch.strided:
                continue
            storage = leaf.untyped_storage()
            # A fake tensor claims to be on a CPU, but its storage is on meta. DTensor computes shapes with fake tensors
            # as large as the whole.
            if self._counts_meta or storage.device.type != "meta":
                self._count(storage)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            ref, known = self._known[key]
            if size == known:
                return
            self._known[key] = ref, size
            self.live_bytes += size - known
        elif size:
            self._known[key] = weakref.ref(storage, lambda _: self._forget(key)), size
            self.live_bytes += size
        if self.live_bytes > self.peak_bytes:
            self._recount()
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _recount(self) -> None:
        # FSDP frees a storage by resizing it to nothing, which is no operation. So a peak counts only after this look.
        for key, (ref, _) in list(self._known.items()):
            storage = ref()
            if storage is not None:
                self._known[key] = ref, storage.nbytes()
        self.live_bytes = sum(size for _, size in self._known.values())

    def _forget(self, key: int) -> None:
        self.live_bytes -= self._known.pop(key)[1]
