"""JSON that is checked when read: no unknown field, no other type, no number that another reader would not have."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Count = Annotated[int, Field(ge=0, le=2**53)]  # JSON's numbers are exact up to here in every reader
_SHOWN = 5  # problems, of a text that may have thousands


class Record(BaseModel):
    """Base of what is kept as JSON."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Raises: ValueError naming the fields."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            problems = error.errors()[:_SHOWN]
            where = [f"{'.'.join(map(str, problem['loc'])) or 'the text'}: {problem['msg']}" for problem in problems]
            raise ValueError("; ".join(where)) from None
