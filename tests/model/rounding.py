"""Ways to compute halves, the unit of a rounding, gradients and what is kept for them, for the tests of operations."""

from contextlib import contextmanager

import torch

from megamix.model.ops import Ops

UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
U32 = UNIT[torch.float32]

FP16_WIDE = Ops(native=frozenset({torch.bfloat16}))  # as many CPUs of servers
ALL_WIDE = Ops(native=frozenset())
NATIVE = Ops(wide=False)


def randn(*shape, seed=0, dtype=torch.float16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def forward_and_grads(fn, inputs):
    """Return [output, gradient of each input] of fn for a random gradient of the output, the same for every dtype."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = fn(*leaves)
    grad = randn(*out.shape, seed=99).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@contextmanager
def saved_bytes():
    """Return the bytes of the tensors that autograd keeps for backward, by dtype. Each storage counts once."""
    kept = {}
    seen = set()

    def pack(x):
        if x.untyped_storage().data_ptr() not in seen:
            seen.add(x.untyped_storage().data_ptr())
            kept[x.dtype] = kept.get(x.dtype, 0) + x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield kept
