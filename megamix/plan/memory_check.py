"""After its second update a run compares the memory that was planned with what it takes."""

from __future__ import annotations

import gc

import torch
from torch import Tensor, nn

from megamix.config import Config
from megamix.mixed_precision.engine import ShardedEngine
from megamix.plan.memory_plan import EVALUATION, amount, held_memory, plan_rank

TOLERANCE = 0.10  # from here on the log line warns


def memory_line(config: Config, engine: ShardedEngine) -> str:
    """For the log, between two steps.

    On a GPU the peak so far is compared, as its allocator counts it. torch keeps no such count for a CPU: there all
    tensors that the interpreter knows are counted, and compared with what was planned to be held between steps.
    """
    topology, on_gpu, spare = engine.topology, engine.device.type == "cuda", 0
    if on_gpu:  # pragma: CUDA only
        plan = plan_rank(config, topology.dp.size, topology.pp.rank, "gpu")
        planned = plan.peak - plan.held.get(EVALUATION, 0)  # none has been yet
        what, measured = f"peak ({plan.peak_phase})", torch.cuda.max_memory_allocated()
    else:
        held, host = held_memory(config, topology.dp.size, topology.world.rank, "cpu")
        what, planned = "held between steps", sum(held.values())
        measured = _live_bytes()
        spare = host["batches read ahead"]  # as many as there are by now
    off = measured - planned
    line = f"memory | {what}: planned {amount(planned)}, measured {amount(measured)} ({off / planned:+.1%})"
    if abs(off) > TOLERANCE * planned + spare:
        line += f" | WARNING: more than {TOLERANCE:.0%} apart; `megamix plan` says what each part should take"
    return line


def _live_bytes() -> int:
    """Of the storages that some tensor on the host refers to."""
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        # By its type and not isinstance(), which asks objects of other libraries what they pretend to be; and no
        # subclass, for a compiler leaves tensors that have no memory, some of sizes that are symbols.
        if type(thing) in (Tensor, nn.Parameter) and thing.layout == torch.strided and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            if isinstance(size := storage.nbytes(), int):
                found[storage._cdata] = size
    return sum(found.values())
