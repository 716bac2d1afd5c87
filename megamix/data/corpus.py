"""Text that is already on the machine: which files, in which order, with which checksums.

Nothing is downloaded and nothing is copied: files are read where they lie.
"""

import hashlib
import importlib.util
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# Directories without prose or with code that is not there on every machine (distributions strip tests and idlelib).
_LEFT_OUT = frozenset(
    {"test", "tests", "idle_test", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """A directory of text files. Hidden files, hidden directories and `left_out` directories are not read."""

    flag: str  # how the user asked for it, for messages and the manifest
    root: Path
    suffix: str = ""  # "" = every file
    left_out: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class CorpusFile:
    path: str  # relative to the root, "/" between parts on every system
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Listing:
    """What a corpus holds: files in reading order, and the files that are no UTF-8 text."""

    files: tuple[CorpusFile, ...]
    undecodable: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


def named_corpus(name: str) -> Corpus:
    """The corpus of `--corpus NAME`: "stdlib" (about 11 MB of Python) or "torch" (about 46 MB).

    Raises: ValueError for another name.
    """
    if name == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
    elif name == "torch":
        spec = importlib.util.find_spec("torch")  # finds the folder without the second that importing torch takes
        assert spec is not None, "torch is a dependency of this package"
        assert spec.origin is not None, "torch has an __init__.py"
        root = Path(spec.origin).parent
    else:
        raise ValueError(f"--corpus {name!r} is unknown; use stdlib or torch, or --input DIR for your own files")
    return Corpus(flag=f"--corpus {name}", root=root, suffix=".py", left_out=_LEFT_OUT)


def directory_corpus(root: Path) -> Corpus:
    """The corpus of `--input DIR`: every text file below a directory of the user's.

    Raises: ValueError if there is no such directory.
    """
    if not root.is_dir():
        raise ValueError(f"--input {str(root)!r} is not a directory; give a directory with text files")
    return Corpus(flag=f"--input {root}", root=root)


def list_corpus(corpus: Corpus) -> Listing:
    """Read every file once: path, size and SHA-256 of each that is UTF-8 text; empty files are passed over.

    Raises: ValueError if no text is left.
    """
    files, undecodable = [], []
    for path in _walk(corpus):
        content = (corpus.root / path).read_bytes()
        if not content:
            continue
        try:
            content.decode("utf-8")
        except UnicodeDecodeError:
            undecodable.append(path)
            continue
        files.append(CorpusFile(path, len(content), hashlib.sha256(content).hexdigest()))
    if not files:
        raise ValueError(
            f"{corpus.flag} holds no text: {corpus.root} has no {corpus.suffix or 'readable'} file that is UTF-8 and "
            f"not empty ({len(undecodable)} not UTF-8); give a directory with text files by --input DIR"
        )
    return Listing(tuple(files), tuple(undecodable))


def read_documents(corpus: Corpus, files: Sequence[CorpusFile]) -> Iterator[tuple[str, str]]:
    """Yield (relative path, text) in the order of `files`.

    Raises: ValueError if a file is no longer what `list_corpus` saw; its checksum in the manifest would be a lie.
    """
    for file in files:
        content = (corpus.root / file.path).read_bytes()
        if hashlib.sha256(content).hexdigest() != file.sha256:
            raise ValueError(f"{corpus.flag}: {file.path} changed while it was being read; run prepare again")
        yield file.path, content.decode("utf-8")


def _walk(corpus: Corpus) -> list[str]:
    """Relative paths of the corpus, sorted as strings: the same on every file system."""
    paths = []
    for folder, subfolders, names in os.walk(corpus.root):
        subfolders[:] = [name for name in subfolders if name not in corpus.left_out and not name.startswith(".")]
        paths += [
            path.relative_to(corpus.root).as_posix()
            for name in names
            if name.endswith(corpus.suffix) and not name.startswith(".") and (path := Path(folder, name)).is_file()
        ]
    return sorted(paths)
