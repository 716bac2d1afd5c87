"""Right training loops of five kinds, around a net with buffers of every kind: DistributedDataParallel, with torch's
sharded optimizer, too, FSDP2, a loop by hand with autocast, a wrapper as Lightning Fabric's. `loop_bugs` beside this
replaces their parts.
"""

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.tools.verify.catalogue import foreign
from tests.tools.verify.catalogue.foreign import HIDDEN, IGNORED, LENGTH, Rotary, Unequal, wide

AUTOCASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Net(foreign.Net):
    """The catalogue's net behind rotary positions and running statistics, which are FP32 whatever the weights are."""

    def __init__(self, tied, recomputed):
        super().__init__(tied)
        self.recomputed, self.rotary = recomputed, Rotary()
        self.still = nn.BatchNorm1d(HIDDEN, affine=False)
        buffers = {
            "mask": torch.ones(LENGTH, dtype=torch.bool),
            "turns": torch.polar(torch.ones(HIDDEN // 2), torch.arange(HIDDEN // 2) / 3),
            "distances": -0.1 * (torch.arange(LENGTH) % 5), "forwards": torch.zeros((), dtype=torch.int64),
            "largest": torch.ones(3),  # a history of maxima
            "unused": torch.empty(0),
            "least": torch.full((2,), math.inf),  # an observer that has seen nothing of the second
            "range": torch.full((2,), math.nan),
        }  # fmt: skip
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer, persistent=name not in ("mask", "turns"))

    def hidden(self, x):
        return super().hidden(self.rotary(x))

    def forward(self, tokens):
        x = self.embed(tokens)
        turned = torch.view_as_complex(wide(x).unflatten(-1, (-1, 2)).contiguous()) * self.turns
        x = torch.view_as_real(turned).flatten(-2).to(x.dtype)
        if self.training:
            with torch.no_grad():
                self.forwards += 1
                largest = x.detach().abs().max()
                self.largest.copy_(self.largest.roll(1))
                self.largest[0] = self.range[0] = largest
                self.least[0] = self.least[0].minimum(largest)
        x = x + (self.still(wide(x)) + self.distances[:, None]).to(x.dtype)
        hidden = checkpoint(self.hidden, x, use_reentrant=False) if self.recomputed else self.hidden(x)
        return self.head(x + hidden)


class Loop(Unequal):
    """Common parts of the five loops. Micro-batches have equally many targets, unless `unequal`."""

    recomputed = unequal = False
    precision = "fp32"
    start = 2.0**15  # in FP16
    table = torch.float32  # dtype in which the training keeps its rotary tables

    def net(self):
        return Net(self.tied, self.recomputed)

    def loss(self, model, batch):
        return F.cross_entropy(wide(model(batch[0])), batch[1], ignore_index=IGNORED)

    def told(self, losses, batches):
        return super().told(losses, batches) | {"grad_norm": float(self.norm)}

    def clip(self):
        self.scaler.unscale_(self.optim)
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), self.clip_grad or torch.inf)
        self.norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def setup(self, model):
        model.rotary.to(self.table)
        self.start = self.start if self.precision == "fp16" else 0.0
        return super().setup(model)


class Hand(Loop):
    """Loop by hand whose forward and loss are under autocast, with a GradScaler for FP16."""

    def forward(self, batch):
        dtype = AUTOCASTS.get(self.precision, torch.bfloat16)
        with torch.autocast("cpu", dtype, enabled=self.precision != "fp32"):
            return super().forward(batch)


class Ddp(foreign.Ddp, Hand):
    """Loop with DistributedDataParallel, which reduces in the last micro-batch only."""

    def micro(self, number, batch, batches):
        self.module.require_backward_grad_sync = number == len(batches) - 1
        return super().micro(number, batch, batches)


class Zero(foreign.Ddp, Hand):
    """Loop with DistributedDataParallel, which always reduces, and an optimizer whose states ranks divide."""

    def make(self, module):
        return ZeroRedundancyOptimizer(self.grouped(module), self.kind, lr=self.lr, **self.options)


class Fsdp(foreign.Fsdp, Loop):
    """Loop with FSDP2 and a policy: "fp32", "bf16" with FP32 sums, "bf16 sums"."""

    def wrap(self, model):
        half = torch.bfloat16 if self.precision != "fp32" else None
        sums = torch.float32 if self.precision == "bf16" else half
        self.policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=sums, cast_forward_inputs=False)
        for module in (model.up, model.down):
            fully_shard(module, mp_policy=self.policy)
        return super().wrap(model)

    def micro(self, number, batch, batches):
        self.module.set_requires_gradient_sync(number == len(batches) - 1)
        return super().micro(number, batch, batches)


class FabricModule(nn.Module):
    """Wrapper that holds its module twice, as Fabric's does; its forward enters autocast and gives FP32."""

    def __init__(self, forward_module, original_module, dtype):
        super().__init__()
        self._forward_module, self._original_module, self.dtype = forward_module, original_module, dtype

    def forward(self, *args):
        with torch.autocast("cpu", self.dtype or torch.bfloat16, enabled=self.dtype is not None):
            return wide(self._forward_module(*args))


class Fabric(Loop):
    """Loop with a module and an optimizer in wrappers such as Lightning Fabric's."""

    def wrap(self, model):
        forward = DistributedDataParallel(model) if self.ranks > 1 else model
        return FabricModule(forward, model, AUTOCASTS.get(self.precision))

    def make(self, module):
        made = super().make(module)
        return SimpleNamespace(optimizer=made, step=made.step, zero_grad=made.zero_grad)

    def micro(self, number, batch, batches):
        if self.ranks > 1:
            self.module._forward_module.require_backward_grad_sync = number == len(batches) - 1
        return super().micro(number, batch, batches)

    def reduce(self):
        pass
