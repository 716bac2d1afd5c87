"""Worker processes: they encode pieces, in any order, and train the tokenizer."""

import fcntl
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from megamix.data.prepare.pieces import EncodingJob, PieceReport, encode_piece, opened_tokenizer
from megamix.data.prepare.plan import CorpusPiece
from megamix.durable import lock_file
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
    if min(num_workers, len(numbers)) <= 1:
        opened_tokenizer.cache_clear()  # an earlier job may have had another tokenizer at this path
        for number in numbers:
            yield number, encode_piece(job, pieces[number], number)
        return
    with worker_pool(folder, num_workers) as pool:
        with starts_deaf():
            futures = {pool.submit(_encode_on_one_core, job, pieces[number], number): number for number in numbers}
        for future in as_completed(futures):
            yield futures[future], future.result()


def _encode_on_one_core(job: EncodingJob, piece: CorpusPiece, number: int) -> PieceReport:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return encode_piece(job, piece, number)


def call_apart(folder: Path, function: Callable[[], Any]) -> Any:
    """Call a function in a process of its own, and return its result. The function's memory ends with the process.

    Raises: any error of the function; WorkerDiedError.
    """
    with worker_pool(folder, 1) as pool:
        with starts_deaf():
            future = pool.submit(function)
        return future.result()


@contextmanager
def worker_pool(folder: Path, num_workers: int) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool whose processes end at once where the block or this process ends, in whatever way.

    They are spawned and not forked: a fork of a process whose tokenizer has threads may wait for these threads for
    ever. Raises: WorkerDiedError.
    """
    ours, theirs = multiprocessing.Pipe()  # no word is sent: a worker ends where our end is closed
    pool = ProcessPoolExecutor(num_workers, multiprocessing.get_context("spawn"), _begin, (folder, theirs))
    try:
        yield pool
    except BrokenProcessPool as error:
        raise WorkerDiedError(
            "a worker was killed (most often by a system out of memory: fewer --workers need less); finished pieces "
            "are kept"
        ) from error
    finally:
        ours.close()
        pool.shutdown(cancel_futures=True)
        theirs.close()


def wait_for_orphans(folder: Path) -> None:
    """Wait until no worker of a killed prepare writes to the folder. Workers notice within moments that it has died."""
    with (folder / _LOCK_NAME).open("w") as lock:
        lock_file(lock.fileno(), fcntl.LOCK_EX)


def _begin(folder: Path, parent: Connection) -> None:
    stay_deaf()
    lock = (folder / _LOCK_NAME).open("w")  # held until the process ends
    lock_file(lock.fileno(), fcntl.LOCK_SH)
    if parent.poll():  # it has died: another prepare may have taken the folder before this lock
        os._exit(1)
    threading.Thread(target=_end_with, args=(parent, lock), daemon=True).start()


def _end_with(parent: Connection, lock: IO[str]) -> None:
    parent.poll(None)
    os._exit(1)
