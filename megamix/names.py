"""Names of parameters, buffers and modules as the plain model has them, whatever of torch wraps its modules."""

from collections.abc import Iterable
from typing import TypeVar

_Named = TypeVar("_Named")

# Parts that torch.compile, activation checkpointing and FSDP put into the path of what they wrap.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def plain_name(name: str) -> str:
    """Return a name without the parts that wrappers have put into it, anywhere."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def prefix_of(path: str) -> str:
    """Return what the plain names of all in a module begin with, that of the whole model nothing."""
    return f"{plain}." if (plain := plain_name(path)) else ""


def by_plain_name(named: Iterable[tuple[str, _Named]]) -> dict[str, _Named]:
    """Return what has these names by its plain ones, in their order.

    Raises: ValueError if two things have one plain name.
    """
    found: dict[str, _Named] = {}
    for name, one in named:
        plain = plain_name(name)
        if found.setdefault(plain, one) is not one:
            raise ValueError(f"{name} and another one are both {plain} without what torch's wrappers put into names")
    return found
