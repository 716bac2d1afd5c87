"""Whoever has a disk that rots, or copies half a folder: a changed bit, and a short, missing or foreign file, are
refused with the file's name on every rank, and the older checkpoint is loaded; no good file is refused.
"""

import errno
import logging
import os
import random
import shutil
from dataclasses import replace

import pytest
import torch

from megamix.checkpoint.folder import Files
from megamix.checkpoint.load import load_or_older, newest_checkpoint
from megamix.checkpoint.snapshot import owned_parts
from megamix.checkpoint.verify import read_checkpoint, verify_checkpoint
from tests.checkpoint.faults import listing
from tests.checkpoint.state import alone, differences, fill, fp16_engine, resume, save_steps
from tests.conftest import FULL

FLIPS, TRUNCATIONS, CLEAN = (200, 50, 100) if FULL else (30, 9, 5)
OLDER, NEWER = "step_00000001", "step_00000002"
FILES = ("manifest.json", "rank_00000.safetensors", "rank_00001.safetensors")


@pytest.fixture(scope="module")
def ready(run_ranks, tmp_path_factory):
    """Save two checkpoints of two ranks."""
    folder = tmp_path_factory.mktemp("ready") / "checkpoints"
    run_ranks(save_steps, 2, folder, [1, 2])
    return folder


def refuses(ready, folder, hurt, named, caplog):
    """Damage the newer checkpoint of a copy: it is refused in one line that names the file, and the older one loads."""
    shutil.copytree(ready, folder)
    hurt(folder / NEWER)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="megamix"):
        assert resume(folder) == (1, [])
    (line,) = (record.getMessage() for record in caplog.records)
    assert named in line
    kept, aside = listing(folder)
    assert (kept, aside.partition("-")[0]) == (OLDER, f"{NEWER}.damaged")
    shutil.rmtree(folder)


def _flip(path, bit):
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


@pytest.mark.uncounted
def test_one_wrong_bit_anywhere_is_found(ready, tmp_path, caplog):
    rng = random.Random(0)
    for number in range(FLIPS):
        name = FILES[number % len(FILES)]
        bit = rng.randrange(8 * (ready / NEWER / name).stat().st_size)
        refuses(ready, tmp_path / "copy", lambda path, name=name, bit=bit: _flip(path / name, bit), name, caplog)


@pytest.mark.uncounted
def test_a_file_that_ends_early_is_found(ready, tmp_path, caplog):
    rng = random.Random(1)
    for number in range(TRUNCATIONS):
        name = FILES[number % len(FILES)]
        size = (ready / NEWER / name).stat().st_size
        length = (0, size - 1, rng.randrange(size))[number % 3]

        def truncate(path, name=name, length=length):
            (path / name).write_bytes((path / name).read_bytes()[:length])

        refuses(ready, tmp_path / "copy", truncate, name, caplog)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_gone_is_found(ready, tmp_path, caplog, name):
    refuses(ready, tmp_path / "copy", lambda path: (path / name).unlink(), name, caplog)


@pytest.mark.parametrize("name", FILES[1:])
def test_a_file_of_another_step_is_found(ready, tmp_path, caplog, name):
    refuses(ready, tmp_path / "copy", lambda path: shutil.copy(ready / OLDER / name, path / name), name, caplog)


def test_files_that_changed_places_are_found(ready, tmp_path, caplog):
    def swap(path):
        one, other = (path / name for name in FILES[1:])
        one.rename(path / "aside")
        other.rename(one)
        (path / "aside").rename(other)

    refuses(ready, tmp_path / "copy", swap, FILES[1], caplog)


@pytest.mark.uncounted
def test_a_good_checkpoint_is_never_refused(ready):
    for _ in range(CLEAN):
        assert resume(ready) == (2, [])
        assert verify_checkpoint(ready / OLDER).manifest.applied_updates == 1
    assert listing(ready) == [OLDER, NEWER]


def _newest_loads_as(folder, engine, hurt):
    """Damage the newest checkpoint after its headers were found good. Return the name of the one that is loaded."""
    checkpoint = newest_checkpoint(folder, alone())
    assert checkpoint is not None
    hurt(checkpoint.path)
    found = load_or_older(checkpoint, engine, alone())
    return None if found is None else found.path.name


@pytest.mark.parametrize("length", [1, -1, -3, -10_000])
def test_a_file_that_is_cut_once_its_header_is_read_is_found(ready, tmp_path, length, caplog):
    shutil.copytree(ready, tmp_path / "copy")
    engine = fp16_engine()

    def cut(path):
        file = path / FILES[1]
        os.truncate(file, length % file.stat().st_size)

    assert _newest_loads_as(tmp_path / "copy", engine, cut) == OLDER
    assert differences(engine, 1) == []
    assert f"{FILES[1]}: it became shorter" in caplog.text


@pytest.mark.parametrize("name", FILES)
def test_what_one_rank_finds_all_ranks_refuse(run_ranks, ready, tmp_path, name):
    for size in (2, 3):  # as many ranks as files, and one more, which verifies none
        folder = tmp_path / str(size)
        shutil.copytree(ready, folder)
        _flip(folder / NEWER / name, 8 * (folder / NEWER / name).stat().st_size - 1000)
        assert run_ranks(resume, size, folder) == [(1, [])] * size


def test_a_damaged_one_that_cannot_be_set_aside_is_passed_over(ready, monkeypatch):
    def rename(path, target):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Files, "rename", rename)
    checkpoint, engine = read_checkpoint(ready / NEWER), fp16_engine()
    wrong = [record.model_copy(update={"crc32": record.crc32 ^ 1}) for record in checkpoint.manifest.files]
    manifest = checkpoint.manifest.model_copy(update={"files": tuple(wrong)})
    found = load_or_older(replace(checkpoint, manifest=manifest), engine, alone())
    assert found is not None
    assert (found.path.name, differences(engine, 1)) == (OLDER, [])
    assert listing(ready) == [OLDER, NEWER]


def test_where_none_is_good_there_is_none_and_nothing_damaged_can_train_on(ready, tmp_path):
    folder, engine = tmp_path / "copy", fp16_engine()
    shutil.copytree(ready, folder)
    fill(engine, 5)
    half = [bucket.params.clone() for bucket in engine.buckets]
    for name in (OLDER, NEWER):
        _flip(folder / name / FILES[1], 8 * (folder / name / FILES[1]).stat().st_size - 1000)
    assert _newest_loads_as(folder, engine, lambda path: None) is None
    assert all(part.tensor.isnan().all() for part in owned_parts(engine))
    assert all(map(torch.equal, (bucket.params for bucket in engine.buckets), half))
    assert (int(engine.applied_updates), float(engine.loss_scale.loss_scale)) == (5, 2.0**5)
    assert newest_checkpoint(folder, alone()) is None
