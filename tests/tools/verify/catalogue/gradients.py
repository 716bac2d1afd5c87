"""Bugs in loss, gradient and samples of somebody's training."""

from itertools import count

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.tools.verify.catalogue.bugs import bug
from tests.tools.verify.catalogue.foreign import ByHand, Ddp, Unequal


@bug("transformers #24725, torchtune #1875", "gradient", "", "a mean of micro-batches' means")
class MeanOfMeans(Unequal):
    """Accumulation takes the mean of the micro-batches' means, whatever their numbers of targets."""

    def share(self, batch, batches):
        return ByHand.share(self, batch, batches)


@bug("torchtune #2172, torchtitan #4167", "gradient", "", "a mean of ranks' means", ranks=2)
class MeanOfRanks(Unequal):
    """Each rank divides by its own number of targets, and ranks are averaged."""

    def share(self, batch, batches):
        return self.targets(batch) / sum(self.targets(one) for one in batches)


@bug("torchtitan #2972", "gradient", "", "8 times the right one")
class NumberOfTokens(Unequal):
    """The gradient is that of the sum over valid tokens, not of their mean."""

    def share(self, batch, batches):
        return self.targets(batch)


@bug("transformers #46204", "gradient", "", "0.8 times the right one")
class OverCounted(Unequal):
    """The divisor counts each row's first token, which is no target."""

    def share(self, batch, batches):
        return self.targets(batch) / (sum(self.targets(one) for one in batches) + len(batches))


@bug("SkyRL #462, Molecule-Generator #20", "gradient", "", "times the right one")
class PaddingCounted(Unequal):
    """The loss is averaged over all positions, those of padding included."""

    def share(self, batch, batches):
        return self.targets(batch) / sum(one[1].numel() for one in batches)


@bug("verl-SpeCo #29", "gradient", "", "divided by the number of ranks twice", ranks=4)
class DividedByRanksTwice(ByHand):
    """The loss is divided by the number of ranks, and the reduction divides once more."""

    accumulation = 3

    def share(self, batch, batches):
        return 1 / len(batches) / self.ranks


@bug("Megatron #673", "gradient", "", "divided by the number of ranks twice", ranks=2)
class ContextRanksDivideTwice(DividedByRanksTwice):
    """Ranks that share a sequence divide the loss twice."""


@bug("gpt-neox #1259", "gradient", "", "added up over ranks, not averaged", ranks=4)
class AddedOverRanks(ByHand):
    """Ranks add their gradients up and never divide."""

    accumulation = 3

    def reduce(self):
        for grad in self.grads().values():
            dist.all_reduce(grad)


@bug("transformers #35207", "gradient", "", "added up over micro-batches, not averaged")
class NotDivided(ByHand):
    """The loss is not divided by the number of micro-batches."""

    accumulation = 3

    def share(self, batch, batches):
        return 1.0


@bug("llm-random #529", "gradient", "", "divided by the number of micro-batches twice")
class DividedTwice(ByHand):
    """The loss is divided by the number of micro-batches here and in a library's backward."""

    accumulation = 3

    def share(self, batch, batches):
        return 1 / len(batches) ** 2


@bug("accelerate #641, RAE #67", "gradient", "", "micro-batch 2 alone, over the number of micro-batches")
class ClearedInside(ByHand):
    """Gradients are set to zero before each micro-batch: the last one alone is left."""

    accumulation = 3

    def micro(self, number, batch, batches):
        self.optim.zero_grad()
        return super().micro(number, batch, batches)


@bug("torchforge #71, tt-blacksmith #711", "gradient", "", "the last step's gradient still in it")
class NeverCleared(ByHand):
    """Gradients are never set to zero."""

    def clear(self):
        pass


@bug("llm.c #548", "gradient", "", "counts twice")
class DepositedTwice(ByHand):
    """The first micro-batch's gradient is deposited twice."""

    def micro(self, number, batch, batches):
        loss = super().micro(number, batch, batches)
        return super().micro(number, batch, batches) if number == 0 else loss


