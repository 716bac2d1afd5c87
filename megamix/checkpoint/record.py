"""JSON that is checked when read: no unknown field, no other type, no number that another reader would not have."""

from __future__ import annotations

import json
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Count = Annotated[int, Field(ge=0, le=2**53)]  # JSON's numbers are exact up to here in every reader
_SHOWN = 5  # problems, of a text that may have thousands
_LONGEST = 500  # characters of a line that says what is wrong


def printable(text: str, longest: int = _LONGEST) -> str:
    """Return one line of a text that may hold anything: what would move a terminal's cursor is escaped, the end cut."""
    shown = text if len(text) <= longest else text[:longest] + "..."
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in shown)


class Record(BaseModel):
    """Base of what is kept as JSON."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Raises: ValueError naming the fields."""
        try:
            record = cls.model_validate_json(text)
        except ValidationError as error:
            problems = error.errors()[:_SHOWN]
            where = [f"{'.'.join(map(str, problem['loc'])) or 'the text'}: {problem['msg']}" for problem in problems]
            raise ValueError("; ".join(where)) from None
        json.loads(text, object_pairs_hook=_each_once)  # of a field that is there twice, readers take this or that one
        return record


def _each_once(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises: ValueError naming a field that is there twice."""
    once = dict(fields)
    if len(once) < len(fields):
        names = [name for name, _ in fields]
        raise ValueError(f"{next(name for name in once if names.count(name) > 1)}: the field is there twice")
    return once
