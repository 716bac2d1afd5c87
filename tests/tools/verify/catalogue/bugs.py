"""An entry of the catalogue, and the table of all."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T", bound=type)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """One bug: where it is planted, and the first difference that `verify` has to tell."""

    name: str
    sentence: str
    met_in: str
    file: str  # file of the class; "" for a bug in our engine
    ranks: int
    check: str
    where: str = ""  # words in the place of the difference: a parameter, or another thing that was compared
    kind: str = ""  # words of the kind
    missing: str = ""  # reason why the kind is not named, or the bug not found
    layout: str = ""  # layout of our engine
    job: Mapping[str, object] = field(default_factory=dict)  # further settings of the job
    overflow_at: int | None = None
    fast: bool = False  # True: always in CI


BUGS = {}


def bug(met_in, check, where="", kind="", *, ranks=1, **other):
    """Enter a trainer's class: its docstring is the bug in a sentence."""

    def enter(made):
        sentence = " ".join((made.__doc__ or "").split())
        file = inspect.getfile(made)
        BUGS[made.__name__] = Bug(
            name=made.__name__, sentence=sentence, met_in=met_in, file=file, ranks=ranks, check=check, where=where,
            kind=kind, **other,
        )  # fmt: skip
        return made

    return enter
