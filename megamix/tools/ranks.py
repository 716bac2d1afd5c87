"""Real ranks on this machine, which are started once and then serve call after call.

A call names a function, which runs on every rank with the process group up and returns something picklable. If a rank
raises, dies or does not answer by the deadline, it is named, all ranks of its pool end, and the next call gets new
ones.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext, ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist

from megamix.base.signals import starts_deaf, stay_deaf
from megamix.launch.rendezvous import keep_to_loopback

T = TypeVar("T")

DEADLINE_S = 120.0
# Modules that a rank inherits. An engine's construction imports torch._dynamo, which takes 1 s or more in each rank
# that does not inherit it.
PRELOADED = ["torch", "torch.distributed", "torch._dynamo", "megamix.train.job"]
_GRACE_S = 1.0  # seconds for the other ranks to answer once one has failed: they may wait for it in a collective


def forkserver() -> ForkServerContext:
    """Return a context that starts processes with torch loaded.

    fork would copy the locks of the parent's threads and hang; spawn would import torch anew for each.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


class RankFailure(RuntimeError):
    """Failure of ranks: the message names them and says how they failed."""


class ToldError(Exception):
    """An error on a rank whose message says everything: the rank's traceback would add nothing to it."""


class LateRanks(RankFailure, TimeoutError):
    """Failure in which ranks did not answer by the deadline, and none failed otherwise."""


