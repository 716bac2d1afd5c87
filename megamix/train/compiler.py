"""torch's compiler, loaded before the ranks meet: longer than all that it does for an update that is cached."""

from __future__ import annotations

from collections.abc import Callable

from megamix.config import Config


def load_compiler(config: Config, tell: Callable[[str], None]) -> None:
    """Import it, in parts that `tell` is told of, and spare it trials of what a job's update does not need."""
    tell("loading torch's compiler, 1 of 2")
    import torch._dynamo

    tell("loading torch's compiler, 2 of 2")
    import torch._inductor.compile_fx

    vectors = torch._inductor.config.cpp
    on_x86 = torch.backends.cpu.get_cpu_capability().startswith("AVX")
    if on_x86 and vectors.vec_isa_ok is None and not config.model.compile:
        # The update there is of 256-bit vectors, which any g++ that compiles torch's headers knows. To try each kind
        # that the CPU has is a new interpreter, at each start of each rank, and a compilation where none is cached.
        vectors.vec_isa_ok = True
