"""The rule that decides which documents validate: a sample of every folder and every length."""

import hashlib
import math
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megamix.data.prepare.corpus import CorpusFile
from megamix.data.prepare.plan import PlannedFile


class DocumentInPart(NamedTuple):
    valid: bool
    draw: int
    text: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Split:
    """The documents of a corpus that validate: text files by their names, which `split_of` has chosen; records,
    and text files that share a name, by a hash of their text.

    Equal records are never on both sides. A document longer than `longest` bytes stays in training: in the standard
    library one file of English prose made up two thirds of validation.
    """

    valid_fraction: float
    longest: float
    held_out: frozenset[str] = frozenset()

    def place(self, file: CorpusFile, text: str) -> DocumentInPart:
        content = text.encode()
        if file.drawn_by_name:
            draw = _draw(os.fsencode(file.name))
            valid = file.name in self.held_out
        else:
            draw = _draw(content)
            valid = draw / 2**64 < self.valid_fraction and len(content) <= self.longest
        return DocumentInPart(valid, draw, text, len(content))


def split_of(files: Sequence[PlannedFile], valid_fraction: float) -> Split:
    """Return the split of a planned corpus. A document longer than half of all validation stays in training. Of the
    text files each stratum's share validates, those with the least draws.

    What a stratum's share has beyond whole files goes on to the next stratum, so that many small folders have theirs
    together. A few hundred drawn without strata are easily of one kind: a third of the standard library's validation
    was tables of character sets, a sixth of its text, and validation ended .37 nats below training.
    """
    longest = valid_fraction * sum(planned.num_bytes for planned in files if not planned.file.passed_over) / 2
    strata = defaultdict[tuple[str, int], list[str]](list)  # by folder, and by length within a factor of two
    for planned in files:
        if planned.file.drawn_by_name and 0 < planned.num_bytes <= longest:
            folder, _, _ = planned.file.name.rpartition("/")
            strata[folder, planned.num_bytes.bit_length()].append(planned.file.name)
    held_out = list[str]()
    seen = 0
    for _, names in sorted(strata.items()):
        seen += len(names)
        share = math.floor(valid_fraction * seen + 0.5) - len(held_out)
        names.sort(key=lambda name: _draw(os.fsencode(name)))
        held_out += names[:share]
    return Split(valid_fraction, longest, frozenset(held_out))


def _draw(content: bytes) -> int:
    return int.from_bytes(hashlib.sha256(content).digest()[:8])
