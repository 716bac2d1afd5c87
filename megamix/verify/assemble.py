"""The ranks' pieces become whole tensors by name, and copies of the same element are compared on the way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megamix.verify.observe import Fragment


@dataclass(slots=True)
class Whole:
    """Tensors of the full model: FP32, by (state, parameter). `problems`: what was missing, or differed."""

    tensors: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    problems: list[tuple[str, str]] = field(default_factory=list)  # (parameter, what)

    def of(self, state: str) -> dict[str, Tensor]:
        return {name: tensor for (kind, name), tensor in self.tensors.items() if kind == state}


def assemble(ranks: Sequence[Iterable[Fragment]]) -> Whole:
    """Every element once, or alike wherever there are several copies."""
    whole = Whole()
    held: dict[tuple[str, str], Tensor] = {}
    for rank, fragments in enumerate(ranks):
        for part in fragments:
            key = part.state, part.param
            if key not in whole.tensors:
                whole.tensors[key] = torch.zeros(part.full_shape)
                held[key] = torch.zeros(part.full_shape, dtype=torch.bool)
            where = _elements(part)
            values, full, known = torch.from_numpy(part.values), whole.tensors[key].view(-1), held[key].view(-1)
            again = known[where]
            if not equal_bits(full[where][again], values[again]):
                gap = (full[where][again] - values[again]).abs().max()
                whole.problems.append((part.param, f"{part.state} of rank {rank} differs by {gap:.3g} from a copy"))
            full[where] = values
            known[where] = True
    for (state, name), known in held.items():
        if not known.all():
            whole.problems.append((name, f"{int((~known).sum())} of {known.numel()} elements of {state} have no owner"))
    return whole


def _elements(part: Fragment) -> Tensor:
    """The places of a fragment's values in the flattened full parameter: INT64 (n,)."""
    places = torch.arange(torch.Size(part.full_shape).numel()).view(part.full_shape)
    block = places[tuple(slice(low, low + size) for low, size in zip(part.offset, part.shape, strict=True))]
    return block.reshape(-1)[part.start : part.start + len(part.values)]


def equal_bits(one: Tensor, other: Tensor) -> bool:
    """FP32; NaN equals the same NaN."""
    return torch.equal(one.contiguous().view(torch.int32), other.contiguous().view(torch.int32))
