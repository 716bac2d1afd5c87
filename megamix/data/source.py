"""Sources of samples: one small interface, implemented by token files, by mixtures and by a made-up Markov chain."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megamix.base.names import first_few
from megamix.data.sampler import Blend, BlendStage, Ints, mix64, permute, windows_of_samples
from megamix.data.steady_file import DataError
from megamix.data.token_file import TokenFile, id_outside, id_problem
from megamix.data.token_index import STRIDE, DocumentOffsets

NO_TOKEN = -1  # fills up a row: read as token 0, and no target
Numbers = range | Ints  # numbers of samples


class Rows(NamedTuple):
    """Samples, one per row. The last token of a row is only a target."""

    tokens: Ints  # (samples, seq_len + 1); with positions, NO_TOKEN behind the end of a row
    # (samples, seq_len + 1): each token's place in its document, counted from the row's start if the document began
    # before. A token at place 0 is not predicted from the token before it. None: a row is one document.
    positions: Ints | None = None


class SampleSource(Protocol):
    """An interface that gives samples by number. Reading has no state: the same numbers give the same tokens, in any
    order and on any thread.
    """

    seq_len: int

    def read(self, samples: Numbers) -> Rows: ...


class TokenSpan(NamedTuple):
    """Tokens start .. stop - 1 of a token file: consecutive whole documents, each with its end token."""

    file: TokenFile
    start: int
    stop: int

    @staticmethod
    def whole(file: TokenFile) -> "TokenSpan":
        return TokenSpan(file, 0, file.num_tokens)

    def windows(self, seq_len: int, packed: bool) -> int:
        """Return the number of windows of seq_len + 1 tokens that overlap by one token: in them every token but the
        first is a target once per epoch. With `packed` the last one may be short; the missing tokens are no targets.
        """
        num_targets = self.stop - self.start - 1
        return -(-num_targets // seq_len) if packed else num_targets // seq_len


def split(file: TokenFile, first_share: float) -> tuple[TokenSpan, TokenSpan]:
    """Cut a file into two parts between documents. The first part has `first_share` of the documents, rounded."""
    border = file.document_offsets[round(first_share * file.num_documents)]
    return TokenSpan(file, 0, border), TokenSpan(file, border, file.num_tokens)


class TokenFileSource:
    """Windows of token files in the order of `sampler`. Several files are one corpus, with one order.

    Without `packed` the files are streams: a window runs on from one document into the next. With `packed` documents
    are separate: positions restart with each, and every token but a document's first is a target once per epoch.
    """

    def __init__(
        self, stretches: Sequence[TokenSpan], *, seq_len: int, vocab_size: int, seed: int, packed: bool = False
    ) -> None:
        """Count the windows. Raises: ValueError if there is none."""
        self.seq_len, self.packed = seq_len, packed
        self._stretches, self._vocab_size, self._seed = stretches, vocab_size, seed
        self.name = first_few([str(stretch.file.path.with_suffix("")) for stretch in stretches], 1)
        self.num_tokens = sum(stretch.stop - stretch.start for stretch in stretches)
        self.num_windows, held = self._count_windows()
        if not self.num_windows:
            raise ValueError(
                f"a token file of {self.num_tokens} tokens holds no window of model.seq_len + 1 = {seq_len + 1}; "
                "shorten model.seq_len or prepare more text"
            )
        self.padding = max(0.0, 1 - held / (self.num_windows * (seq_len + 1)))  # share of all windows' tokens

    def _count_windows(self) -> tuple[int, int]:
        """Return the number of windows, and of the tokens to put in them."""
        counts = [stretch.windows(self.seq_len, self.packed) for stretch in self._stretches]
        self._ends = np.cumsum(np.maximum(counts, 0))  # number of windows up to each stretch's end
        num_windows = int(self._ends[-1])
        return num_windows, self.num_tokens + num_windows - len(counts)  # they overlap by one token

    def cut_documents(self) -> float:
        """Return the share of documents that would fit in a window, but lie in two."""
        cut = documents = 0
        for stretch in self._stretches:
            for _, offsets in stretch.file.document_offsets.blocks(stretch.start, stretch.stop):
                begins, lengths = offsets[:-1] - stretch.start, np.diff(offsets)
                lasts = begins + lengths - 2  # the last token of a document that predicts its next one
                is_cut = begins // self.seq_len != lasts // self.seq_len
                cut += int((is_cut & (lengths > 1) & (lengths < self.seq_len + 2)).sum())
                documents += int((lengths > 0).sum())
        return cut / documents

    def read(self, samples: Numbers) -> Rows:
        """Return the samples of these numbers.

        Raises: DataError for an id that the vocabulary lacks (the start of a run checks only some ids of a large file),
        or for a file that changes while it is read; OSError, with the file's name, if it cannot be read.
        """
        windows = windows_of_samples(samples, self.num_windows, self._seed)
        tokens = np.zeros((len(samples), self.seq_len + 1), dtype=np.int64)
        positions = np.zeros_like(tokens) if self.packed else None
        places = np.searchsorted(self._ends, windows, side="right")
        for place in np.unique(places).tolist():
            rows = np.flatnonzero(places == place)
            file, start, stop = self._stretches[place]
            starts = start + (windows[rows] - (self._ends[place - 1] if place else 0)) * self.seq_len
            stops = np.minimum(starts + self.seq_len + 1, stop)
            for row, stretch in zip(rows.tolist(), self._read(place, starts, stops), strict=True):
                tokens[row, : len(stretch)] = stretch
            if positions is not None:
                positions[rows] = _positions(file.document_offsets, starts, stops, self.seq_len + 1)
        return Rows(tokens, positions)

    def _read(self, place: int, starts: Ints, stops: Ints) -> list[NDArray[Any]]:
        """Return tokens start .. stop - 1 of a stretch's file, for each pair. Raises: as `read`."""
        file = self._stretches[place].file
        found = file.tokens.stretches(starts.tolist(), stops.tolist())
        if (token_id := id_outside([np.concatenate(found)], self._vocab_size)) is not None:
            raise DataError(f"{file.path}: {id_problem(token_id, self._vocab_size)}")
        return found


