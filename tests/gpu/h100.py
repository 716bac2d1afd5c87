"""The code that an H100 would run, made where none is: Inductor generates it for a faked sm_90, Triton and ptxas
compile it, and registers, spills and the width of every access are read from the machine code.

Needs Triton, which lies in a folder of its own: in the tests' environment every process that compiles for the CPU would
import it, at a second each.
"""

import ast
import contextlib
import ctypes
import importlib.util
import os
import re
import runpy
import subprocess
import sys
import types
from collections import Counter
from pathlib import Path
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


def search_path():
    """Return what PYTHONPATH needs for Triton; None where there is none."""
    if importlib.util.find_spec("triton") is not None:
        return ""
    return str(FOLDER) if FOLDER.is_dir() else None


def run(module, folder):
    """Run a program of this package with Triton, and with a folder as its argument."""
    path = os.pathsep.join([str(search_path()), str(Path(__file__).parents[2]), *sys.path])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, folder],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def fake_tensors():
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

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_active_torch_device(self):
        return torch.device("cuda", 0)


def _always(answer):
    return staticmethod(lambda *_, **__: answer)


class H100:
    """A faked device: `graphs` that Inductor has compiled, and every launch of their kernels, as (file, arguments in
    the kernel's order). The kernels' sources in Triton's language lie in `folder`, by name.
    """

    def __init__(self, folder):
        self.folder = folder
        self.graphs = self._kernels = 0
        self.launches = []

    def _kernel(self, name, source, device_str="cuda"):
        stem = f"{name}_{self._kernels}"
        self._kernels += 1
        (self.folder / f"{stem}.py").write_text(source.replace(f"def {name}(", f"def {stem}("))
        return types.SimpleNamespace(run=lambda *args, stream: self.launches.append((f"{stem}.py", args)))

    def _graph(self, code):
        self.graphs += 1

    @contextlib.contextmanager
    def in_place_of_cuda(self):
        """Compile for it, and record what would be launched. Tensors within are fake: without values."""
        import triton.runtime
        from torch._dynamo.device_interface import CudaInterface
        from torch._inductor.async_compile import AsyncCompile
        from torch._inductor.graph import GraphLowering
        from torch._inductor.runtime import triton_helpers

        always = {"get_device_properties": PROPERTIES, "current_device": 0, "device_count": 1}
        answers = {
            CudaInterface: {
                **always, "get_compute_capability": 90, "is_available": True, "is_triton_capable": True,
                "raise_if_triton_unavailable": None, "synchronize": None, "get_raw_stream": 0,
                "is_bf16_supported": True, "device": contextlib.nullcontext(),
            },
            CudaInterface.Worker: always,
            torch.cuda: {
                **always, "get_device_capability": (9, 0), "set_device": None,
                "_DeviceGuard": contextlib.nullcontext(),
            },
            torch._C: {"_cuda_getCurrentRawStream": 0},
            triton_helpers: {"set_driver_to_gpu": None},
        }  # fmt: skip
        put = {
            torch.version: {"cuda": "13.0"},
            AsyncCompile: {"triton": staticmethod(self._kernel)},
            GraphLowering: {"save_output_code": staticmethod(self._graph)},
            torch._C._dynamo.guards: {
                "_empty_strided_cuda": lambda *sizes: torch.empty_strided(*sizes[:2], dtype=sizes[2], device="cuda"),
                "copy_if_misaligned": lambda tensor: tensor,
            },
        }
        triton.runtime.driver.set_active(_Driver())
        torch._dynamo.reset()
        with contextlib.ExitStack() as stack:
            for owner, by_name in answers.items():
                put[owner] = {name: _always(answer) for name, answer in by_name.items()}
            for owner, by_name in put.items():
                stack.enter_context(mock.patch.multiple(owner, create=True, **by_name))
            stack.enter_context(torch._inductor.config.patch(_SETTINGS))
            stack.enter_context(fake_tensors())
            yield


_SETTINGS = {
    "joint_graph_constant_folding": False,  # it computes on the device
    "fx_graph_cache": False, "autotune_local_cache": False, "compile_threads": 1, "use_static_triton_launcher": False,
}  # fmt: skip


def machine_code(path):
    """Compile a kernel of `H100`'s folder for sm_90, where nothing about it is chosen by timing. Return

    block: its elements, or rows of a reduction; threads; registers of each; spills: instructions that use a thread's
    own memory; doubles: instructions in FP64; widths: of one thread's accesses to global memory, bits -> how many.
    """
    import triton

    triton.runtime.driver.set_active(_Driver())
    tuner = runpy.run_path(str(path))[path.stem]
    (config,) = tuner.configs
    cubin = path.with_suffix(".cubin")
    cubin.write_bytes(tuner._precompile_config(config).kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    done = subprocess.run([tool, "-res-usage", "-sass", cubin], capture_output=True, text=True, check=True)
    (registers,) = re.findall(r"REG:(\d+)", done.stdout)
    widths = Counter(
        next((bits for bits in ("128", "64", "16", "8") if re.search(rf"\.[US]?{bits}\b", suffixes)), "32")
        for suffixes in re.findall(r"\b(?:LDG|STG)\.E((?:\.\w+)*)", done.stdout)
    )
    return {
        "block": config.kwargs["XBLOCK"], "threads": 32 * config.num_warps, "registers": int(registers),
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", done.stdout)),
        "doubles": len(re.findall(r"\bD(?:ADD|MUL|FMA|SETP)\b", done.stdout)), "widths": widths,
    }  # fmt: skip


BYTES = {"*i1": 1, "*bf16": 2, "*fp16": 2, "*fp32": 4, "*fp64": 8, "*i64": 8}


def traffic(source):
    """Return the bytes that a kernel's loads and stores move for an "element", and for a "row" that it reduces."""
    signature = ast.literal_eval(re.findall(r"'signature': (\{.*?\})", source)[0])
    moved = Counter()
    for pointer, index in re.findall(r"tl\.(?:load|store)\((\w+) \+ \((.*?)\)[,)]", source):
        by_element = "r0_" in index if "r0_numel" in signature else "x" in index
        moved["element" if by_element else "row" if "x" in index else "kernel"] += BYTES[signature[pointer]]
    return moved
