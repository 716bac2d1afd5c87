"""A prepare that a test runs, or starts in a process of its own, and ends."""

import os
import signal

from megamix.data.prepare.corpus import input_corpus
from megamix.data.prepare.pieces import encode_piece
from megamix.data.prepare.prepare_corpus import Request, prepare_corpus
from megamix.data.prepare.tokenizer_choice import TokenizerChoice

PIECE_BYTES = 2**14  # a small corpus makes many pieces


def prepare(source, output, num_workers):
    choice = TokenizerChoice("train", 300)
    request = Request(tokenizer=choice, valid_fraction=0.1, num_workers=num_workers, piece_bytes=PIECE_BYTES)
    return prepare_corpus(input_corpus([str(source)]), output, request)


def prepare_apart(source, output, num_workers, kill_at=None):
    """Prepare in a process of its own, which kills itself by SIGKILL instead of the call of that number to the disk.
    Beside the output it writes the number of calls at its end.
    """
    calls = []

    def counted(function):
        def call(*args, **kwargs):
            calls.append(function)
            if len(calls) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    for name in ("fsync", "rename", "replace", "unlink", "mkdir", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))
    prepare(source, output, num_workers)
    output.with_name("calls").write_text(str(len(calls)))


def encode_until_killed(job, piece, number):
    """Encode a piece in a worker, as `workers` does, but at the third one die as the system kills for memory."""
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return encode_piece(job, piece, number)
