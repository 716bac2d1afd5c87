"""Names of parameters, buffers and modules as in the plain model, without the parts that torch's wrappers add."""

from collections.abc import Iterable
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


def prefix_of(path: str) -> str:
    """Return the prefix of all plain names inside a module; the prefix of the whole model is empty."""
    return f"{plain}." if (plain := plain_name(path)) else ""


def by_plain_name(named: Iterable[tuple[str, _Named]]) -> dict[str, _Named]:
    """Return the named objects by their plain names, in the same order."""
    return {plain_name(name): one for name, one in named}
