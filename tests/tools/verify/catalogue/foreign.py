"""A small training by hand, right: bugs replace one of its parts."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from megamix import ForeignTrainer

VOCAB, HIDDEN = 40, 16
IGNORED = -100


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


class ByHand(ForeignTrainer):
    """Right training: ranks sum their gradients by hand; two micro-batches of equal sizes."""

    accumulation = 2
    tied = batch_norm = False
    lr, weight_decay = 1e-2, 0.1

    def model(self):
        torch.manual_seed(0)
        return Net(self.tied, self.batch_norm)

    def loss(self, model, batch):
        tokens, targets = batch
        return F.cross_entropy(model(tokens), targets, ignore_index=IGNORED)

    def batches(self, step, rank, ranks):
        drawn = torch.Generator().manual_seed(1000 * step + rank)
        return [tuple(torch.randint(VOCAB, (2, 16), generator=drawn)) for _ in range(self.accumulation)]

    def grouped(self, model):
        """Return the groups: matrices decay, others do not."""
        params = [*model.parameters()]
        matrices = [param for param in params if param.dim() > 1]
        others = [param for param in params if param.dim() < 2]
        decayed = {"params": matrices, "weight_decay": self.weight_decay}
        return [decayed, {"params": others, "weight_decay": 0.0}]

    def optimizer(self, model):
        return torch.optim.AdamW(self.grouped(model), lr=self.lr)

    def wrap(self, model):
        return model

    def make(self, module):
        return self.optimizer(module)

    def setup(self, model):
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
        (loss * self.share(batch, batches)).backward()
        return loss.item()

    def grads(self):
        return {name: param.grad for name, param in self.module.named_parameters() if param.grad is not None}

    def reduce(self):
        if self.ranks > 1:
            for grad in self.grads().values():
                dist.all_reduce(grad)
                grad /= self.ranks

    def clip(self):
        nn.utils.clip_grad_norm_(self.module.parameters(), self.clip_grad or torch.inf)

    def update(self):
        self.optim.step()
        if self.schedule:
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


class Unequal(ByHand):
    """Right training whose micro-batches have different numbers of targets."""

    def batches(self, step, rank, ranks):
        made = super().batches(step, rank, ranks)
        for at, (_, targets) in enumerate(made):
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


class Clipped(ByHand):
    clip_grad = 0.3

    def clip(self):
        self.norm = self.total_norm()
        for grad in self.grads().values():
            grad *= min(1.0, self.clip_grad / (float(self.norm) + 1e-6))

    def total_norm(self):
        return torch.stack([grad.square().sum() for grad in self.grads().values()]).sum().sqrt()


class Half(ByHand):
    """Right training in FP16 by autocast; the first step overflows."""

    start = 2.0**19

    def setup(self, model):
        self.scaler = torch.amp.GradScaler("cpu", init_scale=self.start)
        return super().setup(model)

    def loss(self, model, batch):
        with torch.autocast("cpu", torch.float16):
            return super().loss(model, batch)

    def micro(self, number, batch, batches):
        loss = self.forward(batch)
        self.scaler.scale(loss * self.share(batch, batches)).backward()
        return loss.item()

    def clip(self):
        if self.clip_grad:
            self.scaler.unscale_(self.optim)
            super().clip()

    def update(self):
        before = self.scaler.get_scale()
        self.scaler.step(self.optim)
        self.scaler.update()
        if self.schedule and self.scaler.get_scale() >= before:
            self.schedule.step()


class Decaying:
    """Right training whose lr halves with every update."""

    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


class CountedOutside(torch.optim.AdamW):
    """AdamW whose count of updates, for the bias correction, is set from outside."""

    updates = 0

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param not in self.state:
                    zeros = {key: torch.zeros_like(param) for key in ("exp_avg", "exp_avg_sq")}
                    self.state[param] = {"step": torch.tensor(0.0), **zeros}
                self.state[param]["step"].fill_(self.updates - 1)
        super().step()