class RankPool:
    """Pool of `world_size` ranks, started by the first call and kept alive between calls.

    where: "cpu", by Gloo, and no rank sees a GPU; "cuda", a GPU for each rank, by NCCL; "cuda:0", the first GPU for
    all, by Gloo, because NCCL wants a GPU for each; None, "cuda" if there are enough GPUs, else "cpu".
    actor: each rank holds one `actor()` as long as it lives, and every function gets it as its first argument: name
    methods of its class. A lone rank then has no process group. Without an actor, no call finds anything that an
    earlier call left behind.
    environment: the ranks are new interpreters with these settings beside the parent's, because OpenMP and malloc read
    their settings only when a program starts. Without it they are forks of a process that has torch loaded, with one
    thread each.
    name: name of the pool in messages about a failure.
    stacks: whether ranks that do not answer by the deadline write their stacks to stderr.
    """

    def __init__(
        self, world_size: int, where: str | None = "cpu", *, actor: Callable[[], object] | None = None,
        environment: Mapping[str, str] | None = None, name: str = "", deadline_s: float = DEADLINE_S,
        stacks: bool = True,
    ):  # fmt: skip
        self.world_size = world_size
        self.where = where or ("cuda" if num_cards() >= world_size else "cpu")
        self._actor, self._environment, self._deadline_s = actor, environment, deadline_s
        self._who, self._stacks = f"{name}: rank" if name else "rank", stacks
        self._pipes = list[Connection]()
        self._processes = list[BaseProcess]()
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # folder in which the ranks meet

    def call(self, function: Callable[..., T], *args: Any, deadline_s: float | None = None) -> list[T]:
        """Return every rank's answer, in rank order. Raises: RankFailure."""
        try:
            if not self._processes:
                self._start()
            return self._ask(function, args, self._deadline_s if deadline_s is None else deadline_s)
        except BaseException:
            self.close(kill=True)  # the other ranks may wait in a collective for ever
            raise

    def close(self, *, kill: bool = False) -> None:
        """End all ranks after their present call, or `kill` them."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if kill:
                process.kill()
            else:
                with contextlib.suppress(BrokenPipeError):
                    pipe.send(None)
        for process in self._processes:
            process.join(10.0)
            process.kill()
        if self._folder is not None:
            self._folder.cleanup()
        self._pipes, self._processes, self._folder = [], [], None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self.close(kill=error is not None)

    def _start(self) -> None:
        anew = self._environment is not None
        context: BaseContext = multiprocessing.get_context("spawn") if anew else forkserver()
        folder = self._folder = tempfile.TemporaryDirectory(prefix="megamix-ranks-")
        self._worlds = 0  # worlds so far
        self._needs_world = self._actor is None or self.world_size > 1
        with environment(self._environment or {}), starts_deaf():
            for rank in range(self.world_size):
                mine, theirs = context.Pipe()
                args = (rank, self.world_size, folder.name, theirs, self.where, anew)
                process = context.Process(target=_serve, args=args, daemon=True)  # type: ignore[attr-defined]  # every start method has it
                process.start()
                theirs.close()
                self._pipes.append(mine)
                self._processes.append(process)
        if self._actor is not None:
            self._ask(self._actor, (), self._deadline_s, hold=True)

    def _ask(
        self, function: Callable[..., T], args: tuple[Any, ...], deadline_s: float, *, hold: bool = False
    ) -> list[T]:
        world = self._worlds if self._needs_world else None
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # a rank that died, which is named below
                pipe.send((function, args, world, hold))
        self._worlds += self._needs_world
        self._needs_world = False
        answers: dict[int, T] = {}
        failures: dict[int, str] = {}
        kind_of_failure = RankFailure
        end_s = time.monotonic() + deadline_s
        while silent := [rank for rank in range(self.world_size) if rank not in answers and rank not in failures]:
            ready = wait([self._pipes[rank] for rank in silent], timeout=max(0.0, end_s - time.monotonic()))
            if not ready:
                kind_of_failure = RankFailure if failures else LateRanks
                failures |= dict.fromkeys(silent, "did not answer in time" + " (its stack is on stderr)" * self._stacks)
                if self._stacks:
                    for rank in silent:
                        os.kill(self._processes[rank].pid, signal.SIGUSR2)  # type: ignore[arg-type]  # it has started
                    time.sleep(0.2)  # a signal handler writes the stacks, which takes a moment
            for rank in [rank for rank in silent if self._pipes[rank] in ready]:
                try:
                    kind, value, other_groups = pickle.loads(self._pipes[rank].recv_bytes())
                    self._needs_world |= other_groups and self._actor is None
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(1.0)
                    kind, value = "raised", f"died with exit code {self._processes[rank].exitcode}"
                if kind == "returned":
                    answers[rank] = value
                else:
                    failures[rank] = value
                    end_s = min(end_s, time.monotonic() + _GRACE_S)
        if failures:
            raise kind_of_failure("\n".join(f"{self._who} {rank}: {failures[rank]}" for rank in sorted(failures)))
        return [answers[rank] for rank in range(self.world_size)]


def num_cards() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _serve(rank: int, world_size: int, folder: str, pipe: Connection, where: str, new_interpreter: bool) -> None:
    """Answer calls until there are no more, or the parent is gone."""
    stay_deaf()
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    keep_to_loopback(os.environ)
    if world_size == 1:  # a lone rank has a world of its own, whatever started the parent
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    gc.freeze()  # the objects of the imports stay; walking them takes 0.2 s at each call
    faulthandler.register(signal.SIGUSR2, file=sys.__stderr__ or sys.stderr)
    if new_interpreter:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Gloo's greetings would mix into a report
    else:
        torch.set_num_threads(1)
    card = {"cpu": None, "cuda": rank, "cuda:0": 0}[where]
    if card is None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a job would take the GPU that it sees
    else:
        torch.cuda.set_device(card)
    held = list[object]()
    while (request := _request(pipe)) is not None:
        function, args, world, hold = request
        if world is not None:
            # The groups that a call has made end with their world. If they were destroyed one by one, torch would reuse
            # their names, and the next groups would find the first ones' entries in the store. If they were kept, each
            # would cost threads that wake up 100 times a second.
            if dist.is_initialized():
                dist.destroy_process_group()
            method, backend = f"file://{folder}/world_{world}", "nccl" if where == "cuda" else "gloo"
            device = torch.device("cuda", rank) if where == "cuda" else None  # as a job does: NCCL splits groups by it
            dist.init_process_group(backend, init_method=method, rank=rank, world_size=world_size, device_id=device)
        torch.manual_seed(0)
        try:
            value = function(*held, *args)
            if hold:
                held, value = [value], None
            answer = ("returned", value)
        except Exception as error:
            answer = ("raised", str(error) if isinstance(error, ToldError) else traceback.format_exc())
        other_groups = len(dist.distributed_c10d._world.pg_map) != 1  # made by the call, or its world was left
        # Pickled here: a pipe would send each tensor as an open file, and a process may have a thousand of these.
        pipe.send_bytes(pickle.dumps((*answer, other_groups)))
        if not held:  # an actor's next measurement would lose the time
            gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


def _request(pipe: Connection) -> Any:
    """Return the parent's next request; None if the parent tells this rank to end, or has closed the pipe."""
    try:
        return pipe.recv()
    except EOFError:
        return None


def _end_with(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


@contextlib.contextmanager
def environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set these environment variables in the block, and in processes that start there. Others stay for all threads."""
    before = dict(os.environ)
    os.environ.update(settings)
    try:
        yield
    finally:
        for name in settings:
            os.environ.pop(name)
            os.environ.update({name: before[name]} if name in before else {})
