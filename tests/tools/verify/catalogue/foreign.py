"""A small training by hand, right: bugs replace one of its parts."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from megamix import ForeignTrainer

VOCAB, HIDDEN, LENGTH = 40, 16, 16
IGNORED = -100


def wide(x):
    return x if x.dtype == torch.float64 else x.float()


class Net(nn.Module):
    def __init__(self, tied=False, batch_norm=False):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.up = nn.Linear(HIDDEN, 24)
        self.norm = nn.BatchNorm1d(24) if batch_norm else nn.LayerNorm(24)
        self.down = nn.Linear(24, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def hidden(self, x):
        return self.down(self.norm(F.gelu(self.up(x))))

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.hidden(x))


class Rotary(nn.Module):
    """Rotary positions by tables of cosines and sines."""

    def __init__(self, base=1e4):
        super().__init__()
        inv_freq = base ** -(torch.arange(HIDDEN // 2) / (HIDDEN // 2))
        angles = torch.arange(LENGTH)[:, None] * inv_freq
        for name, table in (("inv_freq", inv_freq), ("cos", angles.cos()), ("sin", angles.sin())):
            self.register_buffer(name, table, persistent=False)

    def forward(self, x):
        first, second = x.chunk(2, -1)
        return torch.cat([first * self.cos - second * self.sin, second * self.cos + first * self.sin], -1).to(x.dtype)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 32), nn.Linear(32, HIDDEN)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class ByHand(ForeignTrainer):
    """Right training: ranks sum their gradients by hand; two micro-batches of equal sizes."""

    accumulation = 2
    tied = batch_norm = False
    frozen = ""  # the parameter that is not trained
    lr, weight_decay = 1e-2, 0.1
    decay = 1.0  # factor of the lr with every update
    start = 0.0  # first loss scale, 0 for none
    kind, options = torch.optim.AdamW, {}
    made, wrong = None, {}

    def net(self):
        return Net(self.tied, self.batch_norm)

    def model(self):
        torch.manual_seed(0)
        net = self.net()
        if self.frozen:
            net.get_parameter(self.frozen).requires_grad_(requires_grad=False)
        return net

    def loss(self, model, batch):
        tokens, targets = batch
        return F.cross_entropy(model(tokens), targets, ignore_index=IGNORED)

    def batches(self, step, rank, ranks):
        drawn = torch.Generator().manual_seed(1000 * step + rank)
        return [tuple(torch.randint(VOCAB, (2, LENGTH), generator=drawn)) for _ in range(self.accumulation)]

    def grouped(self, model):
        """Return the groups: matrices decay, others do not."""
        matrices = [param for param in model.parameters() if param.dim() > 1]
        others = [param for param in model.parameters() if param.dim() < 2]
        return [{"params": matrices, "weight_decay": self.weight_decay}, {"params": others, "weight_decay": 0.0}]

    def optimizer(self, model):
        return self.kind(self.grouped(model), **{"lr": self.lr} | self.options)

    def scheduler(self, optimizer):
        optimizer = getattr(optimizer, "optimizer", optimizer)
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, self.decay) if self.decay != 1 else None

    def wrap(self, model):
        return model

    def make(self, module):
        """Return the optimizer that trains: of another kind than the plain one, or with wrong options."""
        if not self.made:
            return self.optimizer(module)
        return self.made(self.grouped(module), **{"lr": self.lr} | self.options | self.wrong)

    def setup(self, model):
        self.scaler = torch.amp.GradScaler("cpu", init_scale=self.start, enabled=self.start > 0)
        self.module = self.wrap(model)
        self.optim = self.make(self.module)
        self.schedule = self.scheduler(self.optim)
        return self.module, self.optim

    # One step, in the order of its parts.

    def clear(self):
        self.optim.zero_grad()

    def forward(self, batch):
        return self.loss(self.module, batch)

    def share(self, batch, batches):
        """Return the weight of a micro-batch's mean, before ranks are averaged."""
        return 1 / len(batches)

    def micro(self, number, batch, batches):
        loss = self.forward(batch)
        self.scaler.scale(loss * self.share(batch, batches)).backward()
        return loss.item()

    def grads(self):
        return {name: param.grad for name, param in self.module.named_parameters() if param.grad is not None}

    def reduce(self):
        if self.ranks > 1:
            for grad in self.grads().values():
                dist.all_reduce(grad)
                grad /= self.ranks

    def clip(self):
        if self.clip_grad:
            self.scaler.unscale_(self.optim)
            nn.utils.clip_grad_norm_(self.module.parameters(), self.clip_grad)

    def update(self):
        before = self.scaler.get_scale()
        self.scaler.step(self.optim)
        self.scaler.update()
        if self.schedule and self.scaler.get_scale() >= before:
            self.schedule.step()

    def told(self, losses, batches):
        return {"loss": sum(losses) / len(losses)}

    def step(self, batches):
        self.clear()
        losses = [self.micro(number, batch, batches) for number, batch in enumerate(batches)]
        self.reduce()
        self.clip()
        self.update()
        return self.told(losses, batches)


class Ddp(ByHand):
    def wrap(self, model):
        return DistributedDataParallel(model)

    def reduce(self):
        pass


class Fsdp(ByHand):
    policy = MixedPrecisionPolicy()

    def wrap(self, model):
        return fully_shard(model, mp_policy=self.policy)

    def reduce(self):
        pass


class Unequal(ByHand):
    """Right training whose micro-batches have different numbers of targets."""

    unequal = True

    def batches(self, step, rank, ranks):
        made = super().batches(step, rank, ranks)
        for at, (_, targets) in enumerate(made if self.unequal else ()):
            targets[3 + 2 * at + rank :] = IGNORED
        return made

    def targets(self, batch):
        return float((batch[1] != IGNORED).sum())

    def share(self, batch, batches):
        total = torch.tensor(sum(self.targets(one) for one in batches))
        if self.ranks > 1:
            dist.all_reduce(total)
        return self.targets(batch) * self.ranks / total

    def told(self, losses, batches):
        counts = [self.targets(one) for one in batches]
        return {"loss": sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)}


def norm_of(grads):
    return torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()


class Clipped(ByHand):
    clip_grad = 0.3

    def clip(self):
        self.clip_by(self.total_norm())

    def clip_by(self, norm):
        for grad in self.grads().values():
            grad *= min(1.0, self.clip_grad / (float(norm) + 1e-6))

    def total_norm(self):
        return norm_of(self.grads().values())


class Half(ByHand):
    """Right training in FP16 by autocast; the first step overflows."""

    start = 2.0**19

    def loss(self, model, batch):
        with torch.autocast("cpu", torch.float16):
            return super().loss(model, batch)


class CountedOutside(torch.optim.AdamW):
    """AdamW whose count of updates, for the bias correction, is set from outside."""

    updates = 0

    def step(self, closure=None):
        for param in (param for group in self.param_groups for param in group["params"]):
            if param not in self.state:
                zeros = {key: torch.zeros_like(param) for key in ("exp_avg", "exp_avg_sq")}
                self.state[param] = {"step": torch.tensor(0.0), **zeros}
            self.state[param]["step"].fill_(self.updates - 1)
        super().step()


class WithGroups(torch.optim.AdamW):
    """AdamW whose equation sees other options than its groups show: what `other(group)` returns."""

    def step(self, closure=None):
        kept = [dict(group) for group in self.param_groups]
        for group in self.param_groups:
            group.update(self.other(group))
        super().step()
        for group, before in zip(self.param_groups, kept, strict=True):
            group.update(before)
