"""Right training loops of five kinds, around a net with buffers of every kind: DistributedDataParallel, FSDP2, a loop
by hand with autocast, a wrapper as Lightning Fabric's, our engine. `loop_bugs` beside this replaces their parts.
"""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import megamix
from tests.tools.verify.catalogue.foreign import IGNORED, VOCAB, ByHand, Half, Unequal

LENGTH, WIDTH = 16, 16
AUTOCASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def wide(x):
    return x if x.dtype == torch.float64 else x.float()


class Rotary(nn.Module):
    """Rotary positions by tables of cosines and sines."""

    def __init__(self, base=1e4, scaling=1.0):
        super().__init__()
        self.register_buffer("inv_freq", scaling * base ** -(torch.arange(WIDTH // 2) / (WIDTH // 2)), persistent=False)
        angles = torch.arange(LENGTH)[:, None] * self.inv_freq
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x):
        first, second = x.chunk(2, -1)
        return torch.cat([first * self.cos - second * self.sin, second * self.cos + first * self.sin], -1).to(x.dtype)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x, rotary, mask):
        y = self.norm(x)
        scores = wide(rotary(self.query(y)) @ rotary(self.key(y)).mT) / math.sqrt(WIDTH)
        mixed = scores.masked_fill(mask, -math.inf).softmax(-1).to(y.dtype) @ self.value(y)
        return x + self.out(F.gelu(mixed))


class Net(nn.Module):
    """Blocks of one head, between running statistics that are FP32 whatever the weights are."""

    def __init__(self, blocks, tied, recomputed):
        super().__init__()
        self.recomputed = recomputed
        self.embed, self.rotary = nn.Embedding(VOCAB, WIDTH), Rotary()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.still = nn.BatchNorm1d(WIDTH, affine=False)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), persistent=False)
        self.register_buffer("distances", -0.1 * (torch.arange(LENGTH) % 5))
        turns = torch.polar(torch.ones(WIDTH // 2), torch.arange(WIDTH // 2) / 3)
        self.register_buffer("turns", turns, persistent=False)
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))
        self.register_buffer("largest", torch.full((3,), 1.0))  # a history of maxima
        self.register_buffer("unused", torch.empty(0))
        self.register_buffer("least", torch.full((2,), math.inf))  # an observer that has seen nothing of the second
        self.register_buffer("range", torch.full((2,), math.nan))

    def forward(self, tokens):
        x = self.embed(tokens)
        turned = torch.view_as_complex(wide(x).unflatten(-1, (-1, 2)).contiguous()) * self.turns
        x = torch.view_as_real(turned).flatten(-2).to(x.dtype)
        if self.training:
            with torch.no_grad():
                self.forwards += 1
                self.largest.copy_(self.largest.roll(1))
                self.largest[0] = self.range[0] = x.detach().abs().max()
                self.least[0] = self.least[0].minimum(x.detach().abs().max())
        x = x + (self.still(wide(x)) + self.distances[:, None]).to(x.dtype)
        for block in self.blocks:
            given = (x, self.rotary, self.mask)
            x = checkpoint(block, *given, use_reentrant=False) if self.recomputed else block(*given)
        return self.head(self.norm(x))


class Loop(Unequal):
    """Common parts of the five loops. Micro-batches have equally many targets, unless `unequal`."""

    blocks, tied, recomputed = 2, False, False  # settings of the net
    unequal = False
    frozen = ""  # the parameter that is not trained
    decay = 1.0  # factor of the learning rate with every update
    precision = "fp32"
    start = 2.0**17  # first loss scale
    table = torch.float32  # dtype in which the training keeps its rotary tables

    def model(self):
        torch.manual_seed(0)
        net = Net(self.blocks, self.tied, self.recomputed)
        if self.frozen:
            net.get_parameter(self.frozen).requires_grad_(requires_grad=False)
        return net

    def scheduler(self, optimizer):
        optimizer = getattr(optimizer, "optimizer", optimizer)
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, self.decay) if self.decay != 1 else None

    def batches(self, step, rank, ranks):
        return super().batches(step, rank, ranks) if self.unequal else ByHand.batches(self, step, rank, ranks)

    def loss(self, model, batch):
        return F.cross_entropy(wide(model(batch[0])), batch[1], ignore_index=IGNORED)

    def told(self, losses, batches):
        return super().told(losses, batches) | {"grad_norm": float(self.norm)}

    def clip(self):
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), self.clip_grad or torch.inf)
        self.norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def setup(self, model):
        model.rotary.to(self.table)
        self.scaler = None
        if self.precision == "fp16":
            self.scaler = torch.amp.GradScaler("cpu", init_scale=self.start)
        return super().setup(model)


