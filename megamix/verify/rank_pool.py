"""Real ranks on this machine: started once by forkserver with torch loaded, then given one case after the other.

A case is a top-level function; it runs on every rank with the process group up and returns something picklable. A
rank that raises, dies or does not answer by the deadline is named, and its pool is of no more use.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

DEADLINE_S = 120.0
_GRACE_S = 1.0  # for the other ranks to answer once one has failed: they may wait for it in a collective

# fork would copy the parent's threads' locks and hang; spawn imports torch anew for every rank.
CONTEXT = multiprocessing.get_context("forkserver")
# An engine's construction imports torch._dynamo: 1 s and more in each rank that does not inherit it.
_PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "megamix.train.job"]


class RankFailure(RuntimeError):
    """Which rank failed, and how."""


def _serve(rank: int, world_size: int, folder: str, pipe: Connection, on_gpus: bool) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _world

    from megamix.supervise.rendezvous import keep_to_loopback

    keep_to_loopback(os.environ)
    faulthandler.register(signal.SIGUSR2, file=sys.__stderr__ or sys.stderr)
    torch.set_num_threads(1)
    if on_gpus:  # pragma: CUDA only
        torch.cuda.set_device(rank)
    backend = "nccl" if on_gpus else "gloo"
    while (request := pipe.recv()) is not None:
        case, args, world = request
        if world is not None:
            # Groups that a case has made cannot be destroyed one by one: torch would give their names again, and the
            # next ones would meet in what the first have left in the store. Kept, each costs threads that wake up 100
            # times a second.
            if dist.is_initialized():
                dist.destroy_process_group()
            method = f"file://{folder}/world_{world}"
            dist.init_process_group(backend, init_method=method, rank=rank, world_size=world_size)
        torch.manual_seed(0)
        try:
            answer = ("returned", case(*args))
        except Exception:
            answer = ("raised", traceback.format_exc())
        pipe.send((*answer, len(_world.pg_map) > 1))
        gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


class RankPool:
    """`world_size` ranks, kept alive between cases; `on_gpus`: one on each GPU, by NCCL, else on the CPU, by Gloo."""

    def __init__(self, world_size: int, *, on_gpus: bool = False):
        CONTEXT.set_forkserver_preload(_PRELOAD)
        self._folder = tempfile.TemporaryDirectory(prefix="megamix-ranks-")
        self.on_gpus = on_gpus
        self._worlds = 0  # so far
        self._needs_world = True
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(world_size):
            mine, theirs = CONTEXT.Pipe()
            args = (rank, world_size, self._folder.name, theirs, on_gpus)
            process = CONTEXT.Process(target=_serve, args=args, daemon=True, name=f"rank {rank} of {world_size}")
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def run(self, case: Callable[..., Any], args: tuple[Any, ...], deadline_s: float) -> list[Any]:
        """Every rank's return value, in rank order. Raises RankFailure."""
        world = self._worlds if self._needs_world else None
        for pipe in self.pipes:
            pipe.send((case, args, world))
        self._worlds += self._needs_world
        self._needs_world = False
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}
        end_s = time.monotonic() + deadline_s
        while len(answers) + len(failures) < len(self.pipes):
            silent = [rank for rank in range(len(self.pipes)) if rank not in answers and rank not in failures]
            ready = wait([self.pipes[rank] for rank in silent], timeout=max(0.0, end_s - time.monotonic()))
            if not ready:
                for rank in silent:
                    failures[rank] = "did not answer in time (its stack is on stderr)"
                    pid = self.processes[rank].pid
                    assert pid is not None
                    os.kill(pid, signal.SIGUSR2)
                time.sleep(0.2)  # the dump is written by a signal handler: give it the time before the kill below
                break
            for rank in [rank for rank in silent if self.pipes[rank] in ready]:
                try:
                    kind, value, made_groups = self.pipes[rank].recv()
                    self._needs_world |= made_groups
                except EOFError:
                    self.processes[rank].join(1.0)
                    kind, value = "raised", f"died with exit code {self.processes[rank].exitcode}"
                if kind == "returned":
                    answers[rank] = value
                else:
                    failures[rank] = value
                    end_s = min(end_s, time.monotonic() + _GRACE_S)
        if failures:
            raise RankFailure("\n".join(f"rank {rank}: {failures[rank]}" for rank in sorted(failures)))
        return [answers[rank] for rank in range(len(self.pipes))]

    def close(self, *, kill: bool = False) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if kill:
                process.kill()
            else:
                with contextlib.suppress(BrokenPipeError):
                    pipe.send(None)
        for process in self.processes:
            process.join(10.0)
        self._folder.cleanup()
