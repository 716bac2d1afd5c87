"""The tokenizer of a prepare: trained on the corpus, the user's own file, or bytes."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megamix.base.durable import folder_aside
from megamix.base.progress import ProgressLine
from megamix.data.prepare.pieces import PieceReport, documents_of
from megamix.data.prepare.plan import CorpusPiece, Plan, grouped, read_piece
from megamix.data.prepare.split import Split
from megamix.data.steady_file import file_fingerprint
from megamix.data.text_tokenizer import TextTokenizer
from megamix.data.tokenizer import END_OF_TEXT, MIN_VOCAB_SIZE, Tokenizer, open_tokenizer, save_tokenizer
from megamix.data.tokenizer_files import tokenizer_files
from megamix.data.tokenizer_kinds import ByteTokenizer

log = logging.getLogger("megamix")

TRAIN, BYTES = "train", "bytes"
# Bytes of text for training, taken from the beginnings of so many pieces. A trainer's memory grows with the words that
# it has seen: the process takes 367 MB with 32 MiB of source code, and 542 MB with 64 MiB.
TRAIN_BYTES, _TRAIN_PIECES = 2**25, 256
_SAMPLED_PIECES, _SAMPLED_CHARACTERS = 8, 2**16  # number of sampled pieces, characters of each or some more
# Words, numbers, marks, white space and scripts, in combinations on which split patterns differ.
_PROBE = (
    "I'll WE'LL it's 'Tis  don't\n\n\tx = 1234567890.5e-3  \n  // naïve Ünïcode ÅngStröm\r\n \u00a0\u2003\u3000.\u0085"
    "日本語テキスト。한국어 текст عربى हिन्दी ไทย ½ ² ⅷ ٣٤٥ 🙂🏽‍🚀 e\u0301 \ufb01 \u200b"
    "\x00\x7f <|endoftext|> </s> \u017f's \u212a"
)


@dataclass(frozen=True, slots=True)
class TokenizerChoice:
    """`--tokenizer`: train, bytes, or the path of a tokenizer.json or SentencePiece .model.

    Raises: ValueError naming flag, value and fix.
    """

    what: str
    vocab_size: int | None = None  # size of a tokenizer that is trained; otherwise None
    end_token: str | None = None  # end token in a file of a tokenizer; None: the file's own
    begin_token: str | None = None  # begins each document; "": the one that the tokenizer's files name; None: no token

    def __post_init__(self) -> None:
        if self.what == TRAIN:
            if (self.vocab_size or 0) < MIN_VOCAB_SIZE:
                raise ValueError(
                    f"--vocab-size {self.vocab_size} is too small: 256 bytes and {END_OF_TEXT} need {MIN_VOCAB_SIZE}; "
                    f"give at least {MIN_VOCAB_SIZE}"
                )
        elif self.vocab_size is not None:
            raise ValueError(
                f"--vocab-size {self.vocab_size} is the size of a tokenizer that is trained; leave it out for "
                f"--tokenizer {self.what}"
            )
        if self.what in (TRAIN, BYTES):
            for flag, token in (("--end-token", self.end_token), ("--begin-token", self.begin_token)):
                if token is not None:
                    raise ValueError(
                        f"{flag} {token} is for the file of a tokenizer; with --tokenizer {self.what} a document "
                        f"only ends, with {END_OF_TEXT}: leave it out"
                    )
        else:
            self.open_file()

    def open_file(self) -> TextTokenizer:
        """Open the file. Raises: ValueError if it is no tokenizer, or has no token that ends a document."""
        if not Path(self.what).is_file():
            raise ValueError(
                f"--tokenizer {self.what} is no file; write train, bytes, or the path of a tokenizer.json or "
                f"SentencePiece .model (of a model on the Hub: hf download {self.what} tokenizer.json --local-dir DIR)"
            )
        tokenizer = open_tokenizer(Path(self.what), self.end_token)
        assert tokenizer.end_of_text >= 0
        tokenizer.begin_with(self.begin_token)
        return tokenizer

    def manifest(self) -> dict[str, Any]:
        if self.what in (TRAIN, BYTES):
            return {"tokenizer": self.what, "vocab_size": self.vocab_size}
        path = Path(self.what)
        tokenizer = open_tokenizer(path, self.end_token)
        begins = tokenizer.begin
        tokenizer.begin_with(self.begin_token)
        if begins and not tokenizer.begin:
            what = f"{path} begins a text with {tokenizer.begin_token}"
            log.warning("--tokenizer %s, but documents begin without it; --begin-token writes it", what)
        request: dict[str, Any] = {"tokenizer": file_fingerprint(path), "end_token": tokenizer.end_token}
        request |= {"begin_token": tokenizer.begin_token} if tokenizer.begin else {}
        beside = [file_fingerprint(file) for file in tokenizer_files(path).values() if file != path]
        return request | ({"tokenizer_files": beside} if beside else {})


def make_tokenizer(choice: TokenizerChoice, plan: Plan, split: Split, folder: Path) -> Path:
    """Write the tokenizer's files to a folder, whole or not at all. Return the file to open."""
    if not folder.exists():
        tokenizer: TextTokenizer
        if choice.what == TRAIN:
            assert choice.vocab_size is not None
            with ProgressLine("megamix prepare") as progress:
                tokenizer = Tokenizer.train(_training_texts(plan, split, progress), choice.vocab_size)
        elif choice.what == BYTES:
            tokenizer = ByteTokenizer()
        else:
            tokenizer = choice.open_file()
        with folder_aside(folder) as aside:
            save_tokenizer(tokenizer, aside, None if choice.what in (TRAIN, BYTES) else Path(choice.what))
    return next(folder.glob("tokenizer.*"))


