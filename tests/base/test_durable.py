"""A file that a run writes is whole or as it was, and its mode follows the umask."""

import errno
import os
import stat
from pathlib import Path

import pytest

from megamix.base.durable import remove_asides, still_names, write_text, written_aside


@pytest.fixture
def target(tmp_path):
    path = tmp_path / "target"
    path.write_text("precious")
    return path


@pytest.fixture(params=[0o022, 0o077])
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_a_replaced_file_no_longer_leads_to_an_open_one_but_a_link_to_it_does(tmp_path, target):
    (tmp_path / "link").symlink_to(target)  # runs/mine/metrics.jsonl on a scratch disk
    with target.open() as file:
        assert still_names(tmp_path / "link", file.fileno())
        write_text(target, "new")
        assert not still_names(target, file.fileno())
        target.unlink()
        assert not still_names(target, file.fileno())


def test_modes_are_by_the_umask(tmp_path, umask):
    write_text(tmp_path / "aside", "")
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o666 & ~umask}


def test_what_fails_while_it_is_written_leaves_nothing_and_is_named(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_text("as it was")

    def fail(descriptor):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=f"Input/output error: .{path}"):
        write_text(path, "new")
    assert path.read_text() == "as it was"
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path, target):
    with written_aside(tmp_path / "file") as file:
        left = Path(file.name)
        assert left.name.startswith("file.partial-")
    names = ["other.partial-1234", "file", "file.txt"]
    for name in names:
        (tmp_path / name).write_text(name)
    left.write_text("half")
    (tmp_path / "file.partial-5678").symlink_to(target)
    (tmp_path / "file.partial-9abc").mkdir()
    remove_asides(tmp_path, "file")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names, "target"])
    assert target.read_text() == "precious"
