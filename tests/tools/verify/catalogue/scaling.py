"""Bugs in the norm, in clipping, in loss scaling and in skipped steps of somebody's training."""

import torch
import torch.distributed as dist
from torch import nn

from tests.tools.verify.catalogue.bugs import bug
from tests.tools.verify.catalogue.foreign import Clipped, CountedOutside, Fsdp, Half, norm_of


@bug("pytorch/examples #1196, Pytorch-UNet #468", "gradient", "", "of the gradient with the loss scale in it")
class ClippedBeforeUnscaling(Half):
    """Gradients are clipped with the loss scale in them."""

    start, clip_grad = 2.0**10, 0.3

    def clip(self):
        nn.utils.clip_grad_norm_(self.module.parameters(), self.clip_grad)


class Fits(Half):
    start = 2.0**10  # no step overflows


@bug("several", "gradient", "", "the loss scale left in")
class NeverUnscaled(Fits):
    """The optimizer steps by itself, not through the scaler: the scale stays in the gradients."""

    def update(self):
        self.optim.step()


@bug("several", "gradient", "", "divided by the loss scale twice")
class UnscaledTwice(Fits):
    """Gradients are divided by the scale by hand, and once more by the scaler."""

    def clip(self):
        for grad in self.grads().values():
            grad /= self.scaler.get_scale()


@bug("LVSM #19", "skipped step", "one process, which has no overflow")
class SkippedForNothing(Fits):
    """A step that has no overflow is skipped."""

    def update(self):
        for grad in self.grads().values():
            grad.fill_(torch.inf)
        super().update()


@bug("OLMo-core, read in code", "overflow", "one process", "a step that had to be skipped was applied")
class OverflowApplied(Half):
    """A step that overflows is multiplied by zero, and not skipped: 0 x inf is NaN."""

    start = 2.0**22

    def update(self):
        self.scaler.unscale_(self.optim)
        for grad in self.grads().values():
            grad *= float(grad.isfinite().all())
        self.optim.step()
        self.scaler.update()


@bug("several", "copies", "the optimizer", "rank 1 took 0 updates in this step, rank 0 1", ranks=2)
class OneRankSkips(Fits):
    """Only the rank that finds the overflow skips its step."""

    def update(self):
        if self.rank == 1:
            self.grads()["up.weight"].fill_(torch.inf)
        super().update()


@bug("accelerate #4242, pytorch #55585", "lr", "", "is the lr of update 2, not 1")
class ScheduleOnSkipped(Half):
    """The schedule goes on in a step that the scaler skips."""

    decay = 0.5

    def update(self):
        self.scaler.step(self.optim)
        self.scaler.update()
        self.schedule.step()


@bug("several", "weight", "", "bias correction: the skipped steps are counted, where this is update")
class BiasCorrectionOnSkipped(Half):
    """Bias correction advances in a step that was skipped."""

    made = CountedOutside

    def update(self):
        self.optim.updates += 1
        super().update()


@bug("Megatron, torchtitan: read in code", "buffer after a skipped step", "router_bias", "a step that is none")
class BufferOnSkipped(Half):
    """A router's bias moves in a step that is skipped."""

    def model(self):
        net = super().model()
        net.register_buffer("router_bias", torch.zeros(4))
        return net

    def update(self):
        self.module.router_bias += 1e-3
        super().update()


@bug("LibreYOLO #771, torch 2.13", "momentum_buffer after a skipped step", "", "made by a step that is none")
class FusedFirstSkipped(Half):
    """Fused SGD makes its momentum in a first step that the scaler skips, and leaves it unfilled."""

    kind, options = torch.optim.SGD, {"momentum": 0.9, "fused": True}

    def update(self):
        torch.use_deterministic_algorithms(True)  # unfilled memory is NaN then, and not a value by chance
        try:
            super().update()
        finally:
            torch.use_deterministic_algorithms(False)


@bug("pytorch #88955", "gradient", "", "times the root of 2, the ranks", ranks=2)
class NormTimesRanks(Clipped):
    """Ranks that hold the same gradients add up their squares: the norm counts each once per rank."""

    accumulation = 3

    def total_norm(self):
        dist.all_reduce(squares := super().total_norm().square())
        return squares.sqrt()


@bug("Megatron #5916", "gradient", "", "it leaves out head.weight")
class NormLeavesOut(Clipped):
    """The norm misses parameters that only some ranks hold."""

    def total_norm(self):
        return norm_of([grad for name, grad in self.grads().items() if name != "head.weight"])


@bug("Megatron #7452", "gradient", "", "it counts twice head.weight")
class NormCountsTwice(Clipped):
    """The norm counts a replicated parameter twice."""

    def total_norm(self):
        return norm_of([*self.grads().values(), self.grads()["head.weight"]])


@bug("transformers #581", "gradient", "", "its own")
class ClippedOneByOne(Clipped):
    """Each parameter is clipped by its own norm."""

    clip_grad = 0.01

    def clip(self):
        for param in self.module.parameters():
            nn.utils.clip_grad_norm_(param, self.clip_grad)


@bug("transformers #614", "gradient", "", "that of group 0 alone")
class ClippedByGroup(Clipped):
    """Each group of the optimizer is clipped by its own norm."""

    clip_grad = 0.01

    def clip(self):
        for group in self.optim.param_groups:
            nn.utils.clip_grad_norm_(group["params"], self.clip_grad)


@bug("OpenSeq2Seq #192", "gradient", "", "not clipped")
class ClippedTooLate(Clipped):
    """Gradients are clipped after the update: nothing is."""

    def clip(self):
        pass

    def update(self):
        super().update()
        super().clip()


@bug("gluon-nlp #470", "gradient", "", "clipped on each rank, then averaged", ranks=2)
class ClippedBeforeReduction(Clipped):
    """Each rank clips its own part, and then they are averaged."""

    def reduce(self):
        super().clip()
        super().reduce()

    def clip(self):
        pass


@bug("transformers #1563, lingua #59", "gradient", "", "clipped in every micro-batch, not once in a step")
class ClippedEachMicroBatch(Clipped):
    """Gradients are clipped behind every backward: the last micro-batch counts the most."""

    def micro(self, number, batch, batches):
        loss = super().micro(number, batch, batches)
        super().clip()
        return loss

    def clip(self):
        pass


@bug("tt-metal #17568", "gradient", "", "clipped in every micro-batch of each rank, then averaged", ranks=2)
class ClippedEachMicroBatchOnRanks(ClippedEachMicroBatch):
    """Each rank clips its own gradient behind every backward, and then they are averaged."""


@bug("several", "gradient", "", "clipped by value, to 0.02")
class ClippedByValue(Clipped):
    """Gradients are clipped by value, where a norm was meant."""

    clip_grad = 0.02

    def clip(self):
        nn.utils.clip_grad_value_(self.module.parameters(), self.clip_grad)


class Sharded(Fsdp):
    clip_grad = 0.3

    def shard_norm(self):
        return norm_of([grad.to_local() for grad in self.grads().values()])


@bug("pytorch #72548, AReaL #312", "gradient", "", "by the norm of its own shards", ranks=2)
class ShardNorm(Sharded):
    """Each rank clips its shards by their own norm."""

    def clip(self):
        Clipped.clip_by(self, self.shard_norm())


@bug("torchtitan #766, miles_diffusion #35", "norm", "all gradients", "that of the shards of rank 0 alone", ranks=2)
class ShardNormTold(Sharded):
    """The norm that is logged is that of one rank's shards."""

    def clip(self):
        self.norm = self.shard_norm()
        super().clip()

    def told(self, losses, batches):
        return {"grad_norm": float(self.norm)}
