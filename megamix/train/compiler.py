"""Early import of torch's compiler, before the ranks meet; it takes longer than an update's cached compilation."""

from collections.abc import Callable

from megamix.config import Config


def load_compiler(config: Config, tell: Callable[[str], None]) -> None:
    """Import the compiler, telling `tell` of each part, and skip its trials of vector sets that no update uses."""
    tell("loading torch's compiler, 1 of 2")
    import torch._dynamo

    tell("loading torch's compiler, 2 of 2")
    import torch._inductor.compile_fx

    vectors = torch._inductor.config.cpp
    on_x86 = torch.backends.cpu.get_cpu_capability().startswith("AVX")
    if on_x86 and vectors.vec_isa_ok is None and not config.model.compile:
        # The update uses 256-bit vectors, which any g++ that compiles torch's headers knows. Trying each vector set of
        # the CPU would start a new interpreter, at each start of each rank, and compile wherever nothing is cached.
        vectors.vec_isa_ok = True
