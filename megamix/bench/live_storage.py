"""Bytes of live tensor storage, and their peak: each storage counted once, on any device. torch keeps no such figure
for CPUs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveStorage(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, counts the storages that operations return or touch, until each is freed.

    Sees forward, backward and optimizer alike, but not the scratch memory inside a single operation. It slows every
    operation down, so time is never measured under it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_iter((args, kwargs, result)):
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided and leaf.device.type != "meta":
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known or not storage.nbytes():
            return
        self._known[key] = weakref.ref(storage, lambda _: self._forget(key)), storage.nbytes()
        self.live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _forget(self, key: int) -> None:
        self.live_bytes -= self._known.pop(key)[1]
