"""The code that an H100 would run, made where none is: Inductor generates it for a faked sm_90, Triton and ptxas
compile it, and registers, spills and the width of every access are read from the machine code.

Needs Triton, which lies in a folder of its own: in the tests' environment every process that compiles for the CPU would
import it, at a second each.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

FOLDER = Path(sys.prefix) / "triton"  # where launch/test.sh puts Triton
PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H100", major=9, minor=0, multi_processor_count=132, regs_per_multiprocessor=65536, warp_size=32,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, total_memory=80 << 30, L2_cache_size=50 << 20,
    shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472, gcnArchName="",
)  # fmt: skip
CUDA, META = 1, 14  # in the table of c10's devices


def search_path() -> str | None:
    """Return what PYTHONPATH needs for Triton; None where there is none."""
    if importlib.util.find_spec("triton") is not None:
        return ""
    return str(FOLDER) if FOLDER.is_dir() else None


def run(module: str, folder: Path, **environment: str) -> None:
    """Run a program of this package with Triton, and with a folder as its argument."""
    path = os.pathsep.join([str(search_path()), str(Path(__file__).parents[2]), *sys.path])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, folder],
        env={**os.environ, "PYTHONPATH": path, **environment}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def fake_tensors() -> Iterator[None]:
    """Let tensors be fake, without values, of "cuda" too on a CPU build of torch: it gets the device guard of "meta",
    which does nothing.
    """
    c10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * (META + 1)).in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE")
    former, guards[CUDA] = guards[CUDA], guards[CUDA] or guards[META]
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        guards[CUDA] = former


class _Driver:
    """What Inductor asks of Triton's driver."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


class Launch(NamedTuple):
    """One start of a kernel: numbers and tensors in the kernel's order."""

    kernel: str  # the stem of its file
    arguments: tuple[Any, ...]


class H100:
    """A faked device: `graphs` that Inductor has compiled, and every launch of their kernels, whose sources in Triton's
    language lie in `folder`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.graphs = self._kernels = 0
        self.launches: list[Launch] = []

    def _kernel(self, name: str, source: str, device_str: str = "cuda") -> Any:
        stem = f"{name}_{self._kernels}"
        self._kernels += 1
        (self._folder / f"{stem}.py").write_text(source.replace(f"def {name}(", f"def {stem}("))
        return types.SimpleNamespace(run=lambda *args, stream: self.launches.append(Launch(stem, args)))

    def _graph(self, code: str) -> None:
        self.graphs += 1

    @contextlib.contextmanager
    def in_place_of_cuda(self) -> Iterator[None]:
        """Compile for it, and record what would be launched. Tensors within are fake: without values."""
        import triton.runtime
        from torch._dynamo.device_interface import CudaInterface
        from torch._inductor.async_compile import AsyncCompile
        from torch._inductor.graph import GraphLowering
        from torch._inductor.runtime import triton_helpers

        device, guards, nothing = torch.device("cuda", 0), torch._C._dynamo.guards, contextlib.nullcontext()
        always = {"get_device_properties": PROPERTIES, "current_device": 0, "device_count": 1}
        answers: dict[Any, dict[str, Any]] = {
            CudaInterface: {
                **always, "get_compute_capability": 90, "is_available": True, "is_triton_capable": True,
                "raise_if_triton_unavailable": None, "synchronize": None, "get_raw_stream": 0,
                "is_bf16_supported": True, "device": nothing,
            },
            CudaInterface.Worker: always,
            torch.cuda: {
                **always, "get_device_capability": (9, 0), "set_device": None, "_DeviceGuard": nothing,
            },
            torch._C: {"_cuda_getCurrentRawStream": 0},
            triton_helpers: {"set_driver_to_gpu": None},
        }  # fmt: skip
        triton.runtime.driver.set_active(_Driver())
        with contextlib.ExitStack() as stack:

            def put(owner: Any, name: str, value: Any) -> None:
                stack.enter_context(mock.patch.object(owner, name, value, create=True))

            for owner, by_name in answers.items():
                for name, answer in by_name.items():
                    value = lambda *args, answer=answer, **options: answer  # noqa: E731
                    put(owner, name, staticmethod(value) if isinstance(owner, type) else value)
            put(torch.version, "cuda", "13.0")
            put(AsyncCompile, "triton", staticmethod(self._kernel))
            put(GraphLowering, "save_output_code", staticmethod(self._graph))
            empty = lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)  # noqa: E731
            put(guards, "_empty_strided_cuda", empty)
            put(guards, "copy_if_misaligned", lambda tensor: tensor)
            stack.enter_context(torch._inductor.config.patch(_SETTINGS))
            stack.enter_context(fake_tensors())
            torch._dynamo.reset()
            yield


_SETTINGS = {
    "joint_graph_constant_folding": False,  # it computes on the device
    "fx_graph_cache": False, "autotune_local_cache": False, "compile_threads": 1, "use_static_triton_launcher": False,
}  # fmt: skip


class MachineCode(NamedTuple):
    """A kernel compiled for one of the block sizes that Inductor would try."""

    block: int  # elements, or rows of a reduction
    threads: int
    registers: int
    spills: int  # instructions that use a thread's own memory
    doubles: int  # FP64 instructions
    widths: dict[str, int]  # of one thread's accesses to global memory: bits -> how many


def machine_codes(path: Path) -> list[MachineCode]:
    """Compile a kernel of `H100`'s folder for sm_90, once for each configuration that is tried on the device."""
    import triton

    triton.runtime.driver.set_active(_Driver())
    tuner = getattr(load(path), path.stem)
    return [_machine_code(tuner._precompile_config(config).kernel.asm["cubin"], config) for config in tuner.configs]


def load(path: Path) -> Any:
    """Import a kernel's file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _machine_code(cubin: bytes, config: Any) -> MachineCode:
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, sass = (
            subprocess.run([tools / tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for tool, option in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
        )
    registers = re.search(r"REG:(\d+)", usage)
    assert registers is not None, usage
    widths = (
        next((bits for bits in ("128", "64", "16", "8") if re.search(rf"\.[US]?{bits}\b", suffixes)), "32")
        for suffixes in re.findall(r"\b(?:LDG|STG)\.E((?:\.\w+)*)", sass)
    )
    return MachineCode(
        config.kwargs["XBLOCK"], 32 * config.num_warps, int(registers[1]),
        len(re.findall(r"\b(?:LDL|STL)\b", sass)), len(re.findall(r"\bD(?:ADD|MUL|FMA|SETP)\b", sass)),
        dict(Counter(widths)),
    )  # fmt: skip


BYTES = {"*i1": 1, "*bf16": 2, "*fp16": 2, "*fp32": 4, "*fp64": 8, "*i64": 8}


def traffic(source: str) -> dict[str, int]:
    """Return the bytes that a kernel's loads and stores move for an "element", and for a "row" that it reduces."""
    signature = ast.literal_eval(re.findall(r"'signature': (\{.*?\})", source)[0])
    moved = Counter[str]()
    for pointer, index in re.findall(r"tl\.(?:load|store)\((\w+) \+ \((.*?)\)[,)]", source):
        by_element = "r0_" in index if "r0_numel" in signature else "x" in index
        moved["element" if by_element else "row" if "x" in index else "kernel"] += BYTES[signature[pointer]]
    return dict(moved)
