"""Token files in Megatron's format: PREFIX.bin holds the ids of all documents in order, PREFIX.idx their places."""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import numpy as np
from numpy.typing import NDArray

from megamix.base.durable import sync_file, written_aside
from megamix.data.steady_file import DataError, FileArray, SteadyFile, add_file
from megamix.data.token_index import TokenIndex, write_index

_SAMPLED, _BLOCK = 256, 2**18  # number of blocks that are read of a .bin, and bytes of a block


def bin_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".bin")  # not with_suffix: "data.v2" is a prefix with a dot


def idx_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".idx")


def sampled_blocks(size: int) -> list[tuple[int, int]]:
    """Return the byte ranges of a .bin to read as a sample: 64 MiB in ranges spread evenly over `size` bytes, or the
    whole of a smaller .bin.
    """
    starts = [number * max(_BLOCK, size // _SAMPLED) for number in range(_SAMPLED)]
    return [(start, min(start + _BLOCK, size)) for start in starts if start < size]


def token_dtype(vocab_size: int) -> "np.dtype[np.integer]":
    """Return uint16 if the largest id, vocab_size - 1, fits into it; otherwise int32."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<i4")


class TokenFileWriter:
    """Writes the documents of a token file, of one sequence each; see `token_file_writer`."""

    def __init__(self, prefix: Path, vocab_size: int, ids: IO[bytes], lengths: IO[bytes]) -> None:
        self.num_tokens = self.num_documents = 0
        self._prefix, self._vocab_size, self._ids, self._lengths = prefix, vocab_size, ids, lengths

    def add(self, token_ids: NDArray[np.integer], lengths: NDArray[np.integer] | None = None) -> None:
        """Append documents. `token_ids`: those of all. `lengths`: of each; None: it is one document.

        Raises: ValueError for an id outside the vocabulary: the cast to the file's dtype would wrap it silently.
        """
        if token_ids.size and (token_ids.min() < 0 or token_ids.max() >= self._vocab_size):
            raise ValueError(
                f"document {self.num_documents} of {self._prefix}: token ids {token_ids.min()} to {token_ids.max()} do "
                f"not fit a vocabulary of {self._vocab_size}; give the vocab_size of the tokenizer that made them"
            )
        lengths = np.array([token_ids.size]) if lengths is None else lengths
        self._ids.write(token_ids.astype(token_dtype(self._vocab_size)).tobytes())
        self._lengths.write(lengths.astype("<i4").tobytes())
        self.num_tokens += token_ids.size
        self.num_documents += lengths.size


@contextmanager
def token_file_writer(prefix: Path, vocab_size: int) -> Iterator[TokenFileWriter]:
    """Yield the writer of a token file: `with token_file_writer(prefix, vocab_size) as writer: writer.add(ids)`.

    Both files are written under other names. Leaving the block without an exception renames .bin, then .idx. The .idx
    is the commit: a writer that is killed at any instant leaves none, and a reader refuses a prefix without it. The
    index's content waits on the disk, too, so memory does not grow with the number of documents.
    """
    idx, ids = written_aside(idx_path(prefix)), written_aside(bin_path(prefix))  # the last one is renamed first
    with idx as index, ids as tokens, TemporaryFile(dir=prefix.parent) as lengths:
        yield TokenFileWriter(prefix, vocab_size, tokens, lengths)
        write_index(index, token_dtype(vocab_size), lengths)
        for file in (tokens, index):  # a full disk shows here, before anything is replaced
            sync_file(file)
        # Remove an older index first: beside a new .bin of the same size it would look like a commit.
        idx_path(prefix).unlink(missing_ok=True)


class TokenFile(TokenIndex):
    """A checked token file: the index, and in `tokens` the whole stream, all documents in order.

    `tokens[document_offsets[i] : document_offsets[i + 1]]` is document i, with all its sequences. Neither array is read
    before it is used.

    Raises: DataError naming the file, what is there, what was expected and the fix, if anything does not fit.
    """

    def __init__(self, prefix: Path) -> None:
        if not prefix.name:
            raise DataError(f"{prefix} is a folder; give the PREFIX of PREFIX.bin and PREFIX.idx in it")
        path = idx_path(prefix)
        if not path.is_file():
            hint = "run `megamix prepare`" + (
                "" if path.is_absolute() else f", or start in the folder from which {path} leads to it"
            )
            if prefix.suffix in (".bin", ".idx"):
                hint = "give the prefix without its ending"
            elif held := sorted(prefix.glob("*.idx")):
                hint = f"{prefix} is a folder; write {' or '.join(str(path.with_suffix('')) for path in held[:2])}"
            elif prefix.is_dir():
                hint = f"{prefix} is a folder without token files; give one of prepare's, as runs/data/mine/train"
            raise DataError(f"{path} is missing; expected PREFIX.idx beside PREFIX.bin: {hint}")
        super().__init__(path)
        self.path = path = bin_path(prefix)
        if not path.is_file():
            raise DataError(f"{path} is missing, {idx_path(prefix)} is there; write both again (`megamix prepare`)")
        file = SteadyFile(path)
        expected, size = self.num_tokens * self.dtype.itemsize, file.size
        if size != expected:
            raise DataError(
                f"{path} has {size} bytes, its index says {self.num_tokens} tokens of {self.dtype.name} = {expected} "
                "bytes; the copy is incomplete or the two files are not of one run: write or copy both again"
            )
        self.tokens = FileArray(file, self.dtype, 0, self.num_tokens)  # on the disk

    def sampled_id_outside(self, vocab_size: int) -> int | None:
        """Return `id_outside` of 64 MiB spread over the file: the start of a run must not wait for a whole file. A
        wrong vocabulary nearly always shows in the first block. Other wrong ids are found when they are read.
        """
        size = self.dtype.itemsize
        blocks = (self.tokens[start // size : stop // size] for start, stop in sampled_blocks(self.num_tokens * size))
        return id_outside(blocks, vocab_size)


def id_outside(blocks: Iterable[NDArray[np.integer]], vocab_size: int) -> int | None:
    """Return the largest id of the first block in which one does not fit the vocabulary or, if the largest fits, the
    smallest; None if all fit.
    """
    ends = (int(end) for block in blocks for end in (block.max(), block.min()))
    return next((token_id for token_id in ends if not 0 <= token_id < vocab_size), None)


def id_problem(token_id: int, vocab_size: int) -> str:
    """Return the message about a file that holds an id outside the vocabulary."""
    return (
        f"holds token id {token_id}, but model.vocab_size = {vocab_size} allows 0 to {vocab_size - 1}; set "
        "model.vocab_size to the size of the vocabulary that wrote the file"
        + (f" (at least {token_id + 1})" if token_id >= 0 else "")
        + ", or prepare the text again by the model's own tokenizer (--tokenizer)"
    )


def token_file_problems(field: str, prefix: str, *, vocab_size: int, seq_len: int) -> list[str]:
    """Return the reasons why a job must not start on this prefix, a line each; empty if there is none. Needs no torch.

    `field`: the configuration key with the prefix, such as "data.train".
    """
    try:
        token_file = TokenFile(Path(prefix))
    except (ValueError, OSError) as error:
        return [f"{field} = {prefix!r}: {error}"]
    if not np.issubdtype(token_file.dtype, np.integer):
        return [f"{field} = {prefix!r}: holds {token_file.dtype.name}, not token ids; write it in an integer dtype"]
    problems = []
    if token_file.num_tokens < seq_len + 1:
        problems.append(
            f"{field} = {prefix!r}: {token_file.num_tokens} tokens are fewer than one sample of "
            f"model.seq_len + 1 = {seq_len + 1}; shorten model.seq_len or prepare more text"
        )
    token_id = token_file.sampled_id_outside(vocab_size)
    if token_id is not None:
        problems.append(f"{field} = {prefix!r}: {id_problem(token_id, vocab_size)}")
    return problems


def token_file_fingerprint(prefix: Path) -> str:
    """Return a hash of the whole index, the .bin's size, and 64 MiB of the .bin. Any document that is added, removed or
    moved changes it; single tokens changed in place in a larger file may not.
    """
    digest = hashlib.sha256()
    add_file(digest, idx_path(prefix))
    tokens = SteadyFile(bin_path(prefix))
    digest.update(tokens.size.to_bytes(8, "little"))
    for start, stop in sampled_blocks(tokens.size):
        digest.update(tokens.read(start, stop))
    return digest.hexdigest()
