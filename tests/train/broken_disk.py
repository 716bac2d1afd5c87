"""A disk that refuses what a test's process writes to one folder, for as long as the test wants."""

import builtins
import errno
import io
import os
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

FULL, BROKEN, NO_INODES = "full", "broken", "no inode left"


@contextmanager
def broken_disk(folder, only=""):
    """Break the disk of a folder in the block. `only`: a part of the paths of the files that it affects.

    `fault` of the disk: FULL takes `room` more bytes and new empty files; BROKEN takes and gives nothing (EIO);
    NO_INODES lets existing files grow; None: the disk works. `refused`: number of calls that it has refused.
    """
    disk, home = SimpleNamespace(fault=None, room=0, refused=0), folder.resolve()
    os_open, os_write, os_fsync, io_open = os.open, os.write, os.fsync, io.open

    def is_there(file):
        name = os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else os.path.abspath(os.fsdecode(file))
        return Path(name).is_relative_to(home) and only in name

    def check(file, *faults):
        """Refuse a call on a file or descriptor with one of these faults."""
        is_full = disk.fault != FULL or disk.room == 0  # a full disk has no room for a folder's new entry, either
        if disk.fault in faults and is_full and is_there(file):
            disk.refused += 1
            number = errno.EIO if disk.fault == BROKEN else errno.ENOSPC
            raise OSError(number, os.strerror(number), *([] if isinstance(file, int) else [str(file)]))

    def open_descriptor(path, flags, *rest, **more):
        if flags & os.O_CREAT and not os.path.lexists(path):
            check(path, FULL, BROKEN, NO_INODES)
        return os_open(path, flags, *rest, **more)

    def open_file(file, mode="r", *rest, **more):
        if set(mode) & set("wxa") and not isinstance(file, int):
            check(file, FULL, BROKEN, NO_INODES)
        if "+" in mode and not isinstance(file, int):
            check(file, BROKEN)
        return io_open(file, mode, *rest, **more)

    def write(descriptor, content):
        check(descriptor, FULL, BROKEN)
        if disk.fault == FULL and is_there(descriptor):
            content = content[: disk.room]
            disk.room -= len(content)
        return os_write(descriptor, content)

    def fsync(descriptor):
        check(descriptor if isinstance(descriptor, int) else descriptor.fileno(), BROKEN)
        os_fsync(descriptor)

    with (
        mock.patch.object(os, "open", open_descriptor),
        mock.patch.object(os, "write", write),
        mock.patch.object(os, "fsync", fsync),
        mock.patch.object(io, "open", open_file),
        mock.patch.object(builtins, "open", open_file),
    ):
        yield disk
