"""A copy of a checkpoint is whole or not there at every instant, bit for bit the source, never in place of another one,
and none of a damaged source; `megamix checkpoint copy` makes it.
"""

import errno
import shutil
from pathlib import Path
from unittest import mock

import pytest

from megamix.checkpoint.copying import copy_checkpoint
from megamix.checkpoint.folder import Files, checkpoints
from megamix.checkpoint.verify import verify_checkpoint
from megamix.cli.verbs import main
from tests.checkpoint.faults import FaultyFiles, listing
from tests.checkpoint.state import resume, save_steps

NAME = "step_00000002"


@pytest.fixture
def source(tmp_path):
    save_steps(tmp_path / "checkpoints", [1, 2])
    return tmp_path / "checkpoints" / NAME


@pytest.fixture
def target(tmp_path):
    (tmp_path / "copies").mkdir()
    return tmp_path / "copies"


def _content(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_a_copy_is_the_source_and_a_second_one_writes_nothing(source, target):
    assert copy_checkpoint(source, target) == target / NAME
    assert _content(target / NAME) == _content(source)
    assert resume(target) == (2, [])
    files = FaultyFiles()
    assert copy_checkpoint(source, target, files) == target / NAME
    assert files.calls == []


def test_a_kill_at_any_call_leaves_whole_copies_and_the_next_copy_removes_the_rest(source, target, tmp_path):
    copy_checkpoint(source.with_name("step_00000001"), target)
    killed = []

    class Watched(FaultyFiles):
        def count(self, name, arguments):
            killed.append(Path(shutil.copytree(target, tmp_path / f"killed_{len(killed)}")))  # as a kill would leave it
            super().count(name, arguments)

    files = Watched()
    copy_checkpoint(source, target, files)
    assert len(killed) > 10
    for folder, call in zip(killed, files.calls, strict=True):
        for path in checkpoints(folder):
            verify_checkpoint(path)
        copy_checkpoint(source, folder)
        assert listing(folder) == ["step_00000001", NAME], call


def test_a_disk_that_fails_at_any_call_leaves_no_part(source, target):
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    files = FaultyFiles()
    copy_checkpoint(source, target, files)
    for at, call in enumerate(files.calls[:-1]):  # after the rename only the folder's sync is left
        shutil.rmtree(target)
        target.mkdir()
        with pytest.raises(OSError, match="No space left"):
            copy_checkpoint(source, target, FaultyFiles(at, full))
        assert listing(target) == [], call


def test_without_room_or_of_a_damaged_source_or_on_a_disk_that_stores_other_bytes_there_is_no_copy(source, target):
    class Lies(Files):
        def write(self, file, chunk):
            super().write(file, memoryview(bytes(chunk[:-1]) + bytes([chunk[-1] ^ 1])))

    with (
        mock.patch.object(Files, "free_space", return_value=1000),
        pytest.raises(OSError, match="a checkpoint takes 0 MiB, 0 MiB are free"),
    ):
        copy_checkpoint(source, target)
    with pytest.raises(OSError, match="the copy is not what was written"):
        copy_checkpoint(source, target, Lies())
    file = source / "rank_00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x55")
    with pytest.raises(ValueError, match="its checksum is not that"):
        copy_checkpoint(source, target)
    assert listing(target) == []


def test_another_checkpoint_of_the_same_update_keeps_its_name(source, target, tmp_path):
    save_steps(source.parent, [2], bucket_size=None)
    again = source.with_name(f"{NAME}.1")
    assert copy_checkpoint(again, target) == target / again.name, "the newer one comes first, under its own name"
    assert copy_checkpoint(source, target) == target / NAME
    save_steps(tmp_path / "branch", [2], bucket_size=500)
    assert copy_checkpoint(tmp_path / "branch" / NAME, target) == target / f"{NAME}.2"
    assert _content(target / NAME) == _content(source)


def test_the_verb_copies_a_run_both_ways_and_tells_what_is_damaged(source, tmp_path, capsys):
    run, copies = source.parents[1], tmp_path / "far/mine"
    assert main(["checkpoint", "copy", str(run), str(copies)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": is ")[0] for line in lines] == [NAME, "step_00000001"]
    assert listing(copies) == ["checkpoints"], "its lock is gone"
    (source / "rank_00000.safetensors").write_bytes(b"")
    assert main(["checkpoint", "copy", str(run), str(tmp_path / "third")]) == 1
    assert f"{source / 'rank_00000.safetensors'}: " in capsys.readouterr().err
    assert main(["checkpoint", "copy", str(copies / "checkpoints" / NAME), str(tmp_path / "back")]) == 0
    assert resume(tmp_path / "back/checkpoints") == (2, [])
