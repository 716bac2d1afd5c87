"""Host without its cards: readings (`probe_*`), and whether they are as expected (`judge_*`). Imports no torch."""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from megamix.base.durable import unwritable
from megamix.base.machine import num_cores
from megamix.tools.doctor.finding import Finding, found, not_here

_MIB, _GIB = 2**20, 2**30
_WRITTEN = 64 * _MIB  # bytes written to judge a disk


def refusal(operation: Callable[[], object]) -> str:
    """Return why the system refuses an operation; "" if it does not."""
    try:
        operation()
    except (OSError, ValueError) as error:
        return os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
    return ""


def probe_disk(folder: Path) -> tuple[Path, int, float, dict[str, str]]:
    """Write, sync, lock, map and rename a file in the folder, or in the one in which that folder would be made.

    Returns the folder that was used, the bytes free for this user, the bytes/s written, and the reason of each refusal.
    """
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir())
    refused, start_s = dict[str, str](), time.perf_counter()

    def try_all() -> None:
        with TemporaryDirectory(prefix="megamix-doctor-", dir=existing) as place:
            path = Path(place, "file")
            file = path.open("w+b", buffering=0)
            operations: dict[str, Callable[[], object]] = {
                "write": lambda: [file.write(bytes(_MIB)) for _ in range(_WRITTEN // _MIB)],
                "fsync": lambda: os.fsync(file.fileno()),
                "lock": lambda: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB),
                "mmap": lambda: mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ).close(),
                "rename": lambda: path.rename(path.with_name("renamed")),
            }
            refused.update({name: why for name, operation in operations.items() if (why := refusal(operation))})
            file.close()

    if why := refusal(try_all) or unwritable(folder):
        refused["a new folder"] = why
    written = _WRITTEN / (time.perf_counter() - start_s)
    return existing, shutil.disk_usage(existing).free, written, refused


def judge_disk(folder: Path, free: int, written: float, refused: Mapping[str, str]) -> list[Finding]:
    """Judge whether runs can save there: every operation, the speed, the space."""
    told = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
    return [
        found("file system", f"{folder}: {told or 'nothing refused'}", bool(refused)),
        found("disk", f"{written / 1e6:,.0f} MB/s", written < 100e6),
        found("free space", f"{free / _GIB:,.1f} GiB", free < 10 * _GIB),
    ]


def probe_hostname() -> tuple[str, dict[str, bool]]:
    """Return this machine's name, and the addresses to which the name resolves: for each, whether it belongs to this
    machine.
    """
    name, own = socket.gethostname(), dict[str, bool]()
    try:
        infos = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except OSError:
        return name, {}
    for family, kind, _, _, address in infos:
        with socket.socket(family, kind) as end:
            own[str(address[0])] = not refusal(partial(end.bind, address))
    return name, own


def judge_hostname(name: str, own: Mapping[str, bool], *, several: bool = False) -> Finding:
    """Judge the address of the machine's name, at which Gloo and NCCL listen. `several`: other machines must reach
    it.
    """
    told = ", ".join(f"{address}{'' if here else ' (not of this machine)'}" for address, here in own.items())
    hidden = several and all(address.startswith(("127.", "::1")) for address in own)
    where = "an address that the other machines reach" if several else "an address of this machine"
    wrong = hidden or not any(own.values())
    return found("hostname", f"{name} is {told or 'not resolved'}", wrong, name=name, expected=where)


def meeting_port(environment: Mapping[str, str]) -> int:
    """Return the port of this machine at which launch/pretrain.sh lets the ranks of many machines meet, or 0.

    It is 0 on machines that do not host the meeting, and on one machine alone, whose ranks meet at any free port.
    """
    is_first = environment.get("NODE_RANK", "0") == "0" and environment.get("NNODES", "1") != "1"
    return int(environment.get("MASTER_PORT", "29500")) if is_first else 0


def probe_ports(port: int) -> tuple[str, str]:
    """Return why a connection over loopback fails, and why nobody can listen at `port`; "" for each that works."""

    def connect() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5.0).close()

    return refusal(connect), refusal(lambda: socket.create_server(("", port)).close())


def judge_ports(loopback: str, taken: str, port: int) -> list[Finding]:
    """Judge the ports. Ranks of one machine meet on loopback at any port. Ranks of several machines meet at `port` of
    the first one; 0: this machine hosts no meeting.
    """
    none = "ranks of one machine meet at any free port, those of several (NNODES) at MASTER_PORT of the first"
    at = found("port", f"{port}: {taken or 'free'}", bool(taken)) if port else not_here("port", none)
    return [found("loopback", loopback or "connects", bool(loopback)), at]


def judge_shm(free: int, *, gpus: bool) -> Finding:
    """Judge the space in /dev/shm, in bytes. NCCL's ranks of one machine meet there; Gloo's do without."""
    return found("/dev/shm", f"{free / _GIB:.2f} GiB free", gpus and free < _GIB)


def judge_cores(load: float) -> Finding:
    """Judge the load by other processes, which makes every figure worse. It is the whole machine's."""
    cores, machine = num_cores(), os.cpu_count() or 1
    of = f" of {machine}" if cores < machine else ""
    return found("cores", f"{cores}{of}, load {load:.1f}", load > machine / 2)