class Autocast(Loop):
    """Loop whose forward and loss are under autocast, with a GradScaler for FP16."""

    def forward(self, batch):
        dtype = AUTOCASTS.get(self.precision, torch.bfloat16)
        with torch.autocast("cpu", dtype, enabled=self.precision != "fp32"):
            return super().forward(batch)

    def micro(self, number, batch, batches):
        return (Half if self.scaler else ByHand).micro(self, number, batch, batches)

    def clip(self):
        if self.scaler:
            self.scaler.unscale_(self.optim)
        super().clip()

    def update(self):
        (Half if self.scaler else ByHand).update(self)


class Hand(Autocast):
    """Loop whose ranks add up their gradients by hand, as one flat tensor."""

    def reduce(self):
        if self.ranks > 1:
            grads = [*self.grads().values()]
            flat = nn.utils.parameters_to_vector(grads)
            dist.all_reduce(flat)
            nn.utils.vector_to_parameters(flat / self.ranks, grads)


class Ddp(Autocast):
    """Loop with DistributedDataParallel, which reduces in the last micro-batch only."""

    def wrap(self, model):
        return DistributedDataParallel(model)

    def micro(self, number, batch, batches):
        self.module.require_backward_grad_sync = number == len(batches) - 1
        return super().micro(number, batch, batches)

    def reduce(self):
        pass


class Fsdp(Loop):
    """Loop with FSDP2 and a policy: "fp32", "bf16" with FP32 sums, "bf16 sums"."""

    def wrap(self, model):
        half = torch.bfloat16 if self.precision != "fp32" else None
        policy = MixedPrecisionPolicy(
            param_dtype=half,
            reduce_dtype=torch.float32 if self.precision == "bf16" else half,
            cast_forward_inputs=False,
        )
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        return fully_shard(model, mp_policy=policy)

    def micro(self, number, batch, batches):
        self.module.set_requires_gradient_sync(number == len(batches) - 1)
        return super().micro(number, batch, batches)

    def reduce(self):
        pass


class FabricModule(nn.Module):
    """Wrapper that holds its module twice, as Fabric's does; its forward enters autocast and gives FP32."""

    def __init__(self, forward_module, original_module, dtype):
        super().__init__()
        self._forward_module, self._original_module, self.dtype = forward_module, original_module, dtype

    def forward(self, *args):
        with torch.autocast("cpu", self.dtype or torch.bfloat16, enabled=self.dtype is not None):
            return wide(self._forward_module(*args))


class FabricOptimizer:
    """Wrapper that passes on all calls, as Fabric's does."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def __getattr__(self, name):
        return getattr(self.optimizer, name)


class Fabric(Loop):
    """Loop with a module and an optimizer in wrappers such as Lightning Fabric's."""

    def wrap(self, model):
        forward = DistributedDataParallel(model) if self.ranks > 1 else model
        return FabricModule(forward, model, AUTOCASTS.get(self.precision))

    def make(self, module):
        return FabricOptimizer(super().make(module))

    def micro(self, number, batch, batches):
        if self.ranks > 1:
            self.module._forward_module.require_backward_grad_sync = number == len(batches) - 1
        return super().micro(number, batch, batches)

    def reduce(self):
        pass


class _Marked(torch.optim.Optimizer):
    """Stand-in for the engine's optimizer, which is none of torch's: it steps when the engine has taken its update."""

    def __init__(self):
        super().__init__([nn.Parameter(torch.zeros(1))], {})

    def step(self, closure=None):
        pass


class _Scale:
    """Stand-in for a GradScaler, which tells the engine's loss scale."""

    def __init__(self, engine):
        self.engine = engine

    def get_scale(self):
        return float(self.engine.loss_scale.loss_scale)


