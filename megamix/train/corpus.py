"""The corpus of a run: its sources of samples, what identifies their files, and what is wrong with them. Imports no
torch.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from megamix.config import DataSource, DecoderConfig, whole_weights
from megamix.config.model_and_data import SPLIT_SET, DataConfig
from megamix.data.best_fit import BestFitSource
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


class JobCorpus:
    """Finds what a run reads, by its section [data]. Files are opened when a source is asked for."""

    def __init__(self, section: DataConfig, model: DecoderConfig):
        self.section, self.seq_len, self.vocab_size = section, model.seq_len, model.vocab_size
        self.packed = section.packing != "none"
        # The sizes that every source and every check of a file takes by name.
        self._sizes = {"seq_len": self.seq_len, "vocab_size": self.vocab_size}

    def training(self, seed: int) -> SampleSource:
        """Return the source that a run trains on, from its first sample to its last. `seed`: that of the data's order.

        Raises: ValueError if a file cannot be read, or a part of one has no window.
        """
        later = [(stage.from_sample, stage.train) for stage in self.section.stages]
        return self._mixed([(0, self.section.train), *later], _Seeds(seed, seed), part=0)

    def validation(self) -> dict[str, SampleSource]:
        """Return the sources that a run is validated on, by the names of their sets; "" names a set alone.

        Raises: ValueError, as `training`.
        """
        sets = self.section.valid or {}
        found = {name: self._mixed([(0, sources)], _VALIDATION_SEEDS, part=None) for name, sources in sets.items()}
        if self.section.split is not None:
            found[SPLIT_SET if sets else ""] = self._mixed([(0, self.section.train)], _VALIDATION_SEEDS, part=1)
        return found

    def of_plugin(self, seed: int) -> SampleSource | None:
        """Return the first training source that a plugin has registered, or None."""
        made = (self._registered(source, seed) for source in self.section.train)
        return next((one for one in made if one is not None), None)

    def epochs(self, seed: int, samples: int) -> Iterator[tuple[float, str]]:
        """Yield how often the first samples of training read each corpus of token files, and how this is packed.

        Raises: as `training`.
        """
        source = self.training(seed)
        for part, count in source.parts(samples) if isinstance(source, BlendedSource) else [(source, samples)]:
            if isinstance(part, TokenFileSource):
                packed = f"padding {part.padding:.2%}, documents cut {part.cut_documents():.2%}"
                yield count / part.num_windows, f"{part.num_tokens:,} in {part.name}; {packed}"

    def prefixes(self) -> dict[str, str]:
        """Return the prefix of every token file, by the key that names the file."""
        return {field: source.path for field, source in self._entries() if source.path is not None}

    def fingerprints(self) -> dict[str, str]:
        """Return the fingerprints of the tokenizer and of all data, by key. Reads up to 64 MiB of each file."""
        found = {field: token_file_fingerprint(Path(prefix)) for field, prefix in self.prefixes().items()}
        for field, source in self._entries():
            if (made := self._registered(source, _VALIDATION_SEEDS.order)) is not None:
                found[field] = hashlib.sha256(made.fingerprint.encode()).hexdigest()
        if self.section.tokenizer is not None:
            found["data.tokenizer"] = file_fingerprint(Path(self.section.tokenizer))
        return found

    def identity(self) -> str:
        """Return a text that is equal for equal files on one machine.

        Only one of the ranks with equal texts has to take the fingerprints.
        """
        files = {field: [bin_path(Path(path)), idx_path(Path(path))] for field, path in self.prefixes().items()}
        if self.section.tokenizer is not None:
            files["data.tokenizer"] = [Path(self.section.tokenizer)]
        known = {field: [file_identity(path) for path in paths] for field, paths in files.items()}
        return json.dumps([platform.node(), known], sort_keys=True)

    def require_unchanged(self, identity: str) -> None:
        """Check that the files open by now are those that `identity` saw before their fingerprints were taken.

        Raises: DataError naming the key of a changed file; OSError for a missing file.
        """
        then, now = (json.loads(text)[1] for text in (identity, self.identity()))
        for field, files in then.items():
            if now[field] != files:
                raise DataError(f"{field}: its file was replaced or changed while the run started; start again")

    def problems(self) -> list[str]:
        """Return the reasons why a job must not start on this data, one line each; empty if there are none."""
        fields: dict[str, str] = {}  # one key per file: a file may be named twice
        for field, prefix in self.prefixes().items():
            fields.setdefault(prefix, field)
        problems = [it for prefix, field in fields.items() for it in token_file_problems(field, prefix, **self._sizes)]
        if self.section.split is not None and not problems:
            divided = {prefix: field for prefix, field in fields.items() if not field.startswith(_VALID)}
            problems = [problem for prefix, field in divided.items() for problem in self._split_problems(field, prefix)]
        return [*problems, *self._source_problems(), *self._stage_problems(), *self._tokenizer_problems()]

    def warnings(self) -> Iterator[str]:
        """Yield a line for a vocabulary or a tokenizer other than those that `megamix prepare` noted."""
        size, own = self.vocab_size, self.section.tokenizer
        for folder, field in {Path(path).parent: field for field, path in self.prefixes().items()}.items():
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

    def _lists(self) -> Iterator[tuple[str, Sources]]:
        """Yield every list of sources with its key; those of validation, if there are any, come last."""
        yield "data.train", self.section.train
        for number, stage in enumerate(self.section.stages):
            yield f"data.stages[{number}].train", stage.train
        for name, sources in (self.section.valid or {}).items():
            yield f"{_VALID}.{name}".rstrip("."), sources

    def _entries(self) -> Iterator[tuple[str, DataSource]]:
        for name, sources in self._lists():
            for number, source in enumerate(sources):
                yield name if len(sources) == 1 else f"{name}[{number}]", source

    def _split_problems(self, field: str, prefix: str) -> Iterator[str]:
        for part, name in enumerate(("training", "validation")):
            stretch = self._stretch(prefix, part)
            if stretch.windows(self.seq_len, packed=False) < 1:
                yield (
                    f"data.split: leaves {stretch.stop - stretch.start} tokens of {field} = {prefix!r} for {name}, "
                    f"fewer than one sample of model.seq_len + 1 = {self.seq_len + 1}; write another share, or valid"
                )

    def _tokenizer_problems(self) -> Iterator[str]:
        # The sample at the end needs the tokenizer. A run must not train for days and then fail there.
        if (path := self.section.tokenizer) is None:
            return
        try:
            if (known := open_tokenizer(Path(path)).vocab_size) > self.vocab_size:
                yield (
                    f"data.tokenizer: {path} knows {known} tokens, more than model.vocab_size {self.vocab_size}; write "
                    f"vocab_size = {known}, or the path of the tokenizer that made the tokens"
                )
        except ValueError as error:
            yield f"data.tokenizer: {error}; or leave the key out"

    def _source_problems(self) -> Iterator[str]:
        for field, source in self._entries():
            if source.markov is not None and source.markov > self.vocab_size:
                yield (
                    f"{field}: got markov = {source.markov}, more successors than model.vocab_size = {self.vocab_size} "
                    f"tokens; write markov = {min(4, self.vocab_size)}, or at most {self.vocab_size}"
                )
            try:
                made = self._registered(source, _VALIDATION_SEEDS.order)
            except ValueError as error:
                yield f"{field}: {error}"
                continue
            if made is not None and self.section.split is not None and not field.startswith(_VALID):
                yield (
                    f"data.split: divides token files by their documents, and {field} is a source of its own; leave "
                    "split out, and write what to validate on as data.valid"
                )

    def _stage_problems(self) -> Iterator[str]:
        """Yield a line for each file that two corpora share.

        A file in two corpora has two orders: the later corpus would read samples again that the earlier one has read.
        """
        corpora: dict[str | int, tuple[str, _Names]] = {}  # by file: its first list, and its corpus in that list
        for field, sources in self._lists():
            for entry, _ in () if field.startswith(_VALID) else shares(sources):
                names = _names(entry)
                known = {name: corpora.setdefault(name, (field, names)) for name in names}
                for name in [name for name in names if known[name][1] != names][:1]:
                    yield (
                        f"{field}: reads {str(name)!r} as part of another corpus than {known[name][0]} does, so its "
                        "samples would be read again; write the same list in both, or a weight for every file of both"
                    )

    def _mixed(self, stages: list[tuple[int, Sources]], seeds: _Seeds, part: int | None) -> SampleSource:
        """Return one source for all stages. A source that several stages name goes on where it was.

        `part`: the part of data.split to read; None: files that it does not divide.
        """
        known = {_names(entry): entry for _, sources in stages for entry, _ in shares(sources)}  # in order of first use
        built = [self._source(entry, seeds.of(number), part) for number, entry in enumerate(known.values())]
        if len(built) == 1:
            return built[0]
        mixtures = [(start, {_names(entry): weight for entry, weight in shares(sources)}) for start, sources in stages]
        blend = [BlendStage(start, tuple(weights.get(names, 0) for names in known)) for start, weights in mixtures]
        return BlendedSource(built, blend, packed=self.packed)

    def _source(self, entry: Sources, seeds: _Seeds, part: int | None) -> SampleSource:
        if (made := self._registered(entry[0], seeds.made_up)) is not None:
            return cast(SampleSource, made)
        if entry[0].markov is not None:
            return MarkovSource(**self._sizes, branching=entry[0].markov, seed=seeds.made_up)
        stretches = [self._stretch(source.path, part) for source in entry if source.path is not None]
        kind = BestFitSource if self.section.packing == "best_fit" else TokenFileSource
        return kind(stretches, **self._sizes, seed=seeds.order, packed=self.packed)

    def _registered(self, source: DataSource, seed: int) -> Any:
        """Return the source that a plugin builds for an entry with the plugin's key, or None for other entries."""
        for name, build in SOURCES.registered.items():
            if (keys := getattr(source, name, None)) is not None:
                return build(**dict(keys), **self._sizes, seed=seed)
        return None

    def _stretch(self, prefix: str, part: int | None) -> TokenSpan:
        file = TokenFile(Path(prefix))
        if part is None or self.section.split is None:
            return TokenSpan.whole(file)
        for_training, for_validation = self.section.split
        return split(file, for_training / (for_training + for_validation))[part]


def shares(sources: Sources) -> list[tuple[Sources, int]]:
    """Return the sources to mix, each with its whole-number share. Files without weights are one corpus."""
    if sources[0].weight is None:
        return [(sources, 1)]
    weights = whole_weights([source.weight for source in sources if source.weight is not None])
    return [((source,), weight) for source, weight in zip(sources, weights, strict=True)]


def _names(entry: Sources) -> _Names:
    return tuple(source.name for source in entry)
