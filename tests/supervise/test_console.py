"""A letter that the console lacks ends no verb; a process ends behind its threads; a long phase says its seconds."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megamix.supervise import console

ROOT = Path(__file__).parents[2]


ENDS = """
import atexit, threading
from megamix.supervise.console import end_process
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


def test_a_process_ends_behind_its_threads_and_exit_functions() -> None:
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("a thread ended\nexit functions ran\n", "")
    assert done.returncode == 3


def test_a_letter_that_the_console_lacks_is_written_by_its_number() -> None:
    config = str(ROOT / "configs/quickstart.toml")
    command = [sys.executable, "-m", "megamix", "config", config, "checkpoint.folder=rün", "--show"]
    ended = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True)
    assert ended.returncode == 0, ended.stderr.decode()
    assert b'folder = "r\\xfcn"' in ended.stdout


def test_a_long_phase_says_how_long_it_has_taken_until_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    before_it = threading.active_count()
    told_twice = threading.Event()

    def say_phase(words: str) -> None:
        said.append(words)
        if len(said) == 3:
            told_twice.set()

    monkeypatch.setattr(console, "_STILL_S", 0.0)
    monkeypatch.setattr(console, "say_phase", say_phase)
    with console.phase("building the model; it takes a moment"):
        assert told_twice.wait(60)
    lines = len(said)
    assert said[0] == "building the model; it takes a moment"
    assert set(said[1:]) == {"still building the model, 0 s"}
    assert threading.active_count() == before_it
    assert len(said) == lines
