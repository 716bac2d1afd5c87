"""Windows of whole documents, as full as they get: a plan by the documents' lengths, and the source that reads by it.

Documents of one length are alike to the plan, and so are windows of one content. So the plan's time and memory grow
with the number of lengths in use, and not with the number of documents.
"""

import functools
from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megamix.data.sampler import Ints, mix64, permute, windows_of_samples
from megamix.data.source import NO_TOKEN, Numbers, Rows, TokenFileSource

_LEAVES = 2**18  # contents of windows that a search looks at in all, over the number of lengths


class WindowPlan(NamedTuple):
    """Groups of windows of one content. An entry is the pieces of one length in each window of a group."""

    begins: Ints  # (groups + 1,): number of windows before a group, and at last of all
    firsts: Ints  # (groups + 1,): a group's first entry, and at last the number of entries
    lengths: Ints  # (entries,): tokens of a piece
    each: Ints  # (entries,): pieces in one window
    left: Ints  # (entries,): pieces of this length in this group and those behind it


def plan_windows(counts: Ints) -> WindowPlan:
    """Plan windows for pieces that are not cut, by integers alone. In the first way each window takes the longest piece
    that still fits, again and again; in the second a search looks for fuller ones. The way with fewer windows wins:
    each has its bad cases.

    Shapes: counts (window's tokens + 1,): number of pieces by their tokens; none has 0.
    """
    ways = 1, 2 + _LEAVES // (1 + int(np.count_nonzero(counts)))
    return min((_fill(counts, leaves) for leaves in ways), key=lambda plan: int(plan.begins[-1]))


