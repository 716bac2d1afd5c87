"""Names of parameters, buffers and modules as in the plain model, without the parts that torch's wrappers add."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TypeVar

_Named = TypeVar("_Named")

# Parts that torch.compile, activation checkpointing and FSDP put into the path of the modules they wrap.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def plain_name(name: str) -> str:
    """Return a name without any part that a wrapper has put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a name matches one of these shell patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def first_few(names: Sequence[str], most: int = 8) -> str:
    """Return the first names of many, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def prefix_of(path: str) -> str:
    """Return the prefix of all plain names inside a module; the prefix of the whole model is empty."""
    return f"{plain}." if (plain := plain_name(path)) else ""


def by_plain_name(named: Iterable[tuple[str, _Named]]) -> dict[str, _Named]:
    """Return the named objects by their plain names, in the same order.

    Raises: ValueError if two different objects have one plain name.
    """
    found: dict[str, _Named] = {}
    for name, one in named:
        plain = plain_name(name)
        if found.setdefault(plain, one) is not one:
            raise ValueError(f"{name} and another one are both {plain} without what torch's wrappers put into names")
    return found
