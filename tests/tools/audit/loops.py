"""Small training loops of users, by wrapper, policy and optimizer. Each runs with an audit or without."""

import contextlib

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import megamix

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(16, 32)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def new_model(dtype=FP32, seed=0):
    torch.manual_seed(seed)
    return Model().to(dtype)


class Loop:
    """Loop of a user. `micro_batches`: of a step. `amp`: dtype of autocast. `scaler`: of the loss."""

    def __init__(self, model, optimizer, micro_batches=1, amp=None, scaler=None, clip=0.0):
        self.model, self.optimizer, self.micro_batches = model, optimizer, micro_batches
        self.amp, self.scaler, self.clip = amp, scaler, clip

    def step(self, number):
        rank = dist.get_rank() if dist.is_initialized() else 0
        for micro in range(self.micro_batches):
            generator = torch.Generator().manual_seed(1000 * number + 10 * micro + rank)
            tokens = torch.randint(32, (16, 4), generator=generator)
            with torch.autocast("cpu", self.amp) if self.amp else contextlib.nullcontext():
                logits = self.model(tokens)
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), ((tokens + 1) % 32).flatten())
            if isinstance(self.optimizer, megamix.ShardedEngine):
                self.optimizer.backward(loss)
            else:
                (self.scaler.scale(loss) if self.scaler else loss).backward()
        if self.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        if not isinstance(self.optimizer, megamix.ShardedEngine):
            self.optimizer.zero_grad()

    def audited(self, number):
        with megamix.audit(self.model, self.optimizer) as report:
            self.step(number)
        return report

    def weights(self):
        """Return the weights on this rank, with the states of the optimizer."""
        if isinstance(self.optimizer, megamix.ShardedEngine):
            return [tensor for owned in self.optimizer.owned_ranges() for tensor in owned.tensors.values()]
        inner = getattr(self.optimizer, "optim", self.optimizer)
        states = [value for state in inner.state.values() for value in state.values() if isinstance(value, Tensor)]
        return [getattr(tensor, "_local_tensor", tensor).detach() for tensor in (*self.model.parameters(), *states)]


def adamw(model, lr=1e-2, **settings):
    return torch.optim.AdamW(model.parameters(), lr=lr, **settings)


def plain(dtype=FP32, seed=0, **settings):
    model = new_model(dtype, seed)
    return Loop(model, adamw(model), **settings)


def sgd(seed, **settings):
    model = new_model(seed=seed)
    return Loop(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True), **settings)


def scaled(seed, fused=False, **settings):
    model = new_model(seed=seed)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    return Loop(model, adamw(model, fused=fused), amp=FP16, scaler=scaler, **settings)


def ddp(seed, hook=None, zero=False, **settings):
    model = DistributedDataParallel(new_model(seed=seed))
    if hook:
        model.register_comm_hook(None, hook)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2) if zero else adamw(model)
    return Loop(model, optimizer, **settings)


def fsdp(seed, policy=None, dtype=FP32, lr=1e-2, **settings):
    model, mesh = new_model(dtype, seed), init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())
    return Loop(model, adamw(model, lr), **settings)


def engine(seed, precision, micro_batches=1, shard="states", kind=megamix.AdamW, **settings):
    model, optimizer = new_model(seed=seed), kind(lr=1e-2)
    sharding = megamix.Sharding([*model.layers], shard=shard)
    trained = megamix.ShardedEngine(
        model, optimizer, precision, sharding, grad_accum_steps=micro_batches, compile_update=False, **settings
    )
    return Loop(model, trained, micro_batches)


def scaled_fp16():
    return megamix.Precision(FP16, loss_scale=megamix.DynamicLossScale(init_scale=2.0**16))


HALF = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
ALONE = {
    "fp32": lambda: plain(seed=1),
    "fp32, micro-batches, clipped": lambda: plain(seed=2, micro_batches=3, clip=0.5),
    "bf16": lambda: plain(BF16, seed=3),
    "nesterov": lambda: sgd(seed=4, micro_batches=2),
    "autocast bf16": lambda: plain(seed=5, amp=BF16),
    "autocast bf16, micro-batches": lambda: plain(seed=6, amp=BF16, micro_batches=2),
    "autocast fp16, scaler": lambda: scaled(seed=7),
    "autocast fp16, scaler, fused": lambda: scaled(seed=8, fused=True, micro_batches=2),
    "engine bf16": lambda: engine(9, megamix.Precision(BF16), clip_grad=1.0),
    "engine, muon": lambda: engine(9, megamix.Precision(BF16), kind=megamix.Muon),
    "engine fp16": lambda: engine(
        10, megamix.Precision(FP16, loss_scale=megamix.DynamicLossScale(init_scale=2.0**16)), 2
    ),
}
TOGETHER = {
    "ddp": lambda: ddp(11),
    "ddp, micro-batches": lambda: ddp(12, micro_batches=2, clip=1.0),
    "ddp, autocast": lambda: ddp(13, amp=BF16),
    "ddp, fp16 on the wire": lambda: ddp(14, hook=fp16_compress_hook),
    "ddp, fp16 on the wire, zero": lambda: ddp(15, hook=fp16_compress_hook, zero=True),
    "zero": lambda: ddp(16, zero=True, amp=BF16),
    "fsdp2": lambda: fsdp(17),
    "fsdp2 bf16, fp32 sums": lambda: fsdp(18, HALF, micro_batches=2, clip=1.0),
    "fsdp2 bf16": lambda: fsdp(19, MixedPrecisionPolicy(param_dtype=BF16)),
    "engine": lambda: engine(20, megamix.Precision(BF16, reduce_dtype="half_fp32_sum"), 2),
    "engine, gradients": lambda: engine(20, megamix.Precision(BF16, reduce_dtype="half_fp32_sum"), 2, "gradients"),
    "engine, muon, parameters": lambda: engine(20, megamix.Precision(BF16), 2, "parameters", megamix.Muon),
    "engine, parameters": lambda: engine(20, megamix.Precision(BF16, reduce_dtype="half_fp32_sum"), 2, "parameters"),
}  # fmt: skip


def trained(name, audits, steps=4):
    """Return a loop's weights, and the last of two audits in the middle."""
    loop, report = (ALONE | TOGETHER)[name](), None
    for number in range(steps):
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