def sample_texts(plan: Plan) -> list[str]:
    """Return some texts from all over the corpus, and a short one with more scripts and signs than most corpora."""
    texts = [_PROBE]
    for piece in _spread(plan.pieces, _SAMPLED_PIECES):
        beginnings = (record[:_SAMPLED_CHARACTERS] for *_, record in read_piece(piece) if isinstance(record, str))
        texts += next(grouped(beginnings, len, _SAMPLED_CHARACTERS), [])
    return texts


def _training_texts(plan: Plan, split: Split, progress: ProgressLine) -> Iterator[str]:
    """Yield the documents of train. If the corpus is larger than TRAIN_BYTES, yield the first documents of pieces
    spread evenly over it.

    If no document validates, the one with the least draw will move to valid, with its equals. So these are held back
    until that is known.
    """
    pieces = _spread(plan.pieces, _TRAIN_PIECES)
    total = sum(piece.num_bytes for piece in pieces)
    progress.begin("learning the tokenizer, counting its words", total=min(total, TRAIN_BYTES))
    report = PieceReport()
    held = list[str]()
    least = 2**64  # draw of those that are held
    for piece in pieces:
        left = TRAIN_BYTES * piece.num_bytes // total
        for document in documents_of(piece, split, report):
            progress.advance(min(document.num_bytes, left))
            if document.valid:
                continue
            if document.num_bytes > left:
                yield document.text.encode()[:left].decode(errors="ignore")
                break
            left -= document.num_bytes
            if document.draw < least:
                yield from held
                held, least = [], document.draw
            if document.draw == least:
                held.append(document.text)
            else:
                yield document.text
    if report.num_valid or not split.valid_fraction:
        yield from held
    progress.begin("learning the tokenizer, merging pairs")


def _spread(pieces: Sequence[CorpusPiece], count: int) -> list[CorpusPiece]:
    """Return `count` pieces, evenly spread, beginning with the first; all if there are not more."""
    count = min(count, len(pieces))
    return [pieces[number * len(pieces) // count] for number in range(count)]
