"""Standard streams that are closed, or cannot encode a letter, change no exit status, and no file gets their file
descriptor.
"""

import os
import queue
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megamix.base import console
from tests.conftest import FULL

ROOT = Path(__file__).parents[2]


def _run(arguments, closed, **environment):
    """Run a command by a shell that closes streams, as cron jobs and daemons do."""
    command = ["bash", "-c", f'exec "$@" {closed}', "bash", sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, check=False)


RANK = ["-m", "megamix", "train", "/nowhere.toml"], 2
LAUNCHER = ["-m", "megamix.launch.torchrun", "--standalone", "--no-python", "true"], 0
CLOSED = [">&-", "2>&-", "<&- >&- 2>&-"]
# A launcher imports torch: seconds each.
STREAMS = [(*RANK, closed) for closed in CLOSED] + [(*LAUNCHER, closed) for closed in (CLOSED if FULL else CLOSED[2:])]


@pytest.mark.parametrize(("arguments", "status", "closed"), STREAMS)
def test_the_exit_status_needs_no_streams(arguments, status, closed):
    ended = _run(arguments, closed)
    assert ended.returncode == status, ended.stderr.decode()
    assert b"Traceback" not in ended.stderr


_OPENED = """
import os, sys
from megamix.base.console import open_streams
open_streams()
with open("/dev/zero", "rb") as file:
    number = file.fileno()
os.write(1, b"lost")
print("lost", file=sys.stderr)
os._exit(number)
"""


def test_no_file_gets_the_number_of_a_closed_stream():
    assert _run(["-c", _OPENED], "<&- >&- 2>&-").returncode > 2


ENDS = """
import atexit, threading
from megamix.base.console import end_process
begun = threading.Event()

def last():
    begun.wait()
    threading.main_thread().join(0.1)  # still working when the main thread ends
    print("a thread ended")

threading.Thread(target=last).start()
atexit.register(print, "exit functions ran")
begun.set()
end_process(3)
"""


def test_a_process_ends_behind_its_threads_and_exit_functions():
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("a thread ended\nexit functions ran\n", "")
    assert done.returncode == 3


def test_a_letter_that_the_console_lacks_is_written_by_its_number():
    config = str(ROOT / "configs/quickstart.toml")
    ended = _run(["-m", "megamix", "config", config, "checkpoint.folder=rün", "--show"], "", PYTHONIOENCODING="ascii")
    assert ended.returncode == 0, ended.stderr.decode()
    assert b'folder = "r\\xfcn"' in ended.stdout


def test_a_long_phase_says_how_long_it_has_taken_until_it_is_over(monkeypatch):
    said = queue.Queue()
    before_it = threading.active_count()
    monkeypatch.setattr(console, "_STILL_S", 0.0)
    monkeypatch.setattr(console, "say_phase", said.put)
    with console.phase("building the model; it takes a moment"):
        assert said.get() == "building the model; it takes a moment"
        assert [said.get(timeout=60) for _ in range(2)] == ["still building the model, 0 s"] * 2
    assert threading.active_count() == before_it
