"""The section [data]: which tokens a run reads, mixed and packed how (docs/data.md)."""

import math
import os
from collections.abc import Sequence
from fractions import Fraction
from typing import Annotated, Literal, Self, cast

from pydantic import AfterValidator, BeforeValidator, Field, PositiveFloat, PositiveInt, model_validator

from megamix.config.fields import Section, Text

# Samples after which a blend repeats: its order is worked out for so many when a run starts, in under a second.
MOST_SAMPLES = 1_000_000


class DataSource(Section):
    """What samples are taken from: token files, or a made-up chain of tokens."""

    path: Annotated[Text | None, Field(examples=["runs/data/train"])] = None
    """Prefix of the tokens: PREFIX.bin and PREFIX.idx."""
    markov: Annotated[PositiveInt | None, Field(examples=[4])] = None
    """In place of path: each token is followed by one of so many, all equally likely. No loss goes below ln(markov)."""
    weight: Annotated[PositiveFloat | None, Field(examples=[1.0])] = None
    """Share of the samples, on any scale. Not set for all: the files are read as one corpus, by their tokens."""

    @model_validator(mode="after")
    def _is_one_of_two(self) -> Self:
        if (self.path is None) == (self.markov is None):
            raise ValueError("must have either path or markov")
        return self

    @property
    def name(self) -> str | int:
        """What it is, weight aside: equal for two spellings of one path."""
        return os.path.normpath(self.path) if self.path is not None else cast(int, self.markov)


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """The smallest whole numbers in the same proportions, of the weights as they are written: 0.1 is a tenth."""
    exact = [Fraction(repr(weight)) for weight in weights]
    unit = Fraction(math.gcd(*(weight.numerator for weight in exact)), math.lcm(*(w.denominator for w in exact)))
    # That unit divides all of them: the greatest common divisor of fractions in lowest terms.
    return tuple(int(weight / unit) for weight in exact)


def _as_list(value: object) -> object:
    """One prefix stands for the list with it alone."""
    if value == "":
        raise ValueError("must not be empty")
    if not isinstance(value, str | list | tuple):
        raise ValueError("must be text in quotes, or a list of tables")
    return [{"path": value}] if isinstance(value, str) else value


def _check_sources(sources: tuple[DataSource, ...]) -> tuple[DataSource, ...]:
    if not sources:
        raise ValueError("must not be empty")
    weights = [source.weight for source in sources if source.weight is not None]
    if weights and len(weights) < len(sources):
        raise ValueError("must have a weight in every table, or in none")
    if not weights and len(sources) > 1 and any(source.path is None for source in sources):
        raise ValueError("must have weights, because markov has no end")
    if len({source.name for source in sources}) < len(sources):
        raise ValueError("must have each path and each markov once, with the sum of its weights")
    if weights and sum(whole := whole_weights(weights)) > MOST_SAMPLES:
        room = MOST_SAMPLES - len(sources)
        near = whole_weights([float(max(1, weight * room // sum(whole))) for weight in whole])
        raise ValueError(
            f"must have weights that are whole multiples of a {MOST_SAMPLES:,}th of their sum, "
            f"such as {', '.join(map(str, near))}"
        )
    return sources


Sources = Annotated[
    tuple[DataSource, ...],
    BeforeValidator(_as_list, json_schema_input_type=str | list[DataSource]),
    AfterValidator(_check_sources),
    Field(strict=False, examples=["runs/data/train"]),
]


class DataStage(Section):
    """Another mixture from some sample on."""

    from_sample: Annotated[PositiveInt, Field(examples=[100000])]
    """Number of its first sample: so many sequences the run has read before it."""
    train: Sources
    """As data.train."""


def _check_stages(stages: tuple[DataStage, ...]) -> tuple[DataStage, ...]:
    starts = [stage.from_sample for stage in stages]
    if starts != sorted(set(starts)):
        raise ValueError("must have a larger from_sample in each table than in the one before")
    return stages


class DataConfig(Section):
    """Token files; paths are relative to the folder the command is started in."""

    train: Sources
    """Prefix of the training tokens, PREFIX.bin and PREFIX.idx; or a list of tables, mixed by weight."""
    stages: Annotated[
        tuple[DataStage, ...],
        AfterValidator(_check_stages),
        Field(strict=False, examples=[[{"from_sample": 100000, "train": "runs/data/train"}]]),
    ] = ()
    """What takes the place of train later in the run. Empty: nothing."""
    valid: Sources | None = None
    """The validation tokens, likewise. Not set: no validation, unless split is set."""
    split: Annotated[tuple[PositiveFloat, PositiveFloat] | None, Field(strict=False, examples=[[95, 5]])] = None
    """Shares of each file's documents for training and for validation, on any scale. Not set: train has all."""
    packing: Literal["none", "documents"] = "none"
    """none: a sequence runs on from one document into the next. documents: attention stays within a document,
    positions restart with each, and its first token is not predicted."""
    tokenizer: Text | None = None
    """A tokenizer.json, needed for the sample of text at the end of a run. Not set: no sample."""
