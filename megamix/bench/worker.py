"""One rank of a bench, on its own: `python -m megamix.bench.worker FD` serves the pipe that processes.py opened."""

from __future__ import annotations

import os
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from megamix.supervise.rendezvous import keep_to_loopback


def serve(pipe: Connection) -> None:
    """Build the object that the parent asks for, then call its methods until there is no more to do."""
    rank, world_size, store, actor, args = pipe.recv()
    keep_to_loopback(os.environ)
    if world_size > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    try:
        built = actor(*args)
    except Exception:
        pipe.send(("raised", traceback.format_exc()))
        return
    pipe.send(("returned", None))
    while (request := _next(pipe)) is not None:
        method, arguments = request
        try:
            pipe.send(("returned", getattr(built, method)(*arguments)))
        except Exception:
            pipe.send(("raised", traceback.format_exc()))
    if world_size > 1:
        dist.destroy_process_group()


def _next(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:  # the parent is gone
        return None


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
