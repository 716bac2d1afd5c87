"""The live tensors of a rank that has run out of memory, by name; on a GPU torch's own snapshot beside them."""

from __future__ import annotations

import contextlib
import gc
import sys
import traceback
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megamix.base.console import say
from megamix.mixed_precision.engine import ShardedEngine
from megamix.mixed_precision.guards.foreign_params import readers_of

_SHOWN = 3  # most tensors that the console shows; the file has all


def tell_live_tensors(folder: Path, rank: int, engine: ShardedEngine | None, error: BaseException) -> None:
    """Write the live tensors to `memory_rank*.txt`, and on a GPU torch's snapshot to `memory_rank*.pickle`. Name the
    largest on stderr. Do nothing if that fails.

    `error`: the error that the lack of memory raised; its frames hold the tensors of the pass that failed.
    """
    with contextlib.suppress(Exception):
        rows = _rows(engine, error)
        total = sum(nbytes for nbytes, *_ in rows)
        lines = [f"{total / 2**20:12.2f} MiB of live tensors"]
        lines += [f"{nbytes / 2**20:12.2f} MiB {number:6} x {words}" for nbytes, number, words in rows]
        path = folder / f"memory_rank{rank}.txt"
        path.write_text("\n".join([f"{error}", *lines, ""]), encoding="utf-8")
        if engine is not None and engine.device.type == "cuda":  # pragma: CUDA only
            torch.cuda.memory._dump_snapshot(str(path.with_suffix(".pickle")))  # type: ignore[no-untyped-call]
        told = [f"rank {rank}: {lines[0].strip()}, listed in {path}; the largest:", *lines[1 : 1 + _SHOWN]]
        say("\n".join(told), sys.stderr)


def _rows(engine: ShardedEngine | None, error: BaseException) -> list[tuple[int, int, str]]:
    """Return the bytes, the number and the words of the live storages with the same words, the largest first."""
    rows = defaultdict[str, list[int]](list)
    known = set[int]()
    for words, tensor in _tensors(engine, error):
        with contextlib.suppress(Exception):  # among all of a process some tensor has no storage to ask
            if tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                if storage.device.type != "meta" and storage._cdata not in known and storage.nbytes():
                    known.add(storage._cdata)
                    rows[f"{words}, {str(tensor.dtype)[6:]} {(*tensor.shape,)}"].append(storage.nbytes())
    return sorted(((sum(sizes), len(sizes), words) for words, sizes in rows.items()), reverse=True)


def _tensors(engine: ShardedEngine | None, error: BaseException) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that can be reached, each with its best name first."""
    nodes = list[Any]()
    for words, value in _named(engine, error):
        if issubclass(type(value), Tensor):  # not `isinstance`, which asks objects what they are
            nodes.append(value.grad_fn)
            yield words, value
    for node in readers_of(nodes):
        for name in dir(node):
            saved = getattr(node, name, None) if name.startswith("_raw_saved_") else None
            for one in saved if isinstance(saved, list | tuple) else [saved]:
                # A hook would compute the tensor again, and `data` is what the hook keeps instead.
                if isinstance(kept := getattr(one, "data", None), Tensor):
                    yield f"kept for backward by {node.name()}", kept
    yield from (("held elsewhere", value) for value in gc.get_objects() if issubclass(type(value), Tensor))


def _named(engine: ShardedEngine | None, error: BaseException) -> Iterator[tuple[str, Any]]:
    if engine is not None:
        for bucket in engine.buckets:
            states = [("optimizer's " + name, state) for span in bucket.states for name, state in span.items()]
            yield from ((f"{name} of {bucket.plan.name}", value) for name, value in [*vars(bucket).items(), *states])
        for held in engine.held_states():
            yield from ((f"optimizer's {name} of {held.spec.name}", state) for name, state in held.tensors.items())
        yield from engine.module.named_parameters()
        yield from engine.module.named_buffers()
    one: BaseException | None = error
    while one is not None:
        for frame, line in reversed([*traceback.walk_tb(one.__traceback__)]):
            code = frame.f_code
            where = f"{code.co_qualname}, {Path(code.co_filename).name}:{line}"
            yield from ((f"{name} in {where}", value) for name, value in frame.f_locals.items())
        one = one.__cause__ or one.__context__
    for owner in gc.get_objects():
        if str(type(owner).__module__).startswith("megamix."):
            name = type(owner).__name__
            yield from ((f"{name}.{key}", value) for key, value in [*getattr(owner, "__dict__", {}).items()])
