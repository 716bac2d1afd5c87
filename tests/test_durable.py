"""A link, a FIFO or a second name in a folder is replaced, never followed; a file that a run writes is whole, and its
mode follows the umask.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megamix.durable import (
    ForeignFileError,
    create_anew,
    open_own,
    read_own,
    remove_asides,
    write_text,
    written_aside,
)


def _link(path: Path, target: Path) -> None:
    path.symlink_to(target)


def _dangling_link(path: Path, target: Path) -> None:
    path.symlink_to(target.with_name("not there"))


def _second_name(path: Path, target: Path) -> None:
    os.link(target, path)


def _fifo(path: Path, target: Path) -> None:
    os.mkfifo(path)


def _folder(path: Path, target: Path) -> None:
    path.mkdir()


def _device(path: Path, target: Path) -> None:
    path.symlink_to("/dev/zero")


PLANTED = [_link, _dangling_link, _second_name, _fifo, _folder, _device]


@pytest.fixture
def target(tmp_path) -> Path:
    path = tmp_path / "target"
    path.write_text("precious")
    return path


@pytest.fixture(params=[0o022, 0o077])
def umask(request) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY | os.O_APPEND | os.O_CREAT, os.O_RDWR | os.O_CREAT])
@pytest.mark.parametrize("plant", PLANTED)
def test_a_file_that_goes_on_is_refused_by_name_if_it_is_not_ours_alone(
    tmp_path, target, plant: Callable[[Path, Path], None], flags: int
) -> None:
    path = tmp_path / "file"
    plant(path, target)
    with pytest.raises(ForeignFileError, match=f"{path} is a .*: remove it, or put a copy of your own there"):
        open_own(path, flags)
    assert target.read_text() == "precious"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "target"]


def test_a_file_of_another_user_is_refused(target, monkeypatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ForeignFileError, match=f"is a file of another user .uid {os.getuid()}."):
        read_own(target)


def test_a_file_that_changes_between_look_and_open_is_refused(tmp_path, target, monkeypatch) -> None:
    path = tmp_path / "file"
    opened = os.open

    def plant_and_open(name: Path, *rest: int) -> int:
        path.symlink_to(target)
        return opened(name, *rest)

    monkeypatch.setattr(os, "open", plant_and_open)
    with pytest.raises(OSError, match=str(path)) as refused:
        open_own(path, os.O_WRONLY | os.O_CREAT)
    assert refused.value.errno == errno.ELOOP


@pytest.mark.parametrize("plant", [plant for plant in PLANTED if plant is not _folder])
@pytest.mark.parametrize("name", ["file", "file.partial"])
def test_what_is_written_anew_takes_a_place_and_follows_nothing(tmp_path, target, name: str, plant) -> None:
    plant(tmp_path / name, target)
    write_text(tmp_path / "file", "new")
    assert not (tmp_path / "file").is_symlink()
    assert (tmp_path / "file").read_text() == "new"
    with create_anew(tmp_path / name) as file:
        file.write(b"newer")
    assert (tmp_path / name).read_text() == "newer"
    assert target.read_text() == "precious"


def test_modes_are_by_the_umask(tmp_path, umask: int) -> None:
    write_text(tmp_path / "aside", "")
    os.close(open_own(tmp_path / "appended", os.O_WRONLY | os.O_CREAT))
    create_anew(tmp_path / "anew").close()
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o666 & ~umask}


def test_what_fails_while_it_is_written_leaves_nothing_and_is_named(tmp_path, monkeypatch) -> None:
    path = tmp_path / "file"
    path.write_text("as it was")

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=f"Input/output error: .{path}"):
        write_text(path, "new")
    assert path.read_text() == "as it was"
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path, target) -> None:
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
