"""Pointers of Git LFS, which a clone without `git lfs` holds in place of large files."""

from pathlib import Path

_POINTER = b"version https://git-lfs.github.com/spec/"


def refuse_pointer(path: Path) -> None:
    """Raises: ValueError if a file is a pointer; OSError."""
    with path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise ValueError(f"{path} is a Git LFS pointer, not the file: run git lfs pull there, or hf download")
