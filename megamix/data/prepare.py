"""`megamix prepare`: a corpus becomes tokenizer.json, train and valid token files and manifest.json in one directory.

Flags of the command, in the words of this module:
  --corpus stdlib|torch  text already on the machine -> `named_corpus(name)`; the default is stdlib
  --input DIR            the user's own text files, instead of --corpus -> `directory_corpus(Path(DIR))`
  --output DIR           must not exist, be empty, or hold the result of the same request
  --vocab-size N         at least 257, END_OF_TEXT included
  --valid-fraction F     share of the documents that training never sees, 0 <= F < 1; 0 writes no valid files
"""

import hashlib
import itertools
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megamix.data.corpus import Corpus, CorpusFile, Listing, list_corpus, read_documents
from megamix.data.durable import sync_directory, write_synced
from megamix.data.token_file import TokenFileWriter, bin_path, idx_path
from megamix.data.tokenizer import Tokenizer, check_vocab_size

MANIFEST_NAME = "manifest.json"
TOKENIZER_NAME = "tokenizer.json"
_FORMAT = 1
_DOCUMENTS_PER_BATCH = 256  # enough to keep every core of the encoder busy, few enough to hold in memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What lies in the output directory now."""

    output_dir: Path
    reused: bool  # True: it lay there before, from the same request
    manifest: dict[str, Any]

    def summary(self) -> str:
        """One line for the console."""
        counts = [
            f"{name} {part['num_documents']} documents, {part['num_tokens']:,} tokens"
            for name, part in self.manifest["parts"].items()
        ]
        return (
            f"{self.output_dir}: {'already prepared' if self.reused else 'prepared'}; "
            f"vocabulary {self.manifest['vocab_size']}; {'; '.join(counts)}; "
            f"{len(self.manifest['undecodable'])} files skipped (not UTF-8)"
        )


def prepare_corpus(corpus: Corpus, output_dir: Path, *, vocab_size: int, valid_fraction: float) -> Prepared:
    """Train the tokenizer on the training documents, encode everything, commit by one rename.

    All files are written to a directory beside the output, which gets its name last: a killed prepare leaves an
    `OUTPUT.partial-*` that nothing reads and that may be deleted, and the output as it was.
    Raises: ValueError naming flag, value and fix; nothing is written then.
    """
    check_vocab_size(vocab_size)
    if not 0 <= valid_fraction < 1:
        raise ValueError(f"--valid-fraction {valid_fraction} must lie in 0 <= F < 1; 0.05 keeps one document in twenty")
    listing = list_corpus(corpus)
    request = _request(corpus, listing, vocab_size, valid_fraction)
    output_dir = output_dir.resolve()
    if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        return Prepared(output_dir=output_dir, reused=True, manifest=_finished_manifest(output_dir, request))
    parts = _split(listing.files, valid_fraction)

    partial_dir = output_dir.with_name(f"{output_dir.name}.partial-{uuid.uuid4().hex[:8]}")
    partial_dir.mkdir(parents=True)
    try:
        manifest = _write(corpus, parts, partial_dir, vocab_size) | {
            "undecodable": list(listing.undecodable),
            "request": request,
        }
        write_synced(partial_dir / MANIFEST_NAME, json.dumps(manifest, indent=1) + "\n")
        sync_directory(partial_dir)
        os.rename(partial_dir, output_dir)  # the commit; refused by the system if the output has been filled meanwhile
    except BaseException:
        shutil.rmtree(partial_dir, ignore_errors=True)
        raise
    sync_directory(output_dir.parent)
    return Prepared(output_dir=output_dir, reused=False, manifest=manifest)


def _request(corpus: Corpus, listing: Listing, vocab_size: int, valid_fraction: float) -> dict[str, Any]:
    """Everything that decides the result: two equal requests write the same bytes."""
    return {
        "format": _FORMAT,
        "corpus": corpus.flag,
        "vocab_size": vocab_size,
        "valid_fraction": valid_fraction,
        "files": [asdict(file) for file in listing.files],
    }


