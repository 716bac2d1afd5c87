"""Bugs that are not in the catalogue, as they stand in training scripts: four in each of the loops of loops.py.

The answer that an expert wants to each, its place and kind, was written down before `verify` had seen any.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import fully_shard

from tests.tools.verify.foreign.loops import LENGTH, VOCAB, Ddp, Engine, Fabric, Fsdp, Hand


@dataclass(frozen=True)
class Planted:
    """Answer that `verify` must give to a bug: words of its place, and of its kind."""

    sort: str  # sort of the bug: buffers, clipping, averaging, names, or another
    ranks: int
    place: str
    kind: str


LOOP_BUGS = {}


def planted(sort, ranks, place, kind):
    def enter(made):
        LOOP_BUGS[made.__name__] = Planted(sort, ranks, place, kind)
        return made

    return enter


# DistributedDataParallel


class _DecaysWithoutLr(torch.optim.AdamW):
    def step(self, closure=None):
        kept = [group["weight_decay"] for group in self.param_groups]
        for group in self.param_groups:
            for param in group["params"]:
                param.data *= 1 - group["weight_decay"]
            group["weight_decay"] = 0.0
        super().step()
        for group, decay in zip(self.param_groups, kept, strict=True):
            group["weight_decay"] = decay


@planted("another", 2, "weight", "weight decay")
class DecaysWithoutLr(Ddp):
    """The decoupled weight decay is not multiplied by the learning rate."""

    def make(self, module):
        return _DecaysWithoutLr(self.grouped(module), lr=self.lr)


@planted("averaging", 2, "gradient", "FP16")
class CompressedOnTheWire(Ddp):
    """A communication hook, left over from a benchmark, rounds gradients to FP16."""

    def wrap(self, model):
        made = super().wrap(model)
        made.register_comm_hook(None, fp16_compress_hook)
        return made


@planted("buffers", 2, "buffer of", "more")
class ValidatesInTraining(Ddp):
    """The validation behind each step forgets `eval()`: its samples get into the running statistics."""

    def update(self):
        super().update()
        with torch.no_grad():
            self.module(torch.arange(LENGTH) % VOCAB)


@planted("another", 2, "gradient", "0.6667 times the right one")
class ShorterLastStep(Ddp):
    """The data end amid a step of three micro-batches: its two are divided by three."""

    accumulation = 3

    def batches(self, step, rank, ranks):
        made = super().batches(step, rank, ranks)
        return made[:2] if step == 1 else made

    def share(self, batch, batches):
        return 1 / self.accumulation


# FSDP2


class _TwoOptimizers(Fsdp):
    """FSDP2 whose blocks train by momentum, all else by AdamW."""

    def optimizer(self, model):
        blocks = [*model.blocks.parameters()]
        inside = set(blocks)
        others = [param for param in model.parameters() if param not in inside]
        return [torch.optim.SGD(blocks, lr=self.lr, momentum=0.9), torch.optim.AdamW(others, lr=self.lr)]

    def scheduler(self, optimizer):
        return None

    def clear(self):
        for one in self.optim:
            one.zero_grad()

    def clip(self):
        pass

    def update(self):
        for one in self.optim:
            one.step()

    def told(self, losses, batches):
        return {"loss": sum(losses) / len(losses)}


@planted("names", 2, "gradient", "not reduced over the ranks")
class RootNotWrapped(_TwoOptimizers):
    """The blocks are wrapped, the module around them is not: nobody reduces table, norm and head."""

    def wrap(self, model):
        for block in model.blocks:
            fully_shard(block)
        return model

    def micro(self, number, batch, batches):
        for block in self.module.blocks:
            block.set_requires_gradient_sync(number == len(batches) - 1)
        return super(Fsdp, self).micro(number, batch, batches)


@planted("another", 2, "gradient", "not set to zero")
class OneOptimizerCleared(_TwoOptimizers):
    """`zero_grad()` of the second optimizer is forgotten."""

    def clear(self):
        self.optim[0].zero_grad()


@planted("clipping", 2, "gradient", "largest")
class InfinityNorm(Fsdp):
    """Gradients are clipped by their largest element, the norm of order infinity."""

    clip_grad = 0.02

    def clip(self):
        nn.utils.clip_grad_norm_(self.module.parameters(), self.clip_grad, norm_type=torch.inf)

    def told(self, losses, batches):
        return {"loss": sum(losses) / len(losses)}


@planted("another", 2, "gradient", "added up over ranks")
class NeverDivided(Fsdp):
    """The factor by which gradients are divided is set to one, as where a loss is divided by all tokens."""

    precision = "bf16"

    def wrap(self, model):
        made = super().wrap(model)
        for module in (*model.blocks, made):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
        return made


# By hand, with autocast


@planted("another", 1, "gradient", "stale weights")
class AutocastAroundTheEpoch(Hand):
    """Autocast is entered once for several steps: the casts that it keeps are of the weights before them."""

    precision = "bf16"
    at = 0

    def step(self, batches):
        if self.at % 2 == 0:
            self.around = torch.autocast("cpu", torch.bfloat16)
            self.around.__enter__()
        told = super().step(batches)
        self.at += 1
        if self.at % 2 == 0:
            self.around.__exit__(None, None, None)
        return told

    def forward(self, batch):
        return self.loss(self.module, batch)


@planted("clipping", 1, "gradient", "last step's")
class ClippedByTheLastNorm(Hand):
    """The norm comes a step late, so that nobody waits for it."""

    precision, clip_grad, accumulation = "fp16", 0.3, 1

    def clip(self):
        self.scaler.unscale_(self.optim)
        self.norm = nn.utils.get_total_norm(self.grads().values())
        used = getattr(self, "kept", self.norm)
        if self.norm.isfinite():
            self.kept = self.norm
        for grad in self.grads().values():
            grad *= min(1.0, self.clip_grad / (float(used) + 1e-6))


@planted("another", 1, "skipped step", "not set to zero")
class OverflowLeft(Hand):
    """Gradients are cleared behind an update alone: those of a skipped step stay, and skip all that follow."""

    precision, start = "fp16", 2.0**20

    def clear(self):
        pass

    def update(self):
        before = self.scaler.get_scale()
        super().update()
        if self.scaler.get_scale() >= before:
            self.optim.zero_grad()


@planted("names", 2, "gradient", "that of blocks")
class HandedToOthers(Hand):
    """Gradients of one shape are reduced as one, and handed back in the order of the sorted names."""

    def reduce(self):
        by_shape = {}
        for name, grad in self.grads().items():
            by_shape.setdefault(grad.shape, {})[name] = grad
        for grads in by_shape.values():
            stacked = torch.stack([*grads.values()])
            dist.all_reduce(stacked)
            for name, mean in zip(sorted(grads), stacked / self.ranks, strict=True):
                grads[name].copy_(mean)


# A wrapper as Lightning Fabric's


@planted("averaging", 2, "gradient", "a mean of ranks' means")
class FewerOnOneRank(Fabric):
    """One rank has fewer micro-batches; each takes the mean over its own, and the ranks' means are averaged."""

    def batches(self, step, rank, ranks):
        return super().batches(step, rank, ranks)[rank:]

    def share(self, batch, batches):
        return 1 / len(batches)


