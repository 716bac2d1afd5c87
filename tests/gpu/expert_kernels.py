"""Count what a layer of experts launches and moves on a GPU. Meta tensors stand for a GPU's."""

import contextlib
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megamix.config import load_config
from megamix.model.experts import Experts, Router, SortedRows
from megamix.model.ops import Ops
from megamix.model.wide import WideScores
from tests.gpu.test_operations import FREE

CONFIG = Path(__file__).parents[2] / "configs/qwen3-30b-a3b.toml"
ROUTER, PERMUTE, PRODUCTS, INNER = "router", "permute", "grouped products", "activation, factors"
METHODS = (
    (Router, "forward", ROUTER), (WideScores, "backward", ROUTER), (SortedRows, "sorted_by", PERMUTE),
    (SortedRows, "spread", PERMUTE), (SortedRows, "join", PERMUTE),
)  # fmt: skip


@dataclass
class Part:
    """Cost of one part of a layer. `bytes`: those of each operation's inputs and outputs, once: the least it moves."""

    operations: int = 0
    bytes: int = 0
    flops: int = 0


class Parts(TorchDispatchMode):
    """Counts by part. What none of METHODS calls is the router's if it works on numbers of experts."""

    def __init__(self, num_experts):
        super().__init__()
        self._num_experts, self._inside = num_experts, []
        self.begin()

    def begin(self):
        """Count from now on into new parts, by name, and return them."""
        self._by_name = {name: Part() for name in (ROUTER, PERMUTE, PRODUCTS, INNER)}
        return self._by_name

    def claim(self, owner, name, part):
        """Return the patch that lets a method's operations count for a part."""
        method = getattr(owner, name)

        @wraps(method)
        def inside(*args):
            self._inside.append(part)
            try:
                return method(*args)
            finally:
                self._inside.pop()

        is_static = isinstance(vars(owner)[name], staticmethod)
        return mock.patch.object(owner, name, staticmethod(inside) if is_static else inside)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name = function._schema.name.split("::")[1]
        is_view = any(one.alias_info and not one.alias_info.is_write for one in function._schema.returns)
        if not is_view and name not in FREE:
            tensors = [one for one in tree_leaves((args, kwargs, out)) if isinstance(one, Tensor)]
            part = self._by_name[PRODUCTS if name == "_grouped_mm" else self._part_of(tensors)]
            part.operations += 1
            moved = [out, out, args[-1]] if name == "index_select" else tensors  # it reads the rows that it gives
            part.bytes += sum(one.numel() * one.itemsize for one in moved)
            part.flops += 2 * args[0].numel() * args[1].shape[-1] if name in ("mm", "_grouped_mm") else 0
        return out

    def _part_of(self, tensors):
        if self._inside:
            return self._inside[-1]
        widest = max(one.shape[-1] if one.dim() else 1 for one in tensors)
        return ROUTER if widest <= self._num_experts else INNER


def count(ep_size):
    """Return the parts of forward and of backward, for a micro-batch of qwen3-30b-a3b in one layer. A rank of `ep_size`
    has its share of the experts, and as many rows as without, which an even exchange has brought.
    """
    config = load_config(CONFIG, ["model.compile=false"]).model
    assert config.experts is not None
    parts = Parts(config.experts.num_experts)
    with torch.device("meta"):
        layer = Experts(config, config.experts, Ops())
        x = torch.zeros(1, config.seq_len, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    for linear in (layer.router, layer.gate, layer.up, layer.down):
        assert linear is not None
        here = len(linear.weight) // (1 if linear is layer.router else ep_size)
        linear.weight = torch.nn.Parameter(linear.weight.detach()[:here].bfloat16())
    compute = layer._compute
    layer._compute = lambda rows, weights, counts: compute(rows, weights, counts[:here])
    with contextlib.ExitStack() as inside:
        for method in METHODS:
            inside.enter_context(parts.claim(*method))
        inside.enter_context(parts)
        forward, out = parts.begin(), layer(x)
        slope = torch.zeros_like(out)
        backward = parts.begin()
        out.backward(slope)
    return [forward, backward]