class Engine(Loop):
    """Loop with our engine.

    It shows no gradients: here they come from what its first moment, or momentum, has taken.
    """

    precision = "bf16"
    shard = "states"
    grad_dtype = None
    momentum = 0.0  # NAG's momentum; 0: AdamW
    groups_of_names = ()
    betas = (0.9, 0.95)

    def optimizer(self, model):
        if self.momentum:
            return torch.optim.SGD(self.grouped(model), lr=self.lr, momentum=self.momentum, nesterov=True)
        return torch.optim.AdamW(self.grouped(model), lr=self.lr, betas=self.betas)

    def ours(self):
        """Return our optimizer with the same numbers."""
        lrs = [self.lr * self.decay**update for update in range(10)]
        given = {"lr": lrs, "weight_decay": self.weight_decay, "groups": self.groups_of_names}
        if self.momentum:
            return megamix.NAG(momentum=self.momentum, **given)
        return megamix.AdamW(betas=self.betas, **given)

    def setup(self, model):
        model.rotary.to(self.table)
        dtype = AUTOCASTS.get(self.precision, torch.float32)
        scale = megamix.DynamicLossScale(init_scale=self.start) if dtype == torch.float16 else None
        self.engine = megamix.ShardedEngine(
            model, self.ours(), megamix.Precision(dtype, self.grad_dtype, loss_scale=scale),
            megamix.Sharding(units=[*model.blocks], shard=self.shard),
            clip_grad=self.clip_grad, grad_accum_steps=self.accumulation, compile_update=False,
        )  # fmt: skip
        self.scaler, self.optim, self.module = _Scale(self.engine), _Marked(), model
        self.seen = self.pieces()
        return model, self.optim

    def backward(self, batch):
        loss, share = self.loss(self.engine, batch), 1.0
        if self.unequal:
            share = self.targets(batch) / batch[1].numel()
        self.engine.backward(loss * share, share)

    def step(self, batches):
        for batch in batches:
            self.backward(batch)
        self.result = self.engine.step()
        self.before, self.seen = self.seen, self.pieces()
        if not self.result.found_inf:
            self.optim.step()
        return {"loss": float(self.result.loss), "grad_norm": float(self.result.grad_norm)}

    def pieces(self):
        """Return masters and states of all ranks, whole, by state and name."""
        mine = [
            (one.spec.name, one.spec.full_shape, one.start, {state: of.clone() for state, of in one.tensors.items()})
            for one in self.engine.owned_ranges()
        ]
        ranks = [mine]
        if self.ranks > 1:
            ranks = [None] * self.ranks
            dist.all_gather_object(ranks, mine)
        whole = {}
        for name, shape, start, tensors in (piece for pieces in ranks for piece in pieces):
            for state, part in tensors.items():
                full = whole.setdefault((state, name), torch.zeros(shape))
                full.view(-1)[start : start + part.numel()] = part
        return whole

    def weights(self, module, optimizer):
        return {name: weight for name, weight in self.engine.full_weights().items() if name in dict(self.named())}

    def named(self):
        return self.module.named_parameters()

    def gradients(self, module, optimizer):
        return {name: self.gradient(name) for state, name in self.seen if state == "master"}

    def gradient(self, name):
        if not self.momentum:
            was, now = (one["exp_avg", name].double() for one in (self.before, self.seen))
            return (now - self.betas[0] * was) / (1 - self.betas[0])
        was, now = (one["momentum_buffer", name].double() for one in (self.before, self.seen))
        decay = self.engine.optimizer.group_of(name, tuple(now.shape)).weight_decay
        return now - self.momentum * was - decay * self.before["master", name].double()

    def groups(self, module, optimizer):
        groups = {}
        for name, shape in ((name, tuple(of.shape)) for (state, name), of in self.seen.items() if state == "master"):
            group = self.engine.optimizer.group_of(name, shape)
            told = {"lr": float(self.result.lr) * group.lr_factor, "weight_decay": group.weight_decay}
            groups[name] = told | ({"momentum": self.momentum} if self.momentum else {"betas": self.betas})
        return groups

    def states(self, module, optimizer):
        taken = int(self.engine.applied_updates) > 0  # torch's optimizers have no states before the first update
        return {key: of for key, of in self.seen.items() if key[0] != "master"} if taken else {}
