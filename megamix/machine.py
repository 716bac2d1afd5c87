"""This machine's cores, memory and arithmetic, and a rank's share of them."""

from __future__ import annotations

import ctypes
import functools
import gc
import math
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# What glibc's malloc can be told, its number, and what a rank tells: larger blocks get a mapping of their own; free
# bytes at the top that are kept (-1: all); bytes fetched beyond what is needed. MALLOC_MMAP_THRESHOLD_, or
# glibc.malloc.mmap_threshold in GLIBC_TUNABLES, tells it at the start of a process.
_MALLOC = {
    "mmap_threshold": (-3, 2**31 - 1),
    "trim_threshold": (-1, -1),
    "top_pad": (-2, 2**28),
}
# What torch reads when it begins, under its present name and its former one, and what a rank tells it.
_TORCH = {
    ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"): "expandable_segments:True",  # a GPU's memory stays in one piece
    ("TORCH_NCCL_HIGH_PRIORITY", ""): "1",  # sums get a GPU's units before the products of the backward beside them
    ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"): "2000",  # collectives of which a failed rank tells
}
WORKSPACES = (":4096:8", ":16:8")  # with which cuBLAS gives the same bits each time
_DETERMINISTIC = {("CUBLAS_WORKSPACE_CONFIG", ""): WORKSPACES[0], ("TORCHINDUCTOR_DETERMINISTIC", ""): "1"}
CPU_HALVES = "MEGAMIX_CPU_HALVES"  # the variable that says how a CPU computes halves
_LARGEST_BEFORE_2_35 = 2**25  # that older glibc keeps; told more it would fall back to 128 KiB


def num_cores() -> int:
    """Return cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def of_groups(root: Path, *names: str) -> Iterator[Path]:
    """Yield the files of these names in every control group around this process. A container may see its own group as
    the topmost one, and not the path to it.
    """
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own = root / "sys/fs/cgroup" / controllers / path[1:]
        yield from (group / name for group in (own, *own.parents) for name in names if (group / name).is_file())


def numbers_of(file: Path) -> dict[str, int]:
    """Return the numbers of a file whose lines are a name and one."""
    return {words[0]: int(words[1]) for words in map(str.split, file.read_text().splitlines())}


def memory_for_each(ranks: int, root: Path = Path("/")) -> tuple[float, str]:
    """Return the bytes that each of so many ranks of this machine may take, and what allows no more."""
    limits = [(math.inf, "this machine, which does not tell its memory")]
    with suppress(OSError):  # a sandbox may hide these
        limits.append((1024.0 * numbers_of(root / "proc/meminfo")["MemTotal:"] / ranks, "this machine's memory"))
        for file in of_groups(root, "memory.max", "memory.limit_in_bytes"):
            limits.append((float(file.read_text().replace("max", "inf")) / ranks, f"what {file} allows"))
    if (soft := resource.getrlimit(resource.RLIMIT_AS)[0]) != resource.RLIM_INFINITY:
        limits.append((float(soft), "what ulimit -v allows"))
    return min(limits)


def kernel_kills(root: Path = Path("/")) -> int:
    """Return how many processes the kernel has killed for memory in the control groups around this process, each once
    for each group.
    """
    kills = 0
    with suppress(OSError):
        for file in (root / "proc/vmstat", *of_groups(root, "memory.events", "memory.oom_control")):
            kills += numbers_of(file).get("oom_kill", 0)
    return kills


def has_gpu() -> bool:
    """Return whether torch can use one; loads torch."""
    import torch

    return torch.cuda.is_available()


@functools.cache
def half_units() -> frozenset[torch.dtype]:
    """Return the half dtypes in which this CPU has arithmetic; loads torch.

    Without it torch's products in that dtype take 2 (BF16 with AVX-512) to 100 times as long as in FP32.
    """
    import torch

    units = {  # as torch names them; the last is Arm's
        torch.float16: ("avx512_fp16", "amx_fp16", "fp16_arith"),
        torch.bfloat16: ("avx512_bf16", "amx_bf16", "bf16"),
    }
    found = torch.cpu.get_capabilities()
    return frozenset(dtype for dtype, names in units.items() if any(found.get(name, False) for name in names))


def native_halves() -> frozenset[torch.dtype]:
    """Return the half dtypes that a CPU's products take as they are: those in which it has arithmetic, or what
    MEGAMIX_CPU_HALVES says, "native" all, "wide" none. The others are widened to FP32, and results rounded once.

    Raises: ValueError if it says anything else.
    """
    import torch

    chosen = os.environ.get(CPU_HALVES, "")
    ways = {"": half_units(), "native": frozenset({torch.float16, torch.bfloat16}), "wide": frozenset[torch.dtype]()}
    if chosen not in ways:
        raise ValueError(
            f'{CPU_HALVES}: got {chosen!r}, must be "native" or "wide"; unset it for what this CPU computes faster'
        )
    return ways[chosen]


def tell_torch(ranks: int, *, deterministic: bool = False) -> None:
    """Set what torch and NCCL are to do on a machine with so many ranks, unless the user has: before torch is loaded,
    which reads it once.

    Each rank gets its share of the cores. More threads than cores make the ranks wait for each other's threads: two
    ranks with two threads each on two cores reached 30 % of the speed of two ranks with one thread each.
    """
    told = _TORCH | {("OMP_NUM_THREADS", ""): str(max(1, num_cores() // ranks))}
    for (name, former), value in (told | _DETERMINISTIC if deterministic else told).items():
        if former not in os.environ:
            os.environ.setdefault(name, value)


def keep_freed_memory() -> None:
    """Have glibc's malloc keep what a step frees for the next one, where the user's environment does not say otherwise.

    It gives a large block back to the system as soon as it is freed, and the next step pays for mapping and zeroing the
    same pages again. Told to keep them, training on a CPU gains 8 to 10 % tokens/s. The three belong together: setting
    any one ends glibc's own adjustment of the others. Another libc stays as it is.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    for name, (number, value) in _MALLOC.items():
        is_set = f"MALLOC_{name.upper()}_" in os.environ or f"glibc.malloc.{name}" in tunables
        if not is_set and not mallopt(number, value):
            mallopt(number, _LARGEST_BEFORE_2_35)


@contextmanager
def many_imports() -> Iterator[None]:
    """Collect no garbage until the end of the block; of a process that begins, none of what is there by then: imports
    leave next to none, and to walk half a million objects again and again is a sixth of a rank's start.
    """
    begins = "torch" not in sys.modules
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if begins:
            gc.freeze()
        if collects:
            gc.enable()