def _fill(counts: Ints, leaves: int) -> WindowPlan:
    """Plan a window at a time, with the longest piece that is left, and the fullest of the first `leaves` contents that
    a depth-first search meets. Each window is repeated while its pieces last.
    """
    lengths = [0, *np.flatnonzero(counts).tolist()]
    left = counts[lengths].tolist()
    shorter = [*range(len(lengths))]  # leads to the next length that has pieces left, index 0 if there is none
    begins, firsts, entries = [0], [0], list[int]()
    for top in reversed(shorter[1:]):
        while left[top]:
            free, content, seen = len(counts), tuple[tuple[int, int], ...](), 0
            # A state is what is free, the next length, how many of it to take, and what was taken before.
            states = [(free - 1, top, min((free - 1) // lengths[top], left[top]), content)]
            while states and free and seen < leaves:
                rest, index, number, taken = states.pop()
                if number > (index == top):
                    states.append((rest, index, number - 1, taken))
                if number:
                    taken = (*taken, (index, number))
                rest -= number * lengths[index]
                if rest < free:
                    free, content = rest, taken
                index = min(index, bisect_right(lengths, rest)) - 1
                while shorter[index] != index:
                    shorter[index] = index = shorter[shorter[index]]
                if index:
                    states.append((rest, index, min(rest // lengths[index], left[index]), taken))
                else:
                    seen += 1
            times = min(left[index] // number for index, number in content)
            for index, number in content:
                entries += lengths[index], number, left[index]
                left[index] -= times * number
                if not left[index]:
                    shorter[index] = index - 1
            begins.append(begins[-1] + times)
            firsts.append(len(entries) // 3)
    return WindowPlan(np.array(begins), np.array(firsts), *np.array(entries, np.int64).reshape(-1, 3).T)


class BestFitSource(TokenFileSource):
    """Windows of whole documents of token files. Several files are one corpus, packed together.

    A document longer than a window gives whole windows, which overlap by one token, and a rest. So every token but a
    document's first is a target once per epoch. The seed draws another order of the windows, and of the pieces of each
    length, for each epoch.
    """

    def _count_windows(self) -> tuple[int, int]:
        numbers = [stretch.file.num_documents for stretch in self._stretches]
        self._firsts = np.cumsum([0, *numbers])  # documents before each file
        self._counts = counts = np.zeros(self.seq_len + 2, dtype=np.int64)  # pieces by their number of tokens
        for _, targets in self._targets():
            counts[1:-1] += np.bincount(targets % self.seq_len, minlength=self.seq_len)
            counts[-1] += (targets // self.seq_len).sum()
        counts[1] = 0  # one token has no target
        self._begins = np.cumsum(counts) - counts  # first place of each length in the table
        self._plan = plan_windows(counts)
        return int(self._plan.begins[-1]), int(counts @ np.arange(len(counts)))

    def cut_documents(self) -> float:
        return 0.0

    def _targets(self) -> Iterator[tuple[int, Ints]]:
        """Yield the number of targets of each document in blocks, each with the number of its first document."""
        for before, (file, *span) in zip(self._firsts, self._stretches, strict=False):
            for first, offsets in file.document_offsets.blocks(*span):
                yield before + first, np.maximum(np.diff(offsets) - 1, 0)

    @functools.cached_property
    def _table(self) -> NDArray[np.unsignedinteger]:
        """Return the number of each piece's document. The shortest pieces come first, those of one length in order."""
        table = np.empty(self._counts.sum(), np.min_scalar_type(self._firsts[-1]))
        nexts = self._begins.copy()
        for first, targets in self._targets():
            size = len(targets)
            whole, rest = np.divmod(targets, self.seq_len)
            # Sorted as (length, document) in one integer, which is fast, and the same on every machine.
            whole = np.repeat(np.arange(size) + self.seq_len * size, whole)
            pieces = np.sort(np.concatenate((np.arange(size) + rest * size, whole)))
            lengths, documents = np.divmod(pieces[np.searchsorted(pieces, size) :], size)
            found = np.bincount(lengths + 1, minlength=len(nexts))
            table[_runs(nexts, found)[0]] = first + documents
            nexts += found
        return table

    def read(self, samples: Numbers) -> Rows:
        """Return the samples of these numbers. Raises: as `TokenFileSource.read`."""
        plan, size = self._plan, self.seq_len + 1
        windows = windows_of_samples(samples, self.num_windows, self._seed)
        groups = np.searchsorted(plan.begins, windows, side="right") - 1
        entries, rows = _runs(plan.firsts[groups], np.diff(plan.firsts)[groups])
        # A window's pieces of one length have numbers side by side, counted down.
        slots = plan.left[entries] - (windows - plan.begins[groups] + 1)[rows] * plan.each[entries]
        slots, owners = _runs(slots, plan.each[entries])
        rows, lengths = rows[owners], plan.lengths[entries[owners]]

        # The pieces of a length have an order of their own, by other keys than the windows.
        epochs = np.asarray(samples)[rows] // self.num_windows
        keys = mix64(np.uint64(self._seed), ~(epochs * size + lengths).astype(np.uint64))
        slots = self._begins[lengths] + permute(slots, self._counts[lengths], keys)
        documents, whole = self._table[slots], self._begins[size]
        parts = slots - whole - np.searchsorted(self._table[whole:], documents)
        shifts = np.where(lengths == size, parts * self.seq_len, -lengths)  # a rest ends where the next document begins

        files, pieces = np.searchsorted(self._firsts, documents, side="right") - 1, dict[int, NDArray[np.integer]]()
        for file in np.unique(files).tolist():
            here = np.flatnonzero(files == file)
            borders = documents[here].astype(np.int64) - self._firsts[file] + (shifts[here] < 0)
            starts = self._stretches[file].file.document_offsets[borders] + shifts[here]
            pieces |= zip(here.tolist(), self._read(file, starts, starts + lengths[here]), strict=True)
        positions = np.tile(np.arange(size), (len(windows), 1))
        tokens, held = np.full_like(positions, NO_TOKEN), positions < np.bincount(rows, lengths)[:, None]
        tokens[held] = np.concatenate([pieces[number] for number in range(len(pieces))])
        positions[held], _ = _runs(np.zeros_like(lengths), lengths)  # what fills up a row continues its last document
        return Rows(tokens, positions)


def _runs(starts: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """Return counts[i] integers from starts[i] on, for each i in turn, and beside each integer its i."""
    owners = np.repeat(np.arange(len(counts)), counts)
    return np.arange(len(owners)) + (starts - np.cumsum(counts) + counts)[owners], owners
