"""Tensors that backward computes again instead of keeping them (`model.recompute = "selective"`).

Of what a block keeps, the outputs of norms and activation function are large and come from one cheap operation whose
input is kept anyway. Korthikanti et al. 2022 recompute the attention core; here it keeps no scores to begin with.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Recipe = Callable[[], Tensor]


class _Again:
    """Stands in for a tensor wherever autograd would keep it or a view of it."""

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
        if self.still_to_ask == 0:  # query, key and value have had the one input they share
            self.tensor = None
        return view


@contextmanager
def recomputed(enabled: bool, *recipes: Recipe) -> Iterator[tuple[Tensor, ...]]:
    """Give what the recipes compute; inside, autograd keeps each one in its result's place, if enabled.

    A recipe must give the same bits again.
    """
    if enabled and torch.compiler.is_compiling():  # compiled code is told, and decides by itself
        yield tuple(checkpoint(recipe, use_reentrant=False) for recipe in recipes)
        return
    results = tuple(recipe() for recipe in recipes)
    if not enabled:
        yield results
        return
    # By the storage itself and not its data's address, which tensors without memory do not have (plan/activations.py).
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
