"""Bugs that are not in the catalogue, as they stand in training scripts, each of a kind of its own.

The answer that an expert wants to each, its place and kind, was written down before `verify` had seen any.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from tests.tools.verify.catalogue.bugs import bug
from tests.tools.verify.catalogue.foreign import LENGTH, VOCAB, Clipped, Half, WithGroups, norm_of
from tests.tools.verify.foreign.loops import Ddp, Fabric, Fsdp, Hand


class _DecaysWithoutLr(WithGroups):
    def other(self, group):
        for param in group["params"]:
            param.data *= 1 - group["weight_decay"]
        return {"weight_decay": 0.0}


@bug("", "weight", "", "weight decay", ranks=2)
class DecaysWithoutLr(Ddp):
    """The decoupled weight decay is not multiplied by the learning rate."""

    made = _DecaysWithoutLr


@bug("", "gradient", "", "FP16", ranks=2)
class CompressedOnTheWire(Ddp):
    """A communication hook, left over from a benchmark, rounds gradients to FP16."""

    def wrap(self, model):
        made = super().wrap(model)
        made.register_comm_hook(None, fp16_compress_hook)
        return made


@bug("", "buffer", "", "more", ranks=2)
class ValidatesInTraining(Ddp):
    """The validation behind each step forgets `eval()`: its samples get into the running statistics."""

    def update(self):
        super().update()
        with torch.no_grad():
            self.module(torch.arange(LENGTH) % VOCAB)


@bug("", "gradient", "", "largest", ranks=2)
class InfinityNorm(Fsdp):
    """Gradients are clipped by their largest element, the norm of order infinity."""

    clip_grad = 0.02

    def clip(self):
        nn.utils.clip_grad_norm_(self.module.parameters(), self.clip_grad, norm_type=torch.inf)

    def told(self, losses, batches):
        return None


@bug("", "gradient", "", "last step's")
class ClippedByTheLastNorm(Hand):
    """The norm comes a step late, so that nobody waits for it."""

    precision, clip_grad, accumulation, start = "fp16", 0.3, 1, 2.0**17

    def clip(self):
        self.scaler.unscale_(self.optim)
        self.norm = norm_of(self.grads().values())
        used = getattr(self, "kept", self.norm)
        if self.norm.isfinite():
            self.kept = self.norm
        Clipped.clip_by(self, used)


@bug("", "skipped step", "", "not set to zero")
class OverflowLeft(Hand):
    """Gradients are cleared behind an update alone: those of a skipped step stay, and skip all that follow."""

    precision, start = "fp16", 2.0**18

    def clear(self):
        pass

    def update(self):
        before = self.scaler.get_scale()
        super().update()
        if self.scaler.get_scale() >= before:
            self.optim.zero_grad()


@bug("", "overflow", "", attempt=0)
class Unscaled(Half):
    """A scaler never scales: one process overflows, and this training does not."""

    start = 0.0

    def setup(self, model):
        made = super().setup(model)
        self.scaler.get_scale = lambda: 2.0**40
        return made


@bug("", "gradient", "", "that of norm.", ranks=2)
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


@bug("", "buffer", "still.", "momentum")
class MomentumTheOtherWay(Fabric):
    """The momentum of the running statistics is what they keep, as in TensorFlow, not what they take."""

    accumulation = 1

    def wrap(self, model):
        model.still.momentum = 0.9
        return super().wrap(model)


class _ReadsDefaults(WithGroups):
    def other(self, group):
        return {"lr": self.defaults["lr"]}


@bug("", "weight", "", "the lr of")
class LrOfTheDefaults(Fabric):
    """The optimizer reads the learning rate of its defaults, whatever its groups have."""

    def grouped(self, model):
        matrices, others = super().grouped(model)
        return [matrices, others | {"lr": self.lr / 10}]

    made = _ReadsDefaults
