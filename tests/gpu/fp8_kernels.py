"""The kernels of products in FP8 as an H100 would get them: `python -m tests.gpu.fp8_kernels FOLDER` writes fp8.json
there.
"""

from tests.gpu import simulated  # before torch: autograd asks for a device

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megamix.config import FP8Config
from megamix.model.fp8 import FP8Product
from megamix.model.ops import Ops
from tests.gpu.h100 import H100

TOKENS, HIDDEN, KV = 4096, 4096, 1024  # a sequence of Llama 3.1 8B
RECIPES = {"half": None, "rowwise": FP8Config(recipe="rowwise"), "tensorwise": FP8Config(recipe="tensorwise")}


class Products(TorchDispatchMode):
    """Counts the products of matrices, by name."""

    def __init__(self):
        super().__init__()
        self.count = {"_scaled_mm": 0, "mm": 0}

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.split("::")[1]
        self.count |= {name: self.count[name] + 1} if name in self.count else {}
        return function(*args, **(kwargs or {}))


def counted(h100, section):
    """Return what norm, query, key and value launch: the files of the kernels with their tensors' bytes, and the
    products, in forward and in backward.
    """
    ops = Ops(wide=False)
    ops = ops if section is None else replace(ops, product=FP8Product(section, ops.product))
    x, norm, *weights = (
        _made(*shape) for shape in ((TOKENS, HIDDEN), (HIDDEN,), *[(n, HIDDEN) for n in (HIDDEN, KV, KV)])
    )

    def projected():
        normed = ops.rms_norm(x, norm, 1e-5)
        return tuple(ops.linear(normed, weight, None) for weight in weights)

    part = torch.compile(projected, fullgraph=True, dynamic=False)
    h100.launches.clear()
    with Products() as forward:
        outs = part()
    first = _launched(h100)
    with Products() as backward:
        torch.autograd.backward(outs, [torch.zeros_like(out) for out in outs])
    return {
        "kernels": [first, _launched(h100)], "products": [forward.count, backward.count],
    }  # fmt: skip


def _made(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16, device="cuda", requires_grad=True)


def _launched(h100):
    found = [(file, sum(one.nbytes for one in given if isinstance(one, Tensor))) for file, given in h100.launches]
    h100.launches.clear()
    return found


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    device = H100(folder)
    # Two names of one function would be two entries in a table of the compiler's.
    exchange = torch.cuda._exchange_device
    other = mock.patch.object(torch.cuda, "_maybe_exchange_device", lambda to: exchange(to))
    # The code between kernels makes views that a fake tensor does not know.
    views = mock.patch.object(torch._C._dynamo.guards, "_reinterpret_tensor", torch.as_strided)
    with other, device.in_place_of_cuda(), views:
        found = {recipe: counted(device, section) for recipe, section in RECIPES.items()}
    (folder / "fp8.json").write_text(json.dumps(found, indent=1))
