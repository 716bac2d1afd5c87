"""From [data] to the sources it describes, and what can be wrong with the files they read. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megamix.config import Config, DataSource, whole_weights
from megamix.data.blend import Stage
from megamix.data.source import BlendedSource, SampleSource, Stretch, TokenFileSource, split
from megamix.data.synthetic import MarkovSource
from megamix.data.token_file import TokenFile, token_file_problems

# Seed of the order of validation samples: the same samples at every validation of every run, whatever training's
# seed is.
VALIDATION_SEED = 0

Sources = tuple[DataSource, ...]


def training_source(config: Config) -> SampleSource:
    """What a run trains on, from its first sample to its last.

    Raises: ValueError if a file cannot be read, or a part of one has no window.
    """
    stages = [(0, config.data.train), *((stage.from_sample, stage.train) for stage in config.data.stages)]
    return _mixed(config, stages, config.training.seed, part=0)


def validation_source(config: Config) -> SampleSource | None:
    """None where the run has no validation.

    Raises: ValueError, as `training_source`.
    """
    if config.data.split is not None:
        return _mixed(config, [(0, config.data.train)], VALIDATION_SEED, part=1)
    if config.data.valid is not None:
        return _mixed(config, [(0, config.data.valid)], VALIDATION_SEED, part=0)
    return None


def token_prefixes(config: Config) -> dict[str, str]:
    """Every token file of the run: the key that names it, and its prefix."""
    lists = [("data.train", config.data.train)]
    lists += [(f"data.stages[{number}].train", stage.train) for number, stage in enumerate(config.data.stages)]
    lists += [("data.valid", config.data.valid)] if config.data.valid is not None else []
    return {field: path for name, sources in lists for field, path in _paths(name, sources)}


def data_problems(config: Config) -> list[str]:
    """Why a job must not start on this data, a line each; empty if nothing is wrong."""
    fields: dict[str, str] = {}  # each file once
    for field, prefix in token_prefixes(config).items():
        fields.setdefault(prefix, field)
    sizes = {"vocab_size": config.model.vocab_size, "seq_len": config.model.seq_len}
    problems = [problem for prefix, field in fields.items() for problem in token_file_problems(field, prefix, **sizes)]
    if config.data.split is not None and not problems:
        problems = [problem for prefix, field in fields.items() for problem in _split_problems(config, field, prefix)]
    return problems


def _paths(name: str, sources: Sources) -> Iterator[tuple[str, str]]:
    for number, source in enumerate(sources):
        if source.path is not None:
            yield name if len(sources) == 1 else f"{name}[{number}]", source.path


def _split_problems(config: Config, field: str, prefix: str) -> Iterator[str]:
    for name, stretch in zip(("training", "validation"), _parts(config, prefix), strict=True):
        if stretch.windows(config.model.seq_len, packed=False) < 1:
            yield (
                f"data.split: leaves {stretch.stop - stretch.start} tokens of {field} = {prefix!r} for {name}, fewer "
                f"than one sample of model.seq_len + 1 = {config.model.seq_len + 1}; write another share, or valid"
            )


def _mixed(config: Config, stages: list[tuple[int, Sources]], seed: int, part: int) -> SampleSource:
    """One source for all stages; one that is in several of them goes on where it was."""
    known: list[Sources] = []  # distinct, each without its weight
    mixtures = []
    for from_sample, sources in stages:
        weights = {}
        for entry, weight in shares(sources):
            if entry not in known:
                known.append(entry)
            weights[known.index(entry)] = weight
        mixtures.append((from_sample, weights))
    built = [_source(config, entry, seed, part) for entry in known]
    if len(built) == 1:
        return built[0]
    places = range(len(built))
    blend = [Stage(start, tuple(weights.get(place, 0) for place in places)) for start, weights in mixtures]
    return BlendedSource(built, blend, packed=config.data.packing == "documents")


def shares(sources: Sources) -> list[tuple[Sources, int]]:
    """What is mixed, and in which whole numbers. Files without weights are one corpus."""
    if sources[0].weight is None:
        return [(sources, 1)]
    weights = whole_weights([source.weight for source in sources if source.weight is not None])
    return [
        ((source.model_copy(update={"weight": None}),), weight) for source, weight in zip(sources, weights, strict=True)
    ]


def _source(config: Config, entry: Sources, seed: int, part: int) -> SampleSource:
    seq_len = config.model.seq_len
    if entry[0].markov is not None:
        return MarkovSource(
            vocab_size=config.model.vocab_size, seq_len=seq_len, branching=entry[0].markov, seed=seed
        )  # fmt: skip
    stretches = [_parts(config, source.path)[part] for source in entry if source.path is not None]
    return TokenFileSource(stretches, seq_len=seq_len, seed=seed, packed=config.data.packing == "documents")


def _parts(config: Config, prefix: str) -> tuple[Stretch, ...]:
    file = TokenFile(Path(prefix))
    if config.data.split is None:
        return (Stretch.whole(file),)
    for_training, for_validation = config.data.split
    return split(file, for_training / (for_training + for_validation))
