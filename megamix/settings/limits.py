"""Limits of a setting, written into its type, and the check of both in a program. In a job pydantic reads and checks
them.
"""

import math
import operator
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields
from functools import partial
from itertools import filterfalse
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

# Words for bounds. Their names are pydantic's and those of the comparisons in Python's `operator`.
_WORDS = {"gt": "greater than", "ge": "at least", "lt": "less than", "le": "at most"}
# The kind of a setting, by how its class declares it; others are not looked at.
_KINDS: dict[str, tuple[Any, str]] = {
    "bool": (bool, "True or False"), "int": (Integral, "a whole number"), "float": (Real, "a number"),
    "str": (str, "text"),
}  # fmt: skip


class Limits:
    """Annotates a type with the numbers that a setting may be; they are finite, too. Around a tuple it has a job take
    TOML's lists.
    """

    def __init__(self, *, power_of_two: bool = False, **bounds: float):
        """Keep them. `bounds`: gt, ge, lt or le."""
        self._power_of_two, self._bounds = power_of_two, bounds

    def __repr__(self) -> str:
        power = ["power_of_two=True"] if self._power_of_two else []
        return f"Limits({', '.join([f'{name}={bound:g}' for name, bound in self._bounds.items()] + power)})"

    def require(self, value: Any) -> Any:
        """Return the value. Raises: ValueError saying what it must be."""
        if not abs(value) <= sys.float_info.max:  # NaN is not, nor a whole number that no float holds
            raise ValueError("must be finite")
        for name, bound in self._bounds.items():
            if not getattr(operator, name)(value, bound):
                raise ValueError(f"must be {_WORDS[name]} {bound:g}")
        # Multiplying by a power of two moves the exponent alone. Any other scale would round every gradient once on the
        # way in and once on the way out, and the unscaled step would no longer equal the plain one. The scale and its
        # inverse must both be normal FP32 numbers, hence the range.
        if self._power_of_two and not (math.frexp(value)[0] == 0.5 and 2.0**-126 <= value <= 2.0**126):
            raise ValueError("must be a power of two from 2**-126 to 2**126")
        return value

    def __get_pydantic_core_schema__(self, source: object, handler: Callable[[object], dict[str, Any]]) -> object:
        """Return pydantic's schema of a type, a plain dictionary, with these limits."""
        schema = handler(source)
        schema |= {"strict": False} if schema["type"] == "tuple" else self._bounds
        if not self._power_of_two:
            return schema
        return {"type": "function-after", "function": {"type": "no-info", "function": self.require}, "schema": schema}


class ByUpdate(Limits):
    """Annotates a number that a program may also give as a sequence, one number for each update; later updates use the
    last. A job takes a number.
    """

    def numbers(self, value: Any) -> object:
        """Return the number, or all of them as a tuple. Raises: TypeError or ValueError saying what they must be."""
        own = partial(_own, Annotated[float, Limits(power_of_two=False, **self._bounds)])
        value = value.tolist() if getattr(value, "ndim", 0) else value  # an array of numpy or torch
        try:
            if isinstance(value, str | bytes) or not isinstance(value, Sequence):
                return own(value)
            plain = (one.item() if getattr(one, "ndim", None) == 0 else one for one in value)
            numbers = tuple(one if type(one) is float else own(one) for one in plain)
        except TypeError:
            raise TypeError("must be a number, or a sequence with one for each update") from None
        if not numbers:
            raise ValueError("must have at least one number")
        # A long run has a number for each of a million updates, so of floats only the extremes are looked at.
        for one in (min(numbers), max(numbers), *filterfalse(math.isfinite, numbers)):
            own(one)
        return numbers

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> object:
        return {"type": "float", **self._bounds}


Finite = Annotated[float, Limits()]
NotNegative = Annotated[float, Limits(ge=0)]
Share = Annotated[float, Limits(ge=0, lt=1)]
NotNegativeByUpdate = Annotated[float | Sequence[float], ByUpdate(ge=0)]
ShareByUpdate = Annotated[float | Sequence[float], ByUpdate(ge=0, lt=1)]
Count = Annotated[int, Limits(ge=1, le=10**9)]  # counters on the device are INT32, and torch wraps what is beyond
PowerOfTwo = Annotated[float, Limits(gt=0, power_of_two=True)]


def check(settings: Any, owner: str = "") -> None:
    """Check each setting of a dataclass against its types in that class and in those that it derives from. Numbers of
    other libraries become Python's own, as in a job: torch's kernels and its compiler refuse numpy's.

    Of types that are texts, as `from __future__ import annotations` makes them, bool, int, float and str are known.
    A union is looked at if it is one kind or None.
    Raises: TypeError for another kind, ValueError for a value beyond the limits, or for none of those that are listed.
    """
    for one in (known for known in fields(settings) if known.init):  # what a class works out comes later
        value = given = getattr(settings, one.name)
        try:
            for base in type(settings).__mro__:
                if declared := vars(base).get("__dataclass_fields__", {}).get(one.name):
                    value = _own(declared.type, value)
        except (TypeError, ValueError) as error:
            fix = {MISSING: "", None: "; leave it out"}.get(one.default, f"; leave it out for {one.default}")
            raise type(error)(f"{one.name} of {owner or type(settings).__name__} {error}, got {given!r}{fix}") from None
        if value is not given:
            object.__setattr__(settings, one.name, value)  # some are frozen


def _own(kind: Any, value: Any) -> Any:
    """Return a value of a type, with Python's own numbers. Raises: TypeError or ValueError saying what it must be."""
    bare, *notes = get_args(kind) if get_origin(kind) is Annotated else (kind,)
    limits = [note for note in notes if isinstance(note, Limits)]
    parts, origin = get_args(bare), get_origin(bare)
    if by_update := [limit for limit in limits if isinstance(limit, ByUpdate)]:
        return by_update[0].numbers(value)
    expected, words = _KINDS.get(getattr(bare, "__name__", bare), (object, ""))
    if origin in (Union, UnionType):
        kinds = [part for part in parts if part is not NoneType]
        return _own(kinds[0], value) if len(kinds) == 1 and value is not None else value
    if origin is Literal and value not in parts:
        raise ValueError(f"must be {' or '.join(map(repr, parts))}")
    if origin is tuple and limits:
        any_length, is_list = parts[-1] is Ellipsis, isinstance(value, Sequence) and not isinstance(value, str)
        if any_length and is_list:
            return tuple(_own(parts[0], one) for one in value)
        with suppress(TypeError):
            if is_list and len(value) == len(parts):
                return tuple(map(_own, parts, value))
        raise ValueError("must be a list" if any_length else f"must be {len(parts)} numbers")
    if not isinstance(value, expected) or (isinstance(value, bool) and expected in (Integral, Real)):
        raise TypeError(f"must be {words}")
    if expected in (Integral, Real) and type(value) not in (int, float):
        value = int(value) if isinstance(value, Integral) else float(value)
    for limit in limits:
        limit.require(value)
    return value
