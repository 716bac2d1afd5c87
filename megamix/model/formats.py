"""A family's models as Hugging Face has them: the names of tensors and of the keys in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import ValidationError

from megamix.config import DecoderConfig

Json = Mapping[str, Any]
_SHOWN = 80  # characters
LIBRARY = "any other model trains through the library, see docs/library.md"


class Location(NamedTuple):
    """Where a module's weight and bias lie: a name, `{}` for the block's number."""

    name: str
    part: int = 0  # of a tensor that holds several of our modules behind each other
    transposed: bool = False  # whether a matrix is stored (in, out)


# A module, a dim of its weight as (out, in), and the sizes of the section [model] whose product that is.
Factor = tuple[str, int, tuple[str, ...]]


@dataclass(frozen=True, eq=False, slots=True)
class Format:
    """One `model_type`. Where config.json holds more than sizes, a subclass says how it is read and written."""

    model_type: str
    architecture: str
    base: str  # what all names but the head's begin with; a folder saved without the head leaves it out
    places: Mapping[str, Location]  # by our module's name, `blocks` without its number
    size_keys: Mapping[str, str]  # config.json's name of the sizes in the section [model]
    section: type[DecoderConfig]
    factors: tuple[Factor, ...] = ()  # by which sizes are held against the tensors, before anything is built by them

    def read(self, json: Json) -> DecoderConfig:
        """Read a config.json. Raises: ValueError naming what our model does not do, or the keys that are missing."""
        config: DecoderConfig = self.config_of(json)
        return config

    def write(self, config: Any) -> dict[str, Any]:
        """Return the keys of config.json that are not every model's."""
        return self.sizes_of(dict(config))

    def allowed(self, config: Any) -> dict[str, tuple[Any, ...]]:
        """Return the values that it has, by key of the section [model]; of a key that is left out any."""
        return {}

    def config_of(self, json: Json, **values: Any) -> Any:
        """Return the section of these values and of the sizes in config.json. Raises: ValueError naming a key."""
        values["init_std"] = json.get("initializer_range", 0.02)
        values.setdefault("tie_embeddings", json.get("tie_word_embeddings", True))
        for ours, theirs in self.size_keys.items():
            if theirs not in json:
                raise ValueError(f"config.json has no {theirs}")
            values[ours] = json[theirs]
            if isinstance(values[ours], int) and values[ours] >= 2**63:
                raise ValueError(f"config.json: {theirs}: got {shown(values[ours])}: no tensor is as large")
        try:
            return self.section(**values)
        except ValidationError as error:
            raise ValueError(f"config.json: {first_problem(error, self.size_keys)}") from None

    def sizes_of(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the section's sizes by config.json's names."""
        return {theirs: values[ours] for ours, theirs in self.size_keys.items()}


def first_problem(error: ValidationError, keys: Mapping[str, str]) -> str:
    """Return the first of pydantic's complaints, in one line, by config.json's name of the key."""
    problem = error.errors()[0]
    key = ".".join(keys.get(str(name), str(name)) for name in problem["loc"])
    return f"{key}: got {shown(problem['input'])}: {problem['msg']}"


def shown(value: Any) -> str:
    """Return a value of somebody else's file in a message: one line, and no longer than one."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of more digits than Python writes"
    except RecursionError:
        return "lists within lists"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"
