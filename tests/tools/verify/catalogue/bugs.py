"""An entry of the catalogue, and the table of all."""

import inspect
from dataclasses import dataclass, field


@dataclass
class Bug:
    """One bug: where it is planted, and the first difference that `verify` has to tell."""

    name: str
    sentence: str
    met_in: str  # "": not in the table of the page
    check: str
    where: str = ""  # words in the place of the difference: a parameter, or another thing that was compared
    kind: str = ""  # words of the kind
    ranks: int = 1
    attempt: int | None = None  # None: any
    file: str = ""  # file of the class
    layout: str = ""  # layout of our engine; "" for a trainer
    job: dict[str, object] = field(default_factory=dict)  # further settings of the job
    missing: str = ""  # reason why the kind is not named, or the bug not found


BUGS = {}


def enter(name, doc, *answer, **other):
    BUGS[name] = Bug(name, " ".join((doc or "").split()), *answer, **other)


def bug(met_in, check, where="", kind="", **other):
    """Enter a trainer's class: its docstring is the bug in a sentence."""

    def of(made):
        enter(made.__name__, made.__doc__, met_in, check, where, kind, file=inspect.getfile(made), **other)
        return made

    return of


def named(bug, verdict):
    """Return whether the first difference is at the right place and of the right kind."""
    if not verdict.differences:
        return False
    first = verdict.differences[0]
    right = first.check.startswith(bug.check) and bug.where in first.where and bug.kind in first.looks_like
    return right and bug.attempt in (None, first.attempt)