@bug("FunASR #3472", "gradient", "", "micro-batch 1 is not reduced over the ranks", ranks=2)
class SyncOnTheFirst(Ddp):
    """The first micro-batch is reduced and the last one is not."""

    def micro(self, number, batch, batches):
        self.module.require_backward_grad_sync = number == 0
        return super().micro(number, batch, batches)


@bug("build-nanogpt #30", "gradient", "", "rank 0's own, not reduced over the ranks", ranks=2)
class NeverInSync(Ddp):
    """`no_sync` is around every micro-batch."""

    def step(self, batches):
        with self.module.no_sync():
            return super().step(batches)


@bug("Megatron #1446, NeMo-RL #3716", "gradient", "norm.weight", "rank 0's own, not reduced over the ranks", ranks=2)
class NormNotReduced(ByHand):
    """The gradient of a norm, which ranks replicate, is not reduced."""

    def reduce(self):
        own = self.grads()["norm.weight"].clone()
        super().reduce()
        self.grads()["norm.weight"].copy_(own)


@bug("several", "gradient", "down.weight", "counted twice", ranks=4)
class HookTwice(ByHand):
    """A gradient hook was registered twice, and adds what it was given each time."""

    accumulation = 3

    def wrap(self, model):
        model.down.weight.register_hook(lambda grad: grad * 2)
        return model


class Tied(ByHand):
    tied = True

    def forward(self, batch):
        x = self.module.embed(batch[0])
        logits = F.linear(x + self.module.hidden(x), self.end(self.module.head.weight))
        return F.cross_entropy(logits, batch[1])


@bug("entrenar #314, several", "gradient", "embed.weight", "through head.weight is missing: the table is tied")
class TiedEndLost(Tied):
    """One end of a tied table gives no gradient."""

    def end(self, weight):
        return weight.detach()


@bug("several", "gradient", "embed.weight", "through head.weight counts twice: the table is tied")
class TiedEndTwice(Tied):
    """Both stages of a pipeline add the gradient of the same end of a tied table."""

    def end(self, weight):
        return 2 * weight - weight.detach()


@bug("Megatron #656", "name", "head.weight", "only your training has")
class Untied(ByHand):
    """Wrapping unties the table: head and embedding go their own ways."""

    tied = True

    def wrap(self, model):
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        return model


@bug("torchtitan #1593", "gradient", "", "a wrong backward or reduction: the loss is right")
class RecomputedDropout(ByHand):
    """Recompute draws dropout anew: backward sees another mask than forward."""

    module = None  # the plain model is not recomputed

    def loss(self, model, batch):
        x, seeds = model.embed(batch[0]), count()

        def dropped(x):
            kept = torch.rand(x.shape, generator=torch.Generator().manual_seed(next(seeds))) > 0.2
            return model.hidden(x * kept)

        hidden = checkpoint(dropped, x, use_reentrant=False) if model is self.module else dropped(x)
        return F.cross_entropy(model.head(x + hidden), batch[1])


@bug("accelerate #4177", "gradient", "", "a wrong backward or reduction: the loss is right")
class RightForwardWrongBackward(ByHand):
    """A layer's backward gives its gradients to the wrong positions."""

    def wrap(self, model):
        model.up.register_full_backward_pre_hook(lambda module, grads: (grads[0].roll(1, 0),))
        return model


@bug("Megatron #950, #663", "gradient", "", "stale weights")
class StaleWeights(ByHand):
    """Forward reads weights that the last update has not reached yet."""

    old = None

    def clear(self):
        super().clear()
        self.new = [param.data for param in self.module.parameters()]
        for param, old in zip(self.module.parameters(), self.old or self.new, strict=True):
            param.data = old.clone()

    def reduce(self):
        super().reduce()
        self.old = [new.clone() for new in self.new]
        for param, new in zip(self.module.parameters(), self.new, strict=True):
            param.data = new


