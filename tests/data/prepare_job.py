"""A prepare that a test starts, and ends: `python -m tests.data.prepare_job INPUT OUTPUT WORKERS [KILL_AT_CALL]`.

Says "ready" once everything is imported. With KILL_AT_CALL it kills itself by SIGKILL instead of the call of that
number to the disk; it says the number of calls at its end.
"""

import os
import signal
import sys
from pathlib import Path

from megamix.data.prepare.corpus import input_corpus
from megamix.data.prepare.prepare_corpus import Request, prepare_corpus
from megamix.data.prepare.tokenizer_choice import TokenizerChoice

PIECE_BYTES = 2**15  # a small corpus makes many pieces


def prepare(source, output, num_workers):
    choice = TokenizerChoice("train", 300)
    request = Request(tokenizer=choice, valid_fraction=0.1, num_workers=num_workers, piece_bytes=PIECE_BYTES)
    return prepare_corpus(input_corpus([str(source)]), output, request)


def main():
    source, output, num_workers, *kill_at = sys.argv[1:]
    calls = []

    def counted(function):
        def call(*args, **kwargs):
            calls.append(function)
            if [str(len(calls))] == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    for name in ("fsync", "rename", "replace", "unlink", "mkdir", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))
    print("ready", flush=True)
    prepare(source, Path(output), int(num_workers))
    print(len(calls), flush=True)


if __name__ == "__main__":
    main()
