"""A second phase: a new run that begins from the checkpoint of another one, whose model may differ from its own. Names
and shapes decide what is kept; the module imports no torch.
"""

from collections.abc import Mapping
from typing import NamedTuple

from megamix.base.names import matches
from megamix.checkpoint.manifest import AVERAGE, MASTER

Shapes = Mapping[str, tuple[int, ...]]
DRAWN = (MASTER, AVERAGE)  # states that begin with a parameter's first values; the others begin at zero


class Phase(NamedTuple):
    """Says what a new run may have otherwise than the checkpoint. Everything else must fit."""

    begin_anew: tuple[str, ...] = ()  # shell patterns of parameters and buffers that get first values
    rows: tuple[int, int] = (0, 0)  # size of the vocabulary in the checkpoint, and in the run

    def is_new(self, name: str) -> bool:
        return matches(name, self.begin_anew)

    def fitted(self, saved: Shapes, own: Shapes) -> dict[str, tuple[int, ...]]:
        """Return the checkpoint's shapes as this phase takes them: what has grown or begins anew fits."""
        fits = {*self.grown(saved, own), *filter(self.is_new, own)}
        return {name: shape for name, shape in saved.items() if not self.is_new(name)} | {it: own[it] for it in fits}

    def grown(self, saved: Shapes, own: Shapes) -> list[str]:
        """Return the parameters that have a row for each token of the vocabulary, are kept, and get more rows."""
        pairs = [(name, saved[name], own[name]) for name in own if name in saved and not self.is_new(name)]
        return [name for name, *two in pairs if two[0] < two[1] and two == [(size, *two[0][1:]) for size in self.rows]]
