"""Small training loops of users, by wrapper, policy and optimizer. Each runs with an audit or without."""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import megamix
from tests.tools.verify.catalogue.foreign import Block

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 32)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def new_model(dtype=FP32):
    torch.manual_seed(1)
    return Model().to(dtype)


class Loop:
    """Loop of a user. `micro_batches`: of a step. `amp`: dtype of autocast. `scaler`: of the loss."""

    def __init__(self, model, optimizer, micro_batches=1, amp=None, scaler=None, clip=0.0):
        self.model, self.optimizer, self.micro_batches = model, optimizer, micro_batches
        self.amp, self.clip = amp, clip
        self.scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)

    def step(self, number):
        rank = dist.get_rank() if dist.is_initialized() else 0
        for micro in range(self.micro_batches):
            generator = torch.Generator().manual_seed(1000 * number + 10 * micro + rank)
            tokens = torch.randint(32, (16, 4), generator=generator)
            with torch.autocast("cpu", self.amp or BF16, enabled=self.amp is not None):
                logits = self.model(tokens)
            self.backward(nn.functional.cross_entropy(logits.float().flatten(0, 1), ((tokens + 1) % 32).flatten()))
        self.update()

    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def update(self):
        if self.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def audited(self, number):
        with megamix.audit(self.model, self.optimizer) as report:
            self.step(number)
        return report

    def weights(self):
        """Return the weights on this rank, with the states of the optimizer."""
        inner = getattr(self.optimizer, "optim", self.optimizer)
        states = [value for state in inner.state.values() for value in state.values() if isinstance(value, Tensor)]
        return [*map(local, (*self.model.parameters(), *states))]


class EngineLoop(Loop):
    def backward(self, loss):
        self.optimizer.backward(loss)

    def update(self):
        self.optimizer.step()

    def weights(self):
        return [tensor for owned in self.optimizer.owned_ranges() for tensor in owned.tensors.values()]


def local(tensor):
    return getattr(tensor, "_local_tensor", tensor).detach()


def adamw(model, lr=1e-2, **settings):
    return torch.optim.AdamW(model.parameters(), lr=lr, **settings)


def plain(dtype=FP32, **settings):
    model = new_model(dtype)
    return Loop(model, adamw(model), **settings)


def scaled(fused=False, init_scale=2.0**10, **settings):
    model = new_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=2)
    return Loop(model, adamw(model, fused=fused), amp=FP16, scaler=scaler, **settings)


def ddp(hook=None, zero=False, **settings):
    model = DistributedDataParallel(new_model())
    if hook:
        model.register_comm_hook(None, hook)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2) if zero else adamw(model)
    return Loop(model, optimizer, **settings)


def fsdp(policy=None, dtype=FP32, lr=1e-2, **settings):
    model, mesh = new_model(dtype), init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())
    return Loop(model, adamw(model, lr), **settings)


def engine(precision, micro_batches=1, shard="states", kind=megamix.AdamW, **settings):
    model, optimizer = new_model(), kind(lr=1e-2)
    sharding = megamix.Sharding([*model.layers], shard=shard)
    trained = megamix.ShardedEngine(
        model, optimizer, precision, sharding, grad_accum_steps=micro_batches, compile_update=False, **settings
    )
    return EngineLoop(model, trained, micro_batches)


HALF = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
SUMS = megamix.Precision(BF16, reduce_dtype="half_fp32_sum")
FROZEN = partial(megamix.AdamW, state_dtype=BF16, groups=(megamix.ParamGroup(pattern="layers.1.*", lr_factor=0.0),))
ALONE = {
    "fp32": plain,
    "bf16": lambda: plain(BF16),
    "autocast bf16": lambda: plain(amp=BF16),
    "autocast fp16, scaler": scaled,
    "autocast fp16, scaler, fused": lambda: scaled(fused=True, micro_batches=2),
    "engine bf16": lambda: engine(megamix.Precision(BF16), clip_grad=1.0),
    "engine, frozen": lambda: engine(megamix.Precision(BF16), kind=FROZEN),
    "engine, muon": lambda: engine(megamix.Precision(BF16), kind=megamix.Muon),
    "engine fp16": lambda: engine(megamix.Precision(FP16, loss_scale=megamix.DynamicLossScale(init_scale=2.0**16)), 2),
}
TOGETHER = {
    "ddp, micro-batches": lambda: ddp(micro_batches=2, clip=1.0),
    "ddp, autocast": lambda: ddp(amp=BF16),
    "ddp, fp16 on the wire, zero": lambda: ddp(hook=fp16_compress_hook, zero=True),
    "fsdp2": fsdp,
    "fsdp2 bf16, fp32 sums": lambda: fsdp(HALF, micro_batches=2, clip=1.0),
    "fsdp2 bf16": lambda: fsdp(MixedPrecisionPolicy(param_dtype=BF16)),
    "engine": lambda: engine(SUMS, 2),
    "engine, gradients": lambda: engine(SUMS, 2, "gradients"),
    "engine, muon, parameters": lambda: engine(megamix.Precision(BF16), 2, "parameters", megamix.Muon),
    "engine, parameters": lambda: engine(SUMS, 2, "parameters"),
}  # fmt: skip


def trained(name, audits):
    """Return a loop's weights, and the last of two audits in the middle."""
    loop, report = (ALONE | TOGETHER)[name](), None
    for number in range(4):
        if audits and number in (1, 2):
            report = loop.audited(number)
        else:
            loop.step(number)
    return loop.weights(), report


def same_with_and_without(name):
    """Return whether a loop learns the same with audits, bit for bit, and the last audit's text."""
    (want, _), (got, report) = (trained(name, audits) for audits in (False, True))
    same = len(want) == len(got) and all(
        one.dtype == other.dtype and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
        for one, other in zip(want, got, strict=True)
    )
    return same, str(report)
