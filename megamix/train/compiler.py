"""The early import of torch's compiler, before the ranks meet. It takes longer than to compile an update from the
cache.
"""

import os
import shutil
import sys

from megamix.base.console import say_phase
from megamix.config import DecoderConfig


def compiler_problem(model: DecoderConfig) -> str:
    """Return a line if the model is to be compiled and there is no compiler, as a CPU needs it; an empty text if not.

    Without one, the update falls back to torch's own kernels.
    """
    name = _compiler()
    if not model.compile or shutil.which(name):
        return ""
    fix = "install it, name another one by CXX, or write compile = false"
    return f"model.compile: is true, but there is no C++ compiler {name}; {fix}"


def _compiler() -> str:
    """Return the name of the C++ compiler that torch starts."""
    return os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")


def load_compiler(model: DecoderConfig) -> None:
    """Import the compiler, and skip its trials of vector sets that no update uses. Say when each part begins."""
    say_phase("loading torch's compiler, 1 of 2")
    import torch._dynamo

    say_phase("loading torch's compiler, 2 of 2")
    import torch._inductor.compile_fx

    vectors = torch._inductor.config.cpp
    on_x86 = torch.backends.cpu.get_cpu_capability().startswith("AVX")
    if on_x86 and vectors.vec_isa_ok is None and not model.compile:
        # The update uses 256-bit vectors, which any g++ that compiles torch's headers knows. A trial of each vector set
        # of the CPU would start a new interpreter at each start of each rank, and compile unless a result is cached.
        vectors.vec_isa_ok = True


def try_compiler() -> None:
    """Compile a little, so that all is loaded that torch loads at its first compilation. Do it where that starts no
    thread and no driver of a GPU.
    """
    import torch

    if torch.version.cuda is not None or not shutil.which(_compiler()):
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # OpenMP's threads would be missing in a fork, which waits for them for ever
    with torch._inductor.config.patch(compile_threads=1):
        torch.compile(torch.square, dynamic=True)(torch.ones(8))
    torch.set_num_threads(threads)
