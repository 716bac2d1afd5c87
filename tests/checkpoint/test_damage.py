"""A checkpoint that is not what was written is refused, the file named, and the one before it is loaded."""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megamix.checkpoint.load import newest_checkpoint
from megamix.checkpoint.tensor_file import read_into, tensor_starts
from megamix.checkpoint.verify import read_checkpoint
from tests.checkpoint.faults import listing
from tests.checkpoint.state import alone, resume, save_steps
from tests.conftest import FULL

FLIPS, TRUNCATIONS, CLEAN = (200, 50, 100) if FULL else (60, 18, 30)
OLDER, NEWER = "step_00000001", "step_00000002"
FILES = ("manifest.json", "rank_00000.safetensors", "rank_00001.safetensors")


@pytest.fixture(scope="module")
def ready(run_ranks, tmp_path_factory) -> Path:
    """Two checkpoints of two ranks."""
    folder = tmp_path_factory.mktemp("ready") / "checkpoints"
    run_ranks(save_steps, 2, folder, [1, 2])
    return folder


def refuses(ready: Path, folder: Path, hurt: Callable[[Path], None], named: str, caplog) -> None:
    """Hurt the newer checkpoint of a copy: it is refused in one line that names the file, and the older one loads."""
    shutil.copytree(ready, folder)
    hurt(folder / NEWER)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="megamix"):
        found = newest_checkpoint(folder, alone())
    assert found is not None
    assert found.path.name == OLDER
    (line,) = (record.getMessage() for record in caplog.records)
    assert named in line
    kept, aside = listing(folder)
    assert (kept, aside.partition("-")[0]) == (OLDER, f"{NEWER}.damaged")
    shutil.rmtree(folder)


def _flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_one_wrong_bit_anywhere_is_found(ready: Path, tmp_path: Path, caplog) -> None:
    rng = random.Random(0)
    for number in range(FLIPS):
        name = FILES[number % len(FILES)]
        bit = rng.randrange(8 * (ready / NEWER / name).stat().st_size)
        refuses(ready, tmp_path / "copy", lambda path, name=name, bit=bit: _flip(path / name, bit), name, caplog)


def test_a_file_that_ends_early_is_found(ready: Path, tmp_path: Path, caplog) -> None:
    rng = random.Random(1)
    for number in range(TRUNCATIONS):
        name = FILES[number % len(FILES)]
        size = (ready / NEWER / name).stat().st_size
        length = (0, size - 1, rng.randrange(size))[number % 3]

        def truncate(path: Path, name: str = name, length: int = length) -> None:
            (path / name).write_bytes((path / name).read_bytes()[:length])

        refuses(ready, tmp_path / "copy", truncate, name, caplog)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_gone_is_found(ready: Path, tmp_path: Path, caplog, name: str) -> None:
    refuses(ready, tmp_path / "copy", lambda path: (path / name).unlink(), name, caplog)


@pytest.mark.parametrize("name", FILES[1:])
def test_a_file_of_another_step_is_found(ready: Path, tmp_path: Path, caplog, name: str) -> None:
    refuses(ready, tmp_path / "copy", lambda path: shutil.copy(ready / OLDER / name, path / name), name, caplog)


def test_files_that_changed_places_are_found(ready: Path, tmp_path: Path, caplog) -> None:
    def swap(path: Path) -> None:
        one, other = (path / name for name in FILES[1:])
        one.rename(path / "aside")
        other.rename(one)
        (path / "aside").rename(other)

    refuses(ready, tmp_path / "copy", swap, FILES[1], caplog)


def test_a_good_checkpoint_is_never_refused(ready: Path) -> None:
    for _ in range(CLEAN):
        found = newest_checkpoint(ready, alone())
        assert found is not None
        assert found.path.name == NEWER
        assert read_checkpoint(ready / OLDER).manifest.applied_updates == 1
    assert listing(ready) == [OLDER, NEWER]


def test_a_file_that_is_cut_after_it_was_verified_fails_the_load(ready: Path, tmp_path: Path) -> None:
    shutil.copytree(ready, tmp_path / "copy")
    file = tmp_path / "copy" / NEWER / FILES[1]
    start = max(tensor_starts(file).values())
    tensor = torch.zeros((file.stat().st_size - start) // 4)
    with open(file, "r+b", buffering=0) as handle:
        read_into(tensor, handle, start)
        assert tensor.count_nonzero()
        handle.truncate(start + 4)
        with pytest.raises(OSError, match=f"{FILES[1]} has become shorter"):
            read_into(tensor, handle, start)


@pytest.mark.parametrize("name", FILES)
def test_what_one_rank_finds_all_ranks_refuse(run_ranks, ready: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(ready, folder)
    _flip(folder / NEWER / name, 8 * (folder / NEWER / name).stat().st_size - 1000)
    assert run_ranks(resume, 2, folder) == [(1, [])] * 2


def test_where_none_is_good_there_is_none(ready: Path, tmp_path: Path) -> None:
    shutil.copytree(ready, tmp_path / "copy")
    for name in (OLDER, NEWER):
        _flip(tmp_path / "copy" / name / FILES[1], 9999)
    assert newest_checkpoint(tmp_path / "copy", alone()) is None
