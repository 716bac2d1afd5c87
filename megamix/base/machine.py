"""This machine's cores, memory and arithmetic, and a rank's share of them."""

from __future__ import annotations

import ctypes
import functools
import gc
import math
import os
import platform
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import torch

# Options of glibc's malloc, with their numbers and a rank's values. mmap_threshold: larger blocks get a mapping of
# their own. trim_threshold: free bytes that are kept at the top (-1: all). top_pad: bytes fetched beyond the need. A
# user sets them at a process's start by MALLOC_MMAP_THRESHOLD_, or by glibc.malloc.mmap_threshold in GLIBC_TUNABLES.
_MALLOC = {
    "mmap_threshold": (-3, 2**31 - 1),
    "trim_threshold": (-1, -1),
    "top_pad": (-2, 2**28),
}
# Variables that torch reads when it is loaded, under their present and former names, with a rank's values.
_TORCH = {
    ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"): "expandable_segments:True",  # less fragmentation on a GPU
    ("TORCH_NCCL_HIGH_PRIORITY", ""): "1",  # sums have priority over the products of a backward
    ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"): "2000",  # collectives that a failed rank reports
}
WORKSPACES = (":4096:8", ":16:8")  # values with which cuBLAS gives the same bits each time
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": WORKSPACES[0], "TORCHINDUCTOR_DETERMINISTIC": "1"}
CPU_HALVES = "MEGAMIX_CPU_HALVES"  # names the variable that says how a CPU computes halves
_LARGEST_BEFORE_2_35 = 2**25  # largest value that older glibc keeps; a larger one makes it fall back to 128 KiB


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name(info: Path = Path("/proc/cpuinfo")) -> str:
    """Return the name of this machine's processor, as the kernel or, without it, the platform tells it."""
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def of_groups(root: Path, *names: str) -> Iterator[Path]:
    """Yield the files of these names in every control group around this process. A container may see its own group as
    the topmost one, and not the path to it. Only Linux has groups.
    """
    own_groups = root / "proc/self/cgroup"
    for line in own_groups.read_text().splitlines() if own_groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        own = root / "sys/fs/cgroup" / controllers / path[1:]
        yield from (group / name for group in (own, *own.parents) for name in names if (group / name).is_file())


def memory_for_each(ranks: int, root: Path = Path("/")) -> tuple[float, str]:
    """Return the bytes that each of `ranks` ranks of this machine may take, and what sets that limit."""
    limits = [(math.inf, "this machine, which does not tell its memory")]
    with suppress(OSError):  # a sandbox may hide these files
        limits.append((psutil.virtual_memory().total / ranks, "this machine's memory"))
        for file in of_groups(root, "memory.max", "memory.limit_in_bytes"):
            limits.append((float(file.read_text().replace("max", "inf")) / ranks, f"what {file} allows"))
    if (soft := resource.getrlimit(resource.RLIMIT_AS)[0]) != resource.RLIM_INFINITY:
        limits.append((float(soft), "what ulimit -v allows"))
    return min(limits)


def peak_resident() -> int:
    """Return the bytes of this process's memory at their peak."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # Linux counts in KiB


def kernel_kills(root: Path = Path("/")) -> int:
    """Return how many processes the kernel has killed for lack of memory in the control groups around this process. A
    process counts once per group.
    """
    kills = 0
    with suppress(OSError):
        for file in (root / "proc/vmstat", *of_groups(root, "memory.events", "memory.oom_control")):
            kills += sum(map(int, re.findall(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)))
    return kills


@functools.cache
def torch_version() -> tuple[int, ...]:
    """Return the first two numbers of torch's version; does not load it."""
    return tuple(map(int, version("torch").split(".")[:2]))


def has_gpu() -> bool:
    """Return whether torch can use a GPU; loads torch."""
    import torch

    return torch.cuda.is_available()


@functools.cache
def half_units() -> frozenset[torch.dtype]:
    """Return the half dtypes in which this CPU has arithmetic; loads torch.

    Without such arithmetic torch's products in that dtype take 2 (BF16 with AVX-512) to 100 times as long as in FP32.
    """
    import torch

    units = {  # names in torch; the last of each row is Arm's
        torch.float16: ("avx512_fp16", "amx_fp16", "fp16_arith"),
        torch.bfloat16: ("avx512_bf16", "amx_bf16", "bf16"),
    }
    found = torch.cpu.get_capabilities()
    return frozenset(dtype for dtype, names in units.items() if any(found.get(name, False) for name in names))


def native_halves() -> frozenset[torch.dtype]:
    """Return the half dtypes in which a CPU's products are computed directly.

    These are the dtypes in which it has arithmetic, unless MEGAMIX_CPU_HALVES is set: "native" means all, "wide" none.
    The others are widened to FP32, and results rounded once.
    Raises: ValueError if it has another value.
    """
    import torch

    chosen = os.environ.get(CPU_HALVES, "")
    ways = {"": half_units(), "native": frozenset({torch.float16, torch.bfloat16}), "wide": frozenset[torch.dtype]()}
    if chosen not in ways:
        raise ValueError(
            f'{CPU_HALVES}: got {chosen!r}, must be "native" or "wide"; unset it for what this CPU computes faster'
        )
    return ways[chosen]


def set_torch_environment(ranks: int | None, *, deterministic: bool = False) -> None:
    """Set torch's and NCCL's variables for a machine with `ranks` ranks, except those that the user has set. Call it
    before torch is loaded, which reads them once. `ranks`: None if nobody knows yet.

    Each rank gets its share of the cores. With more threads than cores the ranks wait for each other's threads: two
    ranks with two threads each on two cores reached 30 % of the speed of two ranks with one thread each.
    """
    threads = {} if ranks is None else {"OMP_NUM_THREADS": str(max(1, num_cores() // ranks))}
    more = threads | (DETERMINISTIC if deterministic else {})
    for (name, former), value in (_TORCH | {(name, ""): value for name, value in more.items()}).items():
        if former not in os.environ:
            os.environ.setdefault(name, value)


def keep_freed_memory() -> None:
    """Make glibc's malloc keep the memory that a step frees for the next one, unless the user's environment says
    otherwise.

    By default malloc returns a large block to the system as soon as it is freed, and the next step pays for mapping and
    zeroing the same pages again. Keeping them gains 8 to 10 % tokens/s on a CPU. The three options belong together:
    setting any one ends glibc's own adjustment of the others. Another libc stays as it is.
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
    """Turn garbage collection off inside the block. If the block is the first to load torch, exclude its objects from
    later collections.

    Imports leave almost no garbage, and walking half a million objects again and again takes a sixth of a rank's start.
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
