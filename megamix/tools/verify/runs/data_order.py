"""Samples that each update of a run read, on which rank, and mistakes in that, in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megamix.config import Config
from megamix.data.sampler import windows_of_samples
from megamix.data.token_file import TokenFileWriter
from megamix.tools.verify.runs.watched_run import STEPS, Seen

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Read:
    """Samples that an attempt asked for, and windows that its ranks were given."""

    run: str
    when: str  # "after the first resume", say
    seen: Seen  # as one rank saw it
    planned: Numbers  # samples, (global_batch_size,)
    by_rank: list[Numbers]  # windows, in the order of the global batch; -1 for none


@dataclass
class DataOrder:
    """Order in which a run of one token file must read. `windows`: tokens (windows, seq_len)."""

    windows: NDArray[np.int64]
    seed: int
    _numbers: dict[bytes, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._numbers = {row.tobytes(): number for number, row in enumerate(self.windows)}

    def of(self, samples: Numbers) -> Numbers:
        """Return the window of each sample."""
        return windows_of_samples(samples, len(self.windows), self.seed)

    def read(self, run: str, when: str, ranks: Sequence[Seen]) -> Read:
        """Return what the ranks of one attempt read, put together."""
        ordered = {rank.dp_rank: rank for rank in ranks}
        known = [
            np.array([self._numbers.get(row.tobytes(), -1) for row in ordered[rank].rows]) for rank in sorted(ordered)
        ]
        planned = np.concatenate([np.asarray(part, np.int64) for part in ranks[0].planned])
        return Read(run, when, ranks[0], planned, known)

    def problems(self, run: Sequence[Read], planned: Sequence[Numbers], lost: bool) -> Iterator[str]:
        """Yield the mistakes in a run's reads.

        `planned`: samples of the run that never stopped, by attempt. `lost`: whether a batch that overflows is lost.
        """
        for read in run:
            number = read.seen.number
            samples = planned[number] if number < len(planned) else read.planned
            got, want = np.concatenate(read.by_rank), self.of(samples)
            if len(got) != len(want):
                yield f"{_place(read)}: the ranks read {len(got)} samples of {len(want)}"
            elif (got != want).any():
                yield self._explained(run, read, samples, got, want)
            else:
                continue
            return  # later mistakes follow from it
        final = [read for read in run if lost or not read.seen.found_inf]
        counts = np.bincount(np.concatenate([read.planned for read in final]), minlength=1)
        for count in sorted({*counts.tolist()} - {1}):
            yield f"{run[0].run}: samples {ranges(np.flatnonzero(counts == count))} are used {count} times"

    def _explained(self, run: Sequence[Read], read: Read, samples: Numbers, got: Numbers, want: Numbers) -> str:
        places = np.flatnonzero(got != want)
        sizes = np.cumsum([len(part) for part in read.by_rank])
        rank = int(np.searchsorted(sizes, places[0], side="right"))
        mine = places[places < sizes[rank]]
        text = f"{_place(read)}, rank {rank}: instead of samples {ranges(samples[mine])} it read others"
        epoch = int(samples[places[0]]) // len(self.windows)
        twice = self._twice(run, read, epoch)
        kind = self._kind(run, read, samples, got)
        return text + (f"; {twice}" if twice else "") + (f"; it looks like {kind}" if kind else "")

    def _twice(self, run: Sequence[Read], until: Read, epoch: int) -> str:
        """Return which windows are read twice in an epoch, up to an attempt, and by which ranks."""
        size = len(self.windows)
        readers: dict[int, list[str]] = {}
        for read in run:
            if read is until or not read.seen.found_inf:
                epochs = np.split(read.planned // size, np.cumsum([len(part) for part in read.by_rank])[:-1])
                for rank, (part, when) in enumerate(zip(read.by_rank, epochs, strict=True)):
                    for window in part[when == epoch]:
                        readers.setdefault(int(window), []).append(f"at update {read.seen.update} by rank {rank}")
            if read is until:
                break
        found = sorted((tuple(who), window) for window, who in readers.items() if len(who) > 1 and window >= 0)
        groups = [(who, [window for _, window in some]) for who, some in groupby(found, key=lambda one: one[0])]
        told = [f"windows {ranges(windows)} twice in epoch {epoch}, {' and '.join(who)}" for who, windows in groups]
        return "; ".join(told[:2])

    def _kind(self, run: Sequence[Read], read: Read, samples: Numbers, got: Numbers) -> str:
        """Return which mistake gives just these windows; "" for no known one."""
        ranks, size, wrong = read.by_rank, len(self.windows), got != self.of(samples)
        for one, part in enumerate(ranks):
            for other in range(one):
                if len(part) and np.array_equal(part, ranks[other]):
                    return f"ranks {other} and {one} reading the same samples"
        when = f" {read.when}".rstrip()
        if samples.max() >= size and (got == self.of(samples % size)).all():
            return f"epoch 0's order{when}"
        if (got == self.of(np.arange(len(got)))).all():
            return f"the data beginning anew{when}"
        others = not np.array_equal(read.planned, samples)
        tried = [earlier for earlier in run if earlier.seen.found_inf and earlier.seen.number < read.seen.number]
        if others and any(np.array_equal(earlier.planned, samples) for earlier in tried):
            return f"a batch that overflowed and is not tried again{when}"
        for shift in sorted(range(-int(samples.min()), 2 * size), key=abs):
            if shift and (got == self.of(samples + shift)).all():
                return f"the place in the data being {abs(shift)} samples too {'late' if shift > 0 else 'early'}{when}"
        if len(np.unique(got)) < len(np.unique(self.of(samples))):
            return f"an order in which some samples come twice in an epoch, {int(wrong.sum())} of {len(got)} here"
        return ""


def _place(read: Read) -> str:
    return f"{read.run}: update {read.seen.update} (attempt {read.seen.number})"


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as ranges, such as 0..3, 7, shortened."""
    sorted_once = np.unique([*numbers])
    runs = np.split(sorted_once, np.flatnonzero(np.diff(sorted_once) > 1) + 1)
    told = [f"{run[0]}..{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return ", ".join(told[:6]) + (", and others" if len(told) > 6 else "")


def write_data(config: Config, folder: Path) -> DataOrder:
    """Write tokens of which a run reads two epochs, the first one up to the middle of its fifth batch."""
    length, vocab, seed = config.model.seq_len, config.model.vocab_size, config.training.seed
    count = config.training.global_batch_size * STEPS // 2
    for key, number in (("valid", seed + 1), ("train", seed)):
        draw = np.random.default_rng(number)
        tokens = draw.integers(0, vocab, count * length + 1)
        with TokenFileWriter(folder / key, vocab) as writer:
            for document in np.split(tokens, np.unique(draw.integers(1, len(tokens), count))):
                writer.add(document)
    return DataOrder(tokens[:-1].reshape(count, length).astype(np.int64), seed)