@bug("Megatron #4609", "gradient", "", "times the weights added to it")
class GatherLeftInGradients(ByHand):
    """Gathered weights are left in the buffer to which backward adds the gradients."""

    def clear(self):
        for param in self.module.parameters():
            param.grad = param.detach().clone()


class _OfAnother(ByHand):
    """Training that reads the samples of the rank `whose`."""

    at = -1

    def step(self, batches):
        self.at += 1
        return super().step(self.batches(self.at, self.whose(), self.ranks))


@bug("SimSiam #16, several", "gradient", "", "all ranks read its samples", ranks=2)
class AllReadTheSame(_OfAnother):
    """No sampler divides the data: every rank reads the first one's."""

    def whose(self):
        return 0


@bug("several", "gradient", "", "rank 3 reads the samples of rank 1", ranks=4)
class OneReadsAnothers(_OfAnother):
    """A rank's place is computed from a wrong axis: one reads what another one reads."""

    def whose(self):
        return 1 if self.rank == 3 else self.rank


@bug("several", "gradient", "", "rank 1's part is missing", ranks=2)
class RankLeftOut(ByHand):
    """A rank's part is lost before the reduction."""

    def reduce(self):
        if self.rank == 1:
            for grad in self.grads().values():
                grad.zero_()
        super().reduce()


@bug("several", "samples", "micro-batch 0 of rank 1", "those of micro-batch 0 of rank 0", ranks=2)
class DealtTwice(ByHand):
    """The loader deals the same samples to two ranks."""

    def batches(self, step, rank, ranks):
        return super().batches(step, 0, ranks)


@bug("transformers #47394, #37830", "gradient", "", "targets moved by -1 position")
class ShiftedTwice(ByHand):
    """Targets are shifted by the model and by the loss: token t + 2 is learnt."""

    def forward(self, batch):
        return self.loss(self.module, (batch[0], batch[1].roll(-1)))

    def told(self, losses, batches):
        return None


@bug("NeMo Automodel #2591", "gradient", "", "another forward, other samples or other weights")
class BiasUnweighted(ByHand):
    """A bias is added with another weight than the model has: the loss starts too high."""

    def wrap(self, model):
        model.down.register_forward_hook(lambda module, args, out: out + 0.5 * module.bias)
        return model


@bug("Modalities #464, DeepSpeedExamples #754", "loss", "the global batch", "computed or kept in BF16")
class LossInHalf(ByHand):
    """The loss is computed from BF16 logits and kept in BF16."""

    accumulation = 1

    def forward(self, batch):
        loss = self.loss(self.module, batch)
        return loss + (loss.detach().bfloat16() - loss.detach())


@bug("torchao #4300", "gradient", "", "another forward on rank 1 alone", ranks=2)
class LowPrecisionGather(ByHand):
    """The weights that others gather are rounded: 3 bits of mantissa are left."""

    def forward(self, batch):
        kept = [param.detach().clone() for param in self.module.parameters()]
        if self.rank:
            for param in self.module.parameters():
                param.data = param.data.to(torch.float8_e4m3fn).float()
        loss = super().forward(batch)
        for param, right in zip(self.module.parameters(), kept, strict=True):
            param.data.copy_(right)
        return loss


@bug("several", "gradient", "", "another forward on rank 0 alone", ranks=2)
class OneRankEvaluates(ByHand):
    """Rank 0 evaluates, alone, and its model stays in that mode. The reported loss is all ranks' mean."""

    batch_norm = True

    def told(self, losses, batches):
        self.module.train(self.rank != 0)
        loss = torch.tensor(sum(losses) / len(losses))
        dist.all_reduce(loss)
        return {"loss": float(loss) / self.ranks}


@bug("several", "loss", "the global batch", "that of rank 0's last micro-batch alone", ranks=2)
class LastLossTold(ByHand):
    """The logged loss is that of one rank's last micro-batch."""

    def told(self, losses, batches):
        loss = torch.tensor(losses[-1])
        dist.broadcast(loss, 0)
        return {"loss": float(loss)}
