"""Listening ports and their addresses; and `python -m tests.network COMMAND ...`: a machine whose name does not resolve
to loopback.

On a cluster it does not. Where the tests run it may, and then Gloo listens on loopback whatever it was told.
"""

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

ADDRESS = "192.0.2.1"  # reserved for documentation; here the machine's second one, in a network of its own

_SET_FLAGS, _SET_ADDRESS = 0x8914, 0x8916  # SIOCSIFFLAGS, SIOCSIFADDR of netdevice(7)
_UP = 0x1
_LISTENS = "0A"  # of /proc/net/tcp


def listening(pid):
    """Addresses and ports at which a process takes connections."""
    links = set()
    for link in list(Path(f"/proc/{pid}/fd").iterdir()):
        with contextlib.suppress(FileNotFoundError):  # closed in this very moment
            links.add(os.readlink(link))
    tables = [Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    return {_address(row[1]) for row in rows if row[3] == _LISTENS and f"socket:[{row[9]}]" in links}


def _address(text):
    """As the kernel prints it: words of four bytes, each in the machine's order."""
    words, port = text.split(":")
    ordered = b"".join(bytes.fromhex(words[at : at + 8])[::-1] for at in range(0, len(words), 8))
    return str(ipaddress.ip_address(ordered)), int(port, 16)


def elsewhere(command):
    """The command that runs `command` there: with a network and a table of hosts of its own."""
    rights = [] if os.geteuid() == 0 else ["--map-root-user"]  # where the system lets users have namespaces
    return ["unshare", *rights, "--net", "--mount", sys.executable, "-m", "tests.network", *command]


def _main(command):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH14x", b"lo", _UP))
        address = struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(ADDRESS))
        fcntl.ioctl(any_socket, _SET_ADDRESS, struct.pack("16s16s", b"lo:1", address))
    with tempfile.NamedTemporaryFile("w") as hosts:
        hosts.write(f"127.0.0.1 localhost\n{ADDRESS} {socket.gethostname()}\n")
        hosts.flush()
        os.chmod(hosts.name, 0o644)  # other users' processes read it, too
        subprocess.run(["mount", "--bind", hosts.name, "/etc/hosts"], check=True)
    os.execvp(command[0], command)


if __name__ == "__main__":
    _main(sys.argv[1:])
