"""A disk that refuses what a test's process writes to one folder, for as long as the test wants."""

import builtins
import errno
import io
import os
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

FULL, BROKEN, NO_INODES = "full", "broken", "no inode left"


class BrokenDisk:
    """Disk with a fault, or none.

    `fault`: FULL takes `room` more bytes and new empty files; BROKEN takes and gives nothing (EIO); NO_INODES lets
    existing files grow; None: the disk works.
    """

    def __init__(self, folder, only=""):
        self.fault = None
        self.room = 0
        self.refused = 0  # number of calls
        self._folder, self._only = folder.resolve(), only

    def _covers(self, file):
        name = os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else os.path.abspath(os.fsdecode(file))
        return Path(name).is_relative_to(self._folder) and self._only in name

    def refuse(self, number, file):
        self.refused += 1
        return OSError(number, os.strerror(number), *([] if isinstance(file, int) else [str(file)]))

    def check_new(self, file):
        if isinstance(file, int) or self.fault is None or not self._covers(file):
            return
        if self.fault == BROKEN:
            raise self.refuse(errno.EIO, file)
        if self.fault == NO_INODES or self.room == 0:  # a full disk has no room for a folder's new entry, either
            raise self.refuse(errno.ENOSPC, file)

    def check_write(self, descriptor, size):
        """Return how many of the bytes the disk takes."""
        if self.fault not in (FULL, BROKEN) or not self._covers(descriptor):
            return size
        if self.fault == BROKEN or self.room == 0:
            raise self.refuse(errno.EIO if self.fault == BROKEN else errno.ENOSPC, descriptor)
        taken, self.room = min(self.room, size), self.room - min(self.room, size)
        return taken


@contextmanager
def broken_disk(folder, only=""):
    """Break the disk of a folder in the block. `only`: a part of the paths of the files that it affects."""
    disk = BrokenDisk(folder, only)
    os_open, os_write, os_fsync, io_open = os.open, os.write, os.fsync, io.open

    def open_descriptor(path, flags, *rest, **more):
        if flags & os.O_CREAT and not os.path.lexists(path):
            disk.check_new(path)
        return os_open(path, flags, *rest, **more)

    def open_file(file, mode="r", *rest, **more):
        if set(mode) & set("wxa"):
            disk.check_new(file)
        return io_open(file, mode, *rest, **more)

    def write(descriptor, content):
        return os_write(descriptor, content[: disk.check_write(descriptor, len(content))])

    def fsync(descriptor):
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        if disk.fault == BROKEN and disk._covers(number):
            raise disk.refuse(errno.EIO, number)
        os_fsync(descriptor)

    with (
        mock.patch.object(os, "open", open_descriptor),
        mock.patch.object(os, "write", write),
        mock.patch.object(os, "fsync", fsync),
        mock.patch.object(io, "open", open_file),
        mock.patch.object(builtins, "open", open_file),
    ):
        yield disk
