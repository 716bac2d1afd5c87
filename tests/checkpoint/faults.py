"""A `Files` that counts its calls and does something else at one of them."""

import os
import signal

from megamix.checkpoint.folder import Files

# All but those that are composed of others.
CALLS = [name for name, call in vars(Files).items() if callable(call) and name not in ("write_file", "remove_tree")]


class FaultyFiles(Files):
    """A `Files` with a fault. `calls`: the names of all calls so far. `fault(name, arguments)` is called just before
    call number `at`, and may raise or kill.
    """

    begun_each = 1 << 12  # files of tests are small

    def __init__(self, at=None, fault=None):
        self.at, self.fault = at, fault
        self.calls = []

    def count(self, name, arguments):
        self.calls.append(name)
        if len(self.calls) - 1 == self.at:
            self.fault(name, arguments)


def _counted(name):
    def call(self, *arguments):
        self.count(name, arguments)
        return getattr(super(FaultyFiles, self), name)(*arguments)

    return call


for _name in CALLS:
    setattr(FaultyFiles, _name, _counted(_name))


def kill(name, arguments):
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in_the_middle(name, arguments):
    file, chunk = arguments
    file.write(chunk[: len(chunk) // 2])
    kill(name, arguments)


def listing(folder):
    return sorted(path.name for path in folder.iterdir())
