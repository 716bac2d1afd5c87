"""Worker processes: they encode pieces, in any order, and train the tokenizer."""

import fcntl
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from megamix.base.durable import lock_file
from megamix.base.signals import starts_deaf, stay_deaf
from megamix.data.prepare.pieces import EncodingJob, PieceReport, encode_piece, opened_tokenizer
from megamix.data.prepare.plan import CorpusPiece

_LOCK_NAME = "workers.lock"


def encode_pieces(
    job: EncodingJob, pieces: dict[int, CorpusPiece], num_workers: int
) -> Iterator[tuple[int, PieceReport]]:
    """Encode the pieces. Yield the number and report of each as soon as it is finished.

    `pieces`: by number. Raises: as `encode_piece`; OSError if a worker is killed.
    """
    if min(num_workers, len(pieces)) <= 1:
        opened_tokenizer.cache_clear()  # an earlier job may have had another tokenizer at this path
        for number, piece in pieces.items():
            yield number, encode_piece(job, piece, number)
        return
    with worker_pool(job.folder.parent, num_workers) as pool:
        with starts_deaf():
            futures = {pool.submit(encode_piece, job, piece, number): number for number, piece in pieces.items()}
        for future in as_completed(futures):
            yield futures[future], future.result()


def call_apart(folder: Path, function: Callable[[], Any]) -> Any:
    """Call a function in a process of its own, and return its result. The function's memory ends with the process.

    Raises: any error of the function; OSError if it is killed.
    """
    with worker_pool(folder, 1) as pool:
        with starts_deaf():
            future = pool.submit(function)
        return future.result()


@contextmanager
def worker_pool(folder: Path, num_workers: int) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool whose processes end at once where the block or this process ends, in whatever way.

    They are spawned and not forked: a fork of a process whose tokenizer has threads may wait for these threads for
    ever. Raises: OSError if the system ends one, most often because memory ran out.
    """
    ours, theirs = multiprocessing.Pipe()  # no word is sent: a worker ends where our end is closed
    pool = ProcessPoolExecutor(num_workers, multiprocessing.get_context("spawn"), _begin, (folder, theirs, num_workers))
    try:
        yield pool
    except BrokenProcessPool as error:
        raise OSError(
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


def _begin(folder: Path, parent: Connection, num_workers: int) -> None:
    stay_deaf()
    if num_workers > 1:  # each on one core
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
    lock = (folder / _LOCK_NAME).open("w")  # held until the process ends
    lock_file(lock.fileno(), fcntl.LOCK_SH)
    if parent.poll():  # it has died: another prepare may have taken the folder before this lock
        os._exit(1)
    threading.Thread(target=_end_with, args=(parent, lock), daemon=True).start()


def _end_with(parent: Connection, lock: IO[str]) -> None:
    parent.poll(None)
    os._exit(1)