@planted("names", 1, "initial weight", "that of blocks")
class BlocksInOrderOfText(Fabric):
    """Blocks are loaded in the order of their sorted names, block 10 before block 2."""

    blocks = 11

    def wrap(self, model):
        order = sorted(map(str, range(len(model.blocks))))
        saved = [model.blocks[int(number)].state_dict() for number in order]
        saved = [{name: weight.clone() for name, weight in state.items()} for state in saved]
        for block, state in zip(model.blocks, saved, strict=True):
            block.load_state_dict(state)
        return super().wrap(model)


@planted("buffers", 1, "buffer of still.", "momentum")
class MomentumTheOtherWay(Fabric):
    """The momentum of the running statistics is what they keep, as in TensorFlow, not what they take."""

    accumulation = 1

    def wrap(self, model):
        model.still.momentum = 0.9
        return super().wrap(model)


class _ReadsDefaults(torch.optim.AdamW):
    def step(self, closure=None):
        kept = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] = self.defaults["lr"]
        super().step()
        for group, lr in zip(self.param_groups, kept, strict=True):
            group["lr"] = lr


@planted("another", 1, "weight of", "the lr of")
class LrOfTheDefaults(Fabric):
    """The optimizer reads the learning rate of its defaults, whatever its groups have."""

    made = torch.optim.AdamW

    def optimizer(self, model):
        matrices, others = self.grouped(model)
        return self.made([matrices, others | {"lr": self.lr / 10}], lr=self.lr)

    def setup(self, model):
        self.made = _ReadsDefaults
        return super().setup(model)


# Our engine


@planted("clipping", 2, "gradient", "not clipped")
class ClippedByTorch(Engine):
    """torch clips, and finds no gradients; the engine was not told to."""

    clip_grad = 0.3

    def setup(self, model):
        self.clip_grad = 0.0
        return super().setup(model)

    def backward(self, batch):
        super().backward(batch)
        nn.utils.clip_grad_norm_(self.module.parameters(), type(self).clip_grad)


@planted("averaging", 1, "weight", "BF16")
class AverageSwappedIn(Engine):
    """An average of the weights is loaded to evaluate it; what is loaded behind it was kept from the half weights."""

    def step(self, batches):
        told = super().step(batches)
        weights = self.engine.full_weights()
        average = getattr(self, "average", weights)
        self.average = {name: average[name].lerp(weight, 0.1) if weight.is_floating_point() else weight
                        for name, weight in weights.items()}  # fmt: skip
        kept = {name: weight.clone() for name, weight in self.module.state_dict().items()}
        self.engine.load_weights(self.average)
        self.engine.load_weights(kept)
        return told


@planted("buffers", 1, "rotary", "only your training has")
class TablesAreParameters(Engine):
    """The rotary tables are Parameters without gradients: a cast of the parameters takes them along."""

    def setup(self, model):
        for name, table in [*model.rotary.named_buffers()]:
            delattr(model.rotary, name)
            model.rotary.register_parameter(name, nn.Parameter(table, requires_grad=False))
        return super().setup(model)


@planted("another", 1, "gradient", "1024 times the right one")
class ScaledForAnother(Engine):
    """The loss is multiplied by the scale of the loop that the engine has replaced; AdamW hardly feels it."""

    def backward(self, batch):
        loss = self.loss(self.engine, batch)
        self.engine.backward(loss * 1024)

    def step(self, batches):
        super().step(batches)