def _positions(offsets: DocumentOffsets, starts: Ints, stops: Ints, length: int) -> Ints:
    """Return each token's distance from its document's start, or from the row's start if that is nearer; 0 from the
    row's stop on.

    Shapes: starts, stops (rows,), tokens of the file -> INT64 (rows, length).
    """
    places = np.arange(length)
    # Index in the row at which a token's document begins. Each place behind the stop counts as a document's beginning.
    begins = np.where(places < (stops - starts)[:, None], 0, places)
    nearest, last = offsets.not_behind(starts), offsets.not_behind(stops)
    for row, start in enumerate(starts):
        some = offsets[nearest[row] : last[row] + STRIDE] - start
        some = some[(some >= 0) & (some < stops[row] - start)]
        begins[row, some] = some
    return places - np.maximum.accumulate(begins, axis=1)


class BlendedSource:
    """Several sources mixed by `Blend`. Each has its own order and its own epochs."""

    def __init__(self, sources: Sequence[SampleSource], stages: Sequence[BlendStage], *, packed: bool) -> None:
        """Keep the sources. `packed`: whether rows hold several documents, and so have positions."""
        self.seq_len = sources[0].seq_len
        self._sources, self._blend, self._packed = sources, Blend(stages), packed

    def parts(self, samples: int) -> list[tuple[SampleSource, int]]:
        """Return the sources, each with how many of the first samples it gives."""
        return [*zip(self._sources, self._blend.given(samples).tolist(), strict=True)]

    def read(self, samples: Numbers) -> Rows:
        sources, numbers = self._blend.locate(np.asarray(samples, dtype=np.int64))
        tokens = np.empty((len(samples), self.seq_len + 1), dtype=np.int64)
        positions = np.tile(np.arange(self.seq_len + 1), (len(samples), 1)) if self._packed else None
        for source in np.unique(sources).tolist():
            rows = self._sources[source].read(numbers[sources == source])
            tokens[sources == source] = rows.tokens
            if positions is not None and rows.positions is not None:
                positions[sources == source] = rows.positions
        return Rows(tokens, positions)


class MarkovSource:
    """A Markov chain: tokens without a corpus, equal on every machine.

    Every token has `branching` successors, all equally likely. A model that has learned the chain reaches a loss of
    ln(branching) nats, its entropy, and no model goes below. A model that knows nothing starts at ln(vocab_size).
    `seed` decides the samples. The chain is the same for every seed, so samples of another seed can validate.
    """

    def __init__(self, *, vocab_size: int, seq_len: int, branching: int, seed: int) -> None:
        assert 1 <= branching <= vocab_size, (branching, vocab_size)
        self.seq_len = seq_len
        self._vocab_size = vocab_size
        self._branching = branching
        self._seed = np.uint64(seed)
        keys = np.zeros(vocab_size, dtype=np.uint64)
        self._first_successor = permute(np.arange(vocab_size), vocab_size, keys)  # a bijection: no token dies out

    def read(self, samples: Numbers) -> Rows:
        length = self.seq_len + 1
        cells = np.asarray(samples, dtype=np.int64)[:, None] * length + np.arange(length)
        draws = mix64(self._seed, cells.astype(np.uint64))
        rows = np.empty(draws.shape, dtype=np.int64)
        rows[:, 0] = draws[:, 0] % np.uint64(self._vocab_size)
        choices = (draws % np.uint64(self._branching)).astype(np.int64)
        for place in range(1, length):
            rows[:, place] = (self._first_successor[rows[:, place - 1]] + choices[:, place]) % self._vocab_size
        return Rows(rows)
