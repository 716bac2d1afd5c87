"""Tensors that backward computes again instead of keeping them (`model.recompute = "selective"`).

A block keeps many tensors for backward. The outputs of its norms and of its activation function are large, and each
comes from one cheap operation whose input is kept anyway. So these outputs are computed again. Korthikanti et al. 2022
recompute the attention core; this is not needed here, because the attention keeps no scores.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from megamix.base.machine import torch_version

Recipe = Callable[[], Tensor]


def _prefer(*operation: object, **keywords: object) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


# In torch 2.11's compiler an autograd function within `checkpoint` is computed again only if a policy says so.
_POLICY: dict[str, Any] = (
    {} if torch_version() >= (2, 12) else {"context_fn": partial(create_selective_checkpoint_contexts, _prefer)}
)


class _Again:
    """A stand-in, which autograd keeps in place of a tensor and of each view of it."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.num_keepers = self.still_to_ask = 0
        self.tensor: Tensor | None = None

    def view(self, size: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
        if self.tensor is None:
            with torch.no_grad():
                self.tensor = self.recipe()
            self.still_to_ask = self.num_keepers
        view = self.tensor.as_strided(size, stride, offset)
        self.still_to_ask -= 1
        if self.still_to_ask == 0:  # all views have been asked for, such as query, key and value of one norm
            self.tensor = None
        return view


@contextmanager
def recomputed(enabled: bool, *recipes: Recipe) -> Iterator[tuple[Tensor, ...]]:
    """Yield the results of the recipes. In the block, if enabled, autograd keeps a recipe in place of its result.

    A recipe must return the same bits at each call.
    """
    if enabled and torch.compiler.is_compiling():  # the compiler gets `checkpoint`, and decides what to recompute
        yield tuple(checkpoint(recipe, use_reentrant=False, **_POLICY) for recipe in recipes)
        return
    results = tuple(recipe() for recipe in recipes)
    if not enabled:
        yield results
        return
    # The key is the storage object and not its address: meta tensors have no address (plan/activations.py).
    again = {result.untyped_storage()._cdata: _Again(recipe) for result, recipe in zip(results, recipes, strict=True)}

    def pack(x: Tensor) -> Tensor | Callable[[], Tensor]:
        stand_in = again.get(x.untyped_storage()._cdata)
        if stand_in is None:
            return x
        stand_in.num_keepers += 1
        size, stride, offset = x.size(), x.stride(), int(x.storage_offset())
        return lambda: stand_in.view(size, stride, offset)

    def unpack(kept: Tensor | Callable[[], Tensor]) -> Tensor:
        return kept if isinstance(kept, Tensor) else kept()

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield results


@contextmanager
def normed(enabled: bool, norm: nn.Module | None, x: Tensor) -> Iterator[Tensor]:
    """Yield x behind a norm, which backward computes again if enabled; without a norm yield x."""
    if norm is None:
        yield x
        return
    with recomputed(enabled, partial(norm, x)) as (result,):
        yield result
