"""Makes Linux look like a laptop's macOS to megamix, in every process with this folder first on PYTHONPATH. Python's
names that only Linux has are gone, so are the folders below, and the machine's name has no address.

psutil, torch and Python's own library still see the folders: they are written for either system.
"""

import fnmatch
import os
import socket
import sys
from importlib import import_module

HIDDEN = ("/proc/", "/sys/", "/dev/shm/")
# By module, as patterns.
LINUX_ONLY = {
    "os": "CLONE_* EFD_* O_DIRECT O_LARGEFILE O_NOATIME O_PATH O_RSYNC O_TMPFILE PIDFD_* POSIX_FADV_* RWF_* "
    "SCHED_BATCH SCHED_IDLE SPLICE_* XATTR_* copy_file_range eventfd* fdatasync getrandom getresgid getresuid "
    "getxattr listxattr memfd_create pidfd_open pipe2 posix_fadvise posix_fallocate removexattr sched_get* "
    "sched_set* setns setresgid setresuid setxattr splice unshare waitid",
    "time": "CLOCK_BOOTTIME CLOCK_TAI pthread_getcpuclockid",
    "signal": "SIGCLD SIGPOLL SIGPWR SIGRTMAX SIGRTMIN SIGSTKFLT pidfd_send_signal sigtimedwait sigwaitinfo",
    "select": "EPOLL* epoll",
    "resource": "RLIMIT_MSGQUEUE RLIMIT_NICE RLIMIT_RT* RLIMIT_SIGPENDING RUSAGE_THREAD prlimit",
    "mmap": "MADV_DO* MADV_HUGEPAGE MADV_HWPOISON MADV_MERGEABLE MADV_NOHUGEPAGE MADV_REMOVE MAP_POPULATE MAP_STACK",
    "fcntl": "F_ADD_SEALS F_GETLEASE F_GETPIPE_SZ F_GET_SEALS F_NOTIFY F_OFD_* F_SETLEASE F_SETPIPE_SZ",
    "socket": "AF_NETLINK AF_VSOCK MSG_NOSIGNAL SOCK_CLOEXEC SOCK_NONBLOCK SO_BINDTODEVICE SO_PEERCRED SO_PEERSEC "
    "TCP_CORK TCP_DEFER_ACCEPT TCP_QUICKACK TCP_USER_TIMEOUT",
}
NAME = "laptop.local"
_LIBRARY = os.path.dirname(os.__file__)
_OWN = __file__.removesuffix("tests/another_system/sitecustomize.py") + "megamix/"


def _take_away():
    for module_name, names in LINUX_ONLY.items():
        module = import_module(module_name)
        for pattern in names.split():
            for name in fnmatch.filter([*vars(module)], pattern):
                delattr(module, name)


def _refuse(path):
    """Raise FileNotFoundError if megamix, or the library on its behalf, names a hidden folder or what is below it."""
    if not isinstance(path, str | os.PathLike) or not f"{os.fspath(path)}/".startswith(HIDDEN):
        return
    frame = sys._getframe(1)
    while frame.f_back and (frame.f_code.co_filename == __file__ or _is_plain(frame.f_code.co_filename)):
        frame = frame.f_back
    if frame.f_code.co_filename.startswith(_OWN):
        raise FileNotFoundError(2, "No such file or directory", os.fspath(path))


def _is_plain(file):
    """Return whether a file of the library does what its caller asks for: pathlib, shutil, os, open."""
    return file.startswith("<frozen") or (file.startswith(_LIBRARY) and "site-packages" not in file)


def _without_hidden(call):
    def refusing(path, *more, **named):
        _refuse(path)
        return call(path, *more, **named)

    return refusing


def _no_address(host, *more, **named):
    if host == NAME:
        raise socket.gaierror(socket.EAI_NONAME, "nodename nor servname provided, or not known")
    return _getaddrinfo(host, *more, **named)


_take_away()
for _name in ("stat", "lstat", "access", "statvfs", "readlink"):
    setattr(os, _name, _without_hidden(getattr(os, _name)))
sys.addaudithook(lambda event, given: _refuse(given[0]) if event in ("open", "os.listdir", "os.scandir") else None)
_getaddrinfo, socket.getaddrinfo, socket.gethostname = socket.getaddrinfo, _no_address, lambda: NAME
