"""Worker processes: they encode pieces, in any order, and train the tokenizer."""

import fcntl
import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

from megamix.data.prepare.pieces import EncodingJob, PieceReport, encode_piece, opened_tokenizer
from megamix.data.prepare.plan import CorpusPiece
from megamix.interrupt import starts_deaf, stay_deaf

_LOCK_NAME = "workers.lock"


class WorkerDiedError(OSError):
    """An error of a worker that the system ended, most often because memory ran out."""


def encode_pieces(
    folder: Path, job: EncodingJob, pieces: Sequence[CorpusPiece], numbers: Sequence[int], num_workers: int
) -> Iterator[tuple[int, PieceReport]]:
    """Encode the pieces with these numbers. Yield the number and report of each as soon as it is finished.

    `folder`: the folder of the unfinished work. Raises: as `encode_piece`; WorkerDiedError.
    """
    num_workers = min(num_workers, len(numbers))
    if num_workers <= 1:
        opened_tokenizer.cache_clear()  # an earlier job may have had another tokenizer at this path
        for number in numbers:
            yield number, encode_piece(job, pieces[number], number)
        return
    waiting = iter(numbers)
    workers = [_Worker(folder) for _ in range(num_workers)]
    try:
        for worker, number in zip(workers, waiting, strict=False):
            worker.give(partial(_encode_on_one_core, job, pieces[number], number), number)
        busy = {worker.connection: worker for worker in workers}
        while busy:
            for connection in wait(list(busy)):
                worker = busy[connection]  # type: ignore[index]  # wait() returns what it was given
                yield worker.number, worker.receive()
                following = next(waiting, None)
                if following is None:
                    del busy[worker.connection]
                else:
                    worker.give(partial(_encode_on_one_core, job, pieces[following], following), following)
    finally:
        for worker in workers:
            worker.end()


def _encode_on_one_core(job: EncodingJob, piece: CorpusPiece, number: int) -> PieceReport:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return encode_piece(job, piece, number)


def call_apart(folder: Path, function: Callable[[], Any]) -> Any:
    """Call a function in a process of its own, and return its result. The function's memory ends with the process.

    Raises: any error of the function; WorkerDiedError.
    """
    worker = _Worker(folder)
    try:
        worker.give(function)
        return worker.receive()
    finally:
        worker.end()


class _Worker:
    """A process that calls functions, one at a time.

    It is spawned and not forked: a fork of a process whose tokenizer has threads may wait for these threads for ever.
    It ends when the process that started it ends, for whatever reason.
    """

    def __init__(self, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.number = -1  # number of the piece that it encodes; -1: none
        self.connection, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(target=_work, args=(folder, theirs), daemon=True)
        with starts_deaf():
            self._process.start()
        theirs.close()

    def give(self, function: Callable[[], Any], number: int = -1) -> None:
        """Send a function to call. `number`: the piece that it encodes; -1: none. Raises: WorkerDiedError."""
        self.number = number
        try:
            self.connection.send(function)
        except ConnectionError:
            self._raise_death()

    def receive(self) -> Any:
        try:
            answer = self.connection.recv()
        except (EOFError, ConnectionError):
            self._raise_death()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def end(self) -> None:
        self.connection.close()
        self._process.terminate()
        self._process.join()

    def _raise_death(self) -> NoReturn:
        self._process.join()
        place = "the tokenizer" if self.number < 0 else f"piece {self.number}"
        raise WorkerDiedError(
            f"a worker died at {place} (exit code {self._process.exitcode}; -9 is most often the system "
            "out of memory: fewer --workers need less); finished pieces are kept"
        )


def wait_for_orphans(folder: Path) -> None:
    """Wait until no worker of a killed prepare writes to the folder. Workers notice within moments that it has died."""
    with (folder / _LOCK_NAME).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)


def _work(folder: Path, connection: Connection) -> None:
    stay_deaf()
    parent = multiprocessing.parent_process()
    assert parent is not None
    with (folder / _LOCK_NAME).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        if parent.is_alive():  # if not, another prepare may have taken the folder before this lock
            threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
            _serve(connection)


def _end_with(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _serve(connection: Connection) -> None:
    """Call each function that comes, and send back its result or error, until the connection is closed."""
    with suppress(EOFError):
        while True:
            function = connection.recv()
            answer: Any
            try:
                answer = function()
            except (ValueError, OSError) as error:
                answer = error
            except Exception:  # a defect: the first process prints this traceback, and ends
                answer = RuntimeError(f"a worker failed:\n{traceback.format_exc()}")
            connection.send(answer)
