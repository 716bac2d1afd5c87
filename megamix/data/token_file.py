"""Token files as Megatron writes them: PREFIX.bin holds token ids end to end, PREFIX.idx says where documents lie.

Layout of PREFIX.idx, little-endian: magic 9 bytes, version u64, dtype code u8, sequence count u64, document count
u64; sequence lengths in tokens i32; sequence starts in bytes i64; index of each document's first sequence i64,
closed by the sequence count (so "document count" is the number of documents plus one).
"""

import struct
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from megamix.data.durable import sync_directory, sync_file

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_CODES = {np.dtype(name): code for code, name in _DTYPES.items()}
_SCAN_TOKENS = 2**24  # tokens looked at in one go; the scan holds this much and no more


def bin_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".bin")  # not with_suffix: "data.v2" is a prefix with a dot


def idx_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".idx")


def token_dtype(vocab_size: int) -> "np.dtype[np.integer]":
    """uint16 while the largest id, vocab_size - 1, fits; else int32."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<i4")


class TokenFileWriter:
    """Write a token file document by document: `with TokenFileWriter(prefix, vocab_size) as writer: writer.add(ids)`.

    Both files are written aside; leaving the block without an exception renames .bin, then .idx. The .idx is the
    commit: a writer killed at any instant leaves none, and a reader refuses a prefix without it.
    """

    def __init__(self, prefix: Path, vocab_size: int) -> None:
        self._prefix = prefix
        self._dtype = token_dtype(vocab_size)
        self._vocab_size = vocab_size
        self._lengths: list[int] = []

    @property
    def num_tokens(self) -> int:
        return sum(self._lengths)

    @property
    def num_documents(self) -> int:
        return len(self._lengths)

    def __enter__(self) -> "TokenFileWriter":
        self._bin_aside = bin_path(self._prefix).with_suffix(".bin.partial")
        self._bin = self._bin_aside.open("wb")
        return self

    def add(self, token_ids: NDArray[np.integer]) -> None:
        """Append one document.

        Shapes: token_ids (document length,), any integer dtype.
        Raises: ValueError for an id outside the vocabulary: the cast to the file's dtype would wrap it unseen.
        """
        if token_ids.size and (token_ids.min() < 0 or token_ids.max() >= self._vocab_size):
            raise ValueError(
                f"document {len(self._lengths)} of {self._prefix}: token ids {token_ids.min()} to {token_ids.max()} "
                f"do not fit a vocabulary of {self._vocab_size}; give the vocab_size of the tokenizer that made them"
            )
        self._bin.write(token_ids.astype(self._dtype).tobytes())
        self._lengths.append(token_ids.size)

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._bin:
            if error_type is None:
                sync_file(self._bin)
        if error_type is not None:
            self._bin_aside.unlink()
            return
        idx_aside = idx_path(self._prefix).with_suffix(".idx.partial")
        with idx_aside.open("wb") as idx:
            idx.write(_index_bytes(np.array(self._lengths, dtype=np.int64), self._dtype))
            sync_file(idx)
        # An older index must go first: beside a new .bin of the same size it would pass for a commit.
        idx_path(self._prefix).unlink(missing_ok=True)
        self._bin_aside.replace(bin_path(self._prefix))
        sync_directory(self._prefix.parent)
        idx_aside.replace(idx_path(self._prefix))
        sync_directory(self._prefix.parent)


class TokenFile:
    """A checked, memory-mapped token file. `tokens` is the whole stream, documents end to end.

    Raises: ValueError naming file, what is there, what was expected and the fix, if anything does not fit.
    """

    def __init__(self, prefix: Path) -> None:
        self.num_tokens, self.num_documents, dtype = _read_index(prefix)
        path = bin_path(prefix)
        if not path.is_file():
            raise ValueError(f"{path} is missing, {idx_path(prefix)} is there; write both again (`megamix prepare`)")
        expected, size = self.num_tokens * dtype.itemsize, path.stat().st_size
        if size != expected:
            raise ValueError(
                f"{path} has {size} bytes, its index says {self.num_tokens} tokens of {dtype.name} = {expected} bytes; "
                "the copy is incomplete or the two files are not of one run: write or copy both again"
            )
        if not expected:
            raise ValueError(f"{path} is empty; prepare it from a corpus with text")
        self.tokens: NDArray[np.integer] = np.memmap(path, dtype=dtype, mode="r")  # (num_tokens,) on disk

    def id_outside(self, vocab_size: int) -> int | None:
        """The largest id (or a negative one) of the first stretch that does not fit the vocabulary; None if all fit.

        One pass over the file, because the format has no room for the number, a file beside could be stale or
        absent, and a sample proves nothing. A wrong vocabulary nearly always shows in the first stretch.
        """
        for start in range(0, self.num_tokens, _SCAN_TOKENS):
            stretch = self.tokens[start : start + _SCAN_TOKENS]
            for token_id in (int(stretch.max()), int(stretch.min())):
                if not 0 <= token_id < vocab_size:
                    return token_id
        return None


def token_file_problems(field: str, prefix: str, *, vocab_size: int, seq_len: int) -> list[str]:
    """Why a job must not start on this prefix, a line each; empty if nothing is wrong. Needs no torch.

    `field` is the key that the prefix came from, such as "data.train".
    """
    try:
        token_file = TokenFile(Path(prefix))
    except (ValueError, OSError) as error:
        return [f"{field} = {prefix!r}: {error}"]
    problems = []
    if token_file.num_tokens < seq_len + 1:
        problems.append(
            f"{field} = {prefix!r}: {token_file.num_tokens} tokens are fewer than one sample of "
            f"model.seq_len + 1 = {seq_len + 1}; shorten model.seq_len or prepare more text"
        )
    token_id = token_file.id_outside(vocab_size)
    if token_id is not None:
        problems.append(
            f"{field} = {prefix!r}: holds token id {token_id}, but model.vocab_size = {vocab_size} allows 0 to "
            f"{vocab_size - 1}; set model.vocab_size to the size of the vocabulary that wrote the file"
            + (f" (at least {token_id + 1})" if token_id >= 0 else " or write the file again")
        )
    return problems


def _index_bytes(lengths: NDArray[np.int64], dtype: "np.dtype[np.integer]") -> bytes:
    """PREFIX.idx of documents of one sequence each."""
    assert lengths.max(initial=0) < 2**31, "the format counts a document's tokens in int32"
    starts = np.concatenate([[0], np.cumsum(lengths)])[:-1] * dtype.itemsize
    header = _HEADER.pack(_MAGIC, _VERSION, _CODES[dtype], len(lengths), len(lengths) + 1)
    documents = np.arange(len(lengths) + 1)
    return header + lengths.astype("<i4").tobytes() + starts.astype("<i8").tobytes() + documents.astype("<i8").tobytes()


def _read_index(prefix: Path) -> tuple[int, int, "np.dtype[np.integer]"]:
    """Number of tokens, number of documents and dtype of the tokens, after every check that the index allows."""
    path = idx_path(prefix)
    if not path.is_file():
        hint = "give the prefix without its ending" if prefix.suffix in (".bin", ".idx") else "run `megamix prepare`"
        raise ValueError(f"{path} is missing; expected PREFIX.idx beside PREFIX.bin: {hint}")
    content = np.memmap(path, dtype=np.uint8, mode="r") if path.stat().st_size else np.empty(0, np.uint8)
    if content.size < _HEADER.size:
        raise ValueError(f"{path} has {content.size} bytes, the header alone has {_HEADER.size}; copy it again")
    magic, version, code, num_sequences, num_boundaries = _HEADER.unpack(content[: _HEADER.size].tobytes())
    if magic != _MAGIC or version != _VERSION:
        raise ValueError(
            f"{path} starts with {magic!r} version {version}, expected {_MAGIC!r} version {_VERSION}: "
            "it is no token index; point the prefix at files in Megatron's .bin/.idx format"
        )
    if code not in _DTYPES or "f" in _DTYPES[code]:
        raise ValueError(f"{path} has dtype code {code}, expected an integer one of 1, 2, 3, 4, 5, 8; write it again")
    # Every count is held against the file's size before anything is allocated by it.
    expected = _HEADER.size + (4 + 8) * num_sequences + 8 * num_boundaries
    if content.size != expected:
        raise ValueError(
            f"{path} has {content.size} bytes, its header says {num_sequences} sequences and {num_boundaries} document "
            f"borders = {expected} bytes; the copy is incomplete or damaged: copy or write it again"
        )
    dtype = np.dtype(_DTYPES[code])
    body = content[_HEADER.size :].tobytes()
    lengths = np.frombuffer(body, "<i4", num_sequences).astype(np.int64)
    starts = np.frombuffer(body, "<i8", num_sequences, 4 * num_sequences)
    documents = np.frombuffer(body, "<i8", num_boundaries, 12 * num_sequences)
    ends = np.cumsum(lengths) * dtype.itemsize
    if (lengths < 0).any() or (starts != ends - lengths * dtype.itemsize).any():
        raise ValueError(f"{path}: sequences do not lie end to end in the .bin; the index is damaged: write it again")
    if not num_boundaries or documents[0] != 0 or documents[-1] != num_sequences or (np.diff(documents) < 0).any():
        raise ValueError(f"{path}: document borders do not run from 0 to {num_sequences}; write it again")
    return int(lengths.sum()), num_boundaries - 1, dtype