def _finished_manifest(output_dir: Path, request: dict[str, Any]) -> dict[str, Any]:
    """The manifest of a directory that holds the complete result of this request.

    Raises: ValueError if it holds anything else.
    """
    other = f"--output {str(output_dir)!r}"
    fix = "choose another --output or delete it first"
    try:
        manifest: dict[str, Any] = json.loads((output_dir / MANIFEST_NAME).read_text(encoding="utf-8"))
        there, sizes = manifest["request"], manifest["output_bytes"]
        different = [key for key in request if request[key] != there.get(key)]
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise ValueError(f"{other} is not empty and holds no result of prepare ({error!r}); {fix}") from error
    if different:
        details = ", ".join(
            "other files or other contents" if key == "files" else f"{key} {there.get(key)!r}, asked {request[key]!r}"
            for key in different
        )
        raise ValueError(f"{other} holds the result of another request: {details}; {fix}")
    for name, num_bytes in sizes.items():
        path = output_dir / name
        size = path.stat().st_size if path.is_file() else None
        if size != num_bytes:
            raise ValueError(f"{other}: {name} has {size} bytes, the manifest says {num_bytes}; {fix}")
    return manifest


def _split(files: Sequence[CorpusFile], valid_fraction: float) -> dict[str, list[CorpusFile]]:
    """Whole documents to train and valid, by a hash of the path: adding a file moves no other file.

    Raises: ValueError if nothing would be left to train on.
    """
    if not valid_fraction:
        return {"train": list(files)}
    draws = {file.path: int.from_bytes(hashlib.sha256(file.path.encode()).digest()[:8]) / 2**64 for file in files}
    # A document as long as half of all validation stays in training: the loss would be that of one document.
    # (Seen in the standard library: one file of English prose made up two thirds of it.)
    longest = valid_fraction * sum(file.num_bytes for file in files) / 2
    valid = {file.path for file in files if draws[file.path] < valid_fraction and file.num_bytes <= longest}
    valid = valid or {min(draws, key=draws.__getitem__)}  # of a handful of files perhaps none qualifies
    parts = {
        "train": [file for file in files if file.path not in valid],
        "valid": [file for file in files if file.path in valid],
    }
    if not parts["train"]:
        raise ValueError(
            f"--valid-fraction {valid_fraction} takes all {len(files)} documents, none is left to train on; "
            "lower it (0 for no validation) or give more files"
        )
    return parts


def _write(corpus: Corpus, parts: dict[str, list[CorpusFile]], folder: Path, vocab_size: int) -> dict[str, Any]:
    """Write tokenizer and token files; return what the manifest says of them."""
    tokenizer = Tokenizer.train((text for _, text in read_documents(corpus, parts["train"])), vocab_size)
    tokenizer.save(folder / TOKENIZER_NAME)
    counts = {}
    outputs = [folder / TOKENIZER_NAME]
    for name, files in parts.items():
        with TokenFileWriter(folder / name, tokenizer.vocab_size) as writer:
            for texts in _batches(corpus, files):
                for token_ids in tokenizer.encode_documents(texts):
                    writer.add(token_ids)
        num_bytes = sum(file.num_bytes for file in files)  # of text: what `evaluate` counts bits a byte by
        counts[name] = {"num_documents": writer.num_documents, "num_tokens": writer.num_tokens, "num_bytes": num_bytes}
        outputs += [bin_path(folder / name), idx_path(folder / name)]
    return {
        "vocab_size": tokenizer.vocab_size,  # may be below the size asked for: a small corpus has few pairs
        "parts": counts,
        "output_bytes": {path.name: path.stat().st_size for path in outputs},
    }


def _batches(corpus: Corpus, files: Sequence[CorpusFile]) -> Iterator[list[str]]:
    texts = (text for _, text in read_documents(corpus, files))
    while batch := list(itertools.islice(texts, _DOCUMENTS_PER_BATCH)):
        yield batch
