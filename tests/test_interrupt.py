"""Ctrl-C ends any verb with status 130 and a line that says what is left, without a traceback, also while torch is
imported (a second one where numpy swallows the first); what the verb started ends with it.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megamix.base.processes import process_start
from megamix.base.signals import starts_deaf
from megamix.cli.verbs import VERBS, main
from megamix.tools import ranks

ROOT = Path(__file__).parents[1]
# Sends the process a Ctrl-C as it begins to import a module, and then runs a verb.
IMPORTING = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            sys.argv[1] = ""  # a second one would end the process at once
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
from megamix.cli.verbs import main
sys.exit(main(sys.argv[2:]))
"""
# A training that tells its number, sends its parent a Ctrl-C, and would go on for ever.
COMMAND = """
import os, signal, sys
print(os.getpid(), flush=True)
os.kill(os.getppid(), signal.SIGINT)
signal.pause()
"""


@pytest.fixture(autouse=True)
def _signals_as_before():
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def _raise_other(arguments):
    """Be interrupted as an import of an extension is: another exception takes the place of KeyboardInterrupt."""
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        raise ImportError("a part is missing") from None
    return 0


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb.name != "train"], ids=lambda verb: verb.name)
def test_a_verb_says_what_is_left(verb, capsys):
    needed = {
        "plan": ["a.toml"], "prepare": ["--output", "a"], "import": ["a", "--output", "b"],
        "export": ["a", "b", "--to", "hf"], "generate": ["a"], "evaluate": ["a"], "plot": ["a"],
        "report": ["a"], "status": ["a"], "checkpoint": ["ls", "a"], "config": ["--schema"], "hang": ["a"],
    }  # fmt: skip
    assert main([verb.name, *needed.get(verb.name, [])], _raise_other) == 130
    assert capsys.readouterr().err == f"megamix {verb.name}: interrupted: {verb.on_interrupt}\n"
    assert "the same command" in verb.on_interrupt


def test_an_error_without_an_interruption_is_none():
    def fail(*_):
        raise ImportError("a part is missing")

    with pytest.raises(ImportError, match="a part is missing"):
        main(["doctor"], fail)


@pytest.mark.parametrize("module", ["torch", "torch.nn", "torch.distributed"])
def test_an_import_may_be_interrupted(module, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    words = ["import", str(tmp_path), "--output", str(tmp_path / "out")]
    ended = subprocess.run([sys.executable, "-c", IMPORTING, module, *words], capture_output=True, text=True, cwd=ROOT)
    told = "megamix import: interrupted: nothing was written; the same command starts anew\n"
    assert (ended.returncode, ended.stdout) == (130, "")
    assert ended.stderr.endswith(told)
    assert "Traceback" not in ended.stderr


def test_the_command_of_an_audit_ends_with_it():
    words = [sys.executable, "-m", "megamix", "audit", "--", sys.executable, "-c", COMMAND]
    ended = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 130
    assert "Traceback" not in ended.stderr
    assert ended.stderr.endswith("megamix audit: interrupted: nothing was written; the same command starts anew\n")
    assert process_start(int(ended.stdout)) == ""


def test_a_process_that_starts_deaf_is_not_reached():
    asks = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    with starts_deaf():
        inside = subprocess.check_output([sys.executable, "-c", asks])
    outside = subprocess.check_output([sys.executable, "-c", asks])
    assert (inside, outside) == (b"True\n", b"False\n")


def _interrupted_rank():
    os.kill(os.getpid(), signal.SIGINT)
    return os.getpid()


def test_a_rank_that_is_given_up_at_its_start_ends_in_silence():
    ours, theirs = multiprocessing.Pipe()
    ours.close()
    assert ranks._request(theirs) is None


def test_ranks_leave_a_ctrl_c_to_the_process_that_started_them(run_ranks):
    (rank,) = run_ranks(_interrupted_rank, 1)
    assert rank != os.getpid()
