"""Sources of samples built from [data], and problems of the files that they read. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from megamix.config import Config, DataSource, data_parallel_size, grad_accum_steps, whole_weights
from megamix.config.model_and_data import SPLIT_SET
from megamix.data.prepare import MANIFEST_NAME
from megamix.data.sampler import BlendStage, mix64
from megamix.data.source import BlendedSource, MarkovSource, SampleSource, TokenFileSource, TokenSpan, split
from megamix.data.steady_file import DataError, file_fingerprint, file_identity
from megamix.data.token_file import TokenFile, bin_path, idx_path, token_file_fingerprint, token_file_problems
from megamix.data.tokenizer import open_tokenizer
from megamix.plugins import SOURCES

Sources = tuple[DataSource, ...]
_Names = tuple[str | int, ...]


class _Seeds(NamedTuple):
    order: int  # seed of the order of a file's windows
    made_up: int  # seed of a Markov chain's samples, and of a plugin's source

    def of(self, number: int) -> _Seeds:
        """Return the seeds of source `number` of a mixture.

        One seed for all sources would read files of equal length in the same order.
        """
        if not number:
            return self
        return _Seeds(*(int(mix64(np.uint64(seed), np.array([number], np.uint64))[0]) for seed in self))


# Every validation of every run reads the same samples, whatever training's seed is. No TOML integer reaches the second
# seed, so training never uses it.
_VALIDATION_SEEDS = _Seeds(0, 2**64 - 1)
_VALID = "data.valid"  # begins the keys of all its sets


def training_source(config: Config) -> SampleSource:
    """Return the source that a run trains on, from its first sample to its last.

    Raises: ValueError if a file cannot be read, or a part of one has no window.
    """
    stages = [(0, config.data.train), *((stage.from_sample, stage.train) for stage in config.data.stages)]
    return _mixed(config, stages, _Seeds(config.training.seed, config.training.seed), part=0)


def epochs(config: Config, samples: int) -> Iterator[tuple[float, int, str]]:
    """Yield how often the first samples of training read each corpus of token files, its tokens, and its name.

    Raises: as `training_source`.
    """
    source = training_source(config)
    for part, count in source.parts(samples) if isinstance(source, BlendedSource) else [(source, samples)]:
        if isinstance(part, TokenFileSource):
            yield count / part.num_windows, part.num_tokens, part.name


def plugin_source(config: Config) -> SampleSource | None:
    """Return the first training source that a plugin has registered, or None."""
    made = (_registered(config, source, config.training.seed) for source in config.data.train)
    return next((one for one in made if one is not None), None)


def validation_sources(config: Config) -> dict[str, SampleSource]:
    """Return the sources that a run is validated on, by the names of their sets; "" names a set alone.

    Raises: ValueError, as `training_source`.
    """
    sets = config.data.valid or {}
    found = {name: _mixed(config, [(0, sources)], _VALIDATION_SEEDS, part=None) for name, sources in sets.items()}
    if config.data.split is not None:
        found[SPLIT_SET if sets else ""] = _mixed(config, [(0, config.data.train)], _VALIDATION_SEEDS, part=1)
    return found


def token_prefixes(config: Config) -> dict[str, str]:
    """Return the prefix of every token file of the run, by the key that names the file."""
    return {field: source.path for field, source in _entries(config) if source.path is not None}


def data_fingerprints(config: Config) -> dict[str, str]:
    """Return the fingerprints of the tokenizer and of all data, by key. Reads up to 64 MiB of each file."""
    found = {field: token_file_fingerprint(Path(prefix)) for field, prefix in token_prefixes(config).items()}
    for field, source in _entries(config):
        if (made := _registered(config, source, _VALIDATION_SEEDS.order)) is not None:
            found[field] = hashlib.sha256(made.fingerprint.encode()).hexdigest()
    if config.data.tokenizer is not None:
        found["data.tokenizer"] = file_fingerprint(Path(config.data.tokenizer))
    return found


def data_identity(config: Config) -> str:
    """Return a text that is equal for equal files on one machine.

    Only one of the ranks with equal texts has to take the fingerprints.
    """
    files = {field: [bin_path(Path(path)), idx_path(Path(path))] for field, path in token_prefixes(config).items()}
    if config.data.tokenizer is not None:
        files["data.tokenizer"] = [Path(config.data.tokenizer)]
    known = {field: [file_identity(path) for path in paths] for field, paths in files.items()}
    return json.dumps([platform.node(), known], sort_keys=True)


def check_unchanged(config: Config, identity: str) -> None:
    """Check that the files open by now are those that `data_identity` saw before their fingerprints were taken.

    Raises: DataError naming the key of a changed file; OSError for a missing file.
    """
    then, now = (json.loads(text)[1] for text in (identity, data_identity(config)))
    for field, files in then.items():
        if now[field] != files:
            raise DataError(f"{field}: its file was replaced or changed while the run started; start again")


def data_problems(config: Config) -> list[str]:
    """Return the reasons why a job must not start on this data, one line each; empty if there are none."""
    fields: dict[str, str] = {}  # one key per file: a file may be named twice
    for field, prefix in token_prefixes(config).items():
        fields.setdefault(prefix, field)
    problems = [it for prefix, field in fields.items() for it in token_file_problems(field, prefix, **_sizes(config))]
    if config.data.split is not None and not problems:
        divided = {prefix: field for prefix, field in fields.items() if not field.startswith(_VALID)}
        problems = [problem for prefix, field in divided.items() for problem in _split_problems(config, field, prefix)]
    return [*problems, *_source_problems(config), *_stage_problems(config)]


def data_warnings(config: Config, world_size: int) -> Iterator[str]:
    """Yield a line for each setting that trains but is rarely intended.

    The settings are a static loss scale, accumulation by the owner, and a vocabulary or tokenizer other than those that
    `megamix prepare` noted.
    """
    scale: Any = config.precision.loss_scale
    if config.precision.dtype == "fp16" and scale.rule == "static" and scale.init_scale > 2**16:
        yield (
            f'precision.loss_scale.init_scale: {scale.init_scale:.0f} never falls with rule = "static", and FP16 '
            'ends at 65504: every step may overflow and be skipped; write init_scale = 1024.0, or rule = "dynamic"'
        )
    if config.parallelism.accumulate == "owner":
        if grad_accum_steps(config, data_parallel_size(config, world_size)) == 1:
            yield 'parallelism.accumulate: "owner" does nothing with one micro-batch a step; write accumulate = "local"'
        elif config.parallelism.shard == "states":
            yield (
                'parallelism.accumulate: with shard = "states" every rank keeps its gradients, and "owner" comes on '
                "top, with FP32 sums and a reduction of each micro-batch; "
                'write accumulate = "local", or shard = "gradients"'
            )
    size, own = config.model.vocab_size, config.data.tokenizer
    for folder, field in {Path(path).parent: field for field, path in token_prefixes(config).items()}.items():
        try:
            manifest = (folder / MANIFEST_NAME).read_text(encoding="utf-8")
            noted = json.loads(manifest)
            known, begin = int(noted["vocab_size"]), noted.get("begin", [])
            begins = [*open_tokenizer(Path(own)).begin] if own else begin
        except (OSError, ValueError, LookupError, TypeError):
            continue  # no manifest of `megamix prepare`, or no package that opens the tokenizer
        if size > known * 9 // 8 + 128:
            fix = f"rows beyond are never trained; write vocab_size = {-(-known // 128) * 128}"
            yield f"model.vocab_size: {size}, but {field} was prepared with {known} tokens, and {fix}"
        # The manifest has the checksums of its tokenizer's file and of the file that the tokenizer was made from.
        is_other = own is not None and file_fingerprint(Path(own)) not in manifest
        if is_other or begins != begin:
            why = "is not the one that" if is_other else "begins a text otherwise than"
            fix = f"write the one in {folder}, or prepare again{' with --begin-token' if begins else ''}"
            yield f"data.tokenizer: {own} {why} {field} was prepared with; {fix}"


def _lists(config: Config) -> Iterator[tuple[str, Sources]]:
    """Yield every list of sources with its key; those of validation, if there are any, come last."""
    yield "data.train", config.data.train
    for number, stage in enumerate(config.data.stages):
        yield f"data.stages[{number}].train", stage.train
    for name, sources in (config.data.valid or {}).items():
        yield f"{_VALID}.{name}".rstrip("."), sources


def _entries(config: Config) -> Iterator[tuple[str, DataSource]]:
    for name, sources in _lists(config):
        for number, source in enumerate(sources):
            yield name if len(sources) == 1 else f"{name}[{number}]", source


def _split_problems(config: Config, field: str, prefix: str) -> Iterator[str]:
    for name, stretch in zip(("training", "validation"), _parts(config, prefix), strict=True):
        if stretch.windows(config.model.seq_len, packed=False) < 1:
            yield (
                f"data.split: leaves {stretch.stop - stretch.start} tokens of {field} = {prefix!r} for {name}, fewer "
                f"than one sample of model.seq_len + 1 = {config.model.seq_len + 1}; write another share, or valid"
            )


def _source_problems(config: Config) -> Iterator[str]:
    vocab_size = config.model.vocab_size
    for field, source in _entries(config):
        if source.markov is not None and source.markov > vocab_size:
            yield (
                f"{field}: got markov = {source.markov}, more successors than model.vocab_size = {vocab_size} tokens; "
                f"write markov = {min(4, vocab_size)}, or at most {vocab_size}"
            )
        try:
            made = _registered(config, source, _VALIDATION_SEEDS.order)
        except ValueError as error:
            yield f"{field}: {error}"
            continue
        if made is not None and config.data.split is not None and not field.startswith(_VALID):
            yield (
                f"data.split: divides token files by their documents, and {field} is a source of its own; leave split "
                "out, and write what to validate on as data.valid"
            )


def _stage_problems(config: Config) -> Iterator[str]:
    """Yield a line for each file that two corpora share.

    A file in two corpora has two orders: the later corpus would read samples again that the earlier one has read.
    """
    corpora: dict[str | int, tuple[str, _Names]] = {}  # by file: its first list, and its corpus in that list
    for field, sources in _lists(config):
        for entry, _ in () if field.startswith(_VALID) else shares(sources):
            names = _names(entry)
            known = {name: corpora.setdefault(name, (field, names)) for name in names}
            for name in [name for name in names if known[name][1] != names][:1]:
                yield (
                    f"{field}: reads {str(name)!r} as part of another corpus than {known[name][0]} does, so its "
                    "samples would be read again; write the same list in both, or a weight for every file of both"
                )


def _mixed(config: Config, stages: list[tuple[int, Sources]], seeds: _Seeds, part: int | None) -> SampleSource:
    """Return one source for all stages. A source that several stages name goes on where it was.

    `part`: the part of data.split to read; None: files that it does not divide.
    """
    known = {_names(entry): entry for _, sources in stages for entry, _ in shares(sources)}  # in order of first use
    built = [_source(config, entry, seeds.of(number), part) for number, entry in enumerate(known.values())]
    if len(built) == 1:
        return built[0]
    mixtures = [(start, {_names(entry): weight for entry, weight in shares(sources)}) for start, sources in stages]
    blend = [BlendStage(start, tuple(weights.get(names, 0) for names in known)) for start, weights in mixtures]
    return BlendedSource(built, blend, packed=config.data.packing == "documents")


def shares(sources: Sources) -> list[tuple[Sources, int]]:
    """Return the sources to mix, each with its whole-number share. Files without weights are one corpus."""
    if sources[0].weight is None:
        return [(sources, 1)]
    weights = whole_weights([source.weight for source in sources if source.weight is not None])
    return [((source,), weight) for source, weight in zip(sources, weights, strict=True)]


def _names(entry: Sources) -> _Names:
    return tuple(source.name for source in entry)


def _registered(config: Config, source: DataSource, seed: int) -> Any:
    """Return the source that a plugin builds for an entry with the plugin's key, or None for other entries."""
    for name, build in SOURCES.registered.items():
        if (keys := getattr(source, name, None)) is not None:
            return build(**dict(keys), **_sizes(config), seed=seed)
    return None


def _source(config: Config, entry: Sources, seeds: _Seeds, part: int | None) -> SampleSource:
    if (made := _registered(config, entry[0], seeds.made_up)) is not None:
        return cast(SampleSource, made)
    if entry[0].markov is not None:
        return MarkovSource(**_sizes(config), branching=entry[0].markov, seed=seeds.made_up)
    prefixes = [source.path for source in entry if source.path is not None]
    stretches = [_whole(path) if part is None else _parts(config, path)[part] for path in prefixes]
    packed = config.data.packing == "documents"
    return TokenFileSource(stretches, **_sizes(config), seed=seeds.order, packed=packed)


def _sizes(config: Config) -> dict[str, int]:
    """Return the sizes that every source and every check of a file takes by name."""
    return {"seq_len": config.model.seq_len, "vocab_size": config.model.vocab_size}


def _parts(config: Config, prefix: str) -> tuple[TokenSpan, ...]:
    if config.data.split is None:
        return (_whole(prefix),)
    for_training, for_validation = config.data.split
    return split(TokenFile(Path(prefix)), for_training / (for_training + for_validation))


def _whole(prefix: str) -> TokenSpan:
    return TokenSpan.whole(TokenFile(Path(prefix)))
