"""Bugs in the optimizer, its groups and schedule, its states, and in buffers of somebody's training."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.tools.verify.catalogue.bugs import bug
from tests.tools.verify.catalogue.foreign import ByHand, CountedOutside, Fsdp, Rotary, WithGroups


@bug("accelerate #3979", "dtype", "", "no FP32 master: the optimizer keeps it in BF16")
class NoMasters(ByHand):
    """The upcast to FP32 is a no-op: AdamW works on BF16 parameters."""

    def wrap(self, model):
        return model.bfloat16()


@bug("NeMo Automodel #1896, #3444", "dtype", "head.weight", "no FP32 master: the optimizer keeps it in BF16")
class OneModuleInHalf(ByHand):
    """One module's parameters collapse to BF16 at the optimizer: at lr 6e-6 their updates vanish."""

    lr = 6e-6

    def wrap(self, model):
        model.head.bfloat16()
        model.head.register_forward_pre_hook(lambda module, args: (args[0].bfloat16(),))
        model.head.register_forward_hook(lambda module, args, out: out.float())
        return model


class _HalfStates(torch.optim.AdamW):
    def step(self, closure=None):
        for of in self.state.values():
            of.update({key: state.float() for key, state in of.items()})
        super().step()
        for of in self.state.values():
            of.update({key: of[key].bfloat16() for key in ("exp_avg", "exp_avg_sq")})


@bug("AReaL #1292", "exp_avg", "", "kept in BF16: no FP32 state")
class HalfStates(ByHand):
    """The states are BF16, because the parameters were BF16 when they were made."""

    made = _HalfStates


@bug("OpenTau #182", "weight", "", "masters made from the BF16 copy before this update")
class MastersFromHalf(ByHand):
    """Masters are made anew from the BF16 copy."""

    def update(self):
        for param in self.module.parameters():
            param.data.copy_(param.data.bfloat16())
        super().update()


@bug("Fast-LLM #542", "weight_decay", "up.bias", "0.1, where the plain optimizer has 0")
class NormsDecay(ByHand):
    """Norms and biases decay by default."""

    def make(self, module):
        return torch.optim.AdamW(module.parameters(), lr=self.lr, weight_decay=self.weight_decay)


@bug("BalancingGroups #6, several", "weight_decay", "embed.weight", "0, where the plain optimizer has 0.1")
class DecayInverted(ByHand):
    """Weight decay is on biases and norms, and on nothing else."""

    def make(self, module):
        optim = self.optimizer(module)
        for group in optim.param_groups:
            group["weight_decay"] = self.weight_decay - group["weight_decay"]
        return optim


@bug("transformers #24088, accelerate #2926", "lr", "", "is the lr of update 3, not 2", ranks=2)
class ScheduleTimesRanks(ByHand):
    """The schedule steps once for each rank."""

    decay = 0.5

    def update(self):
        super().update()
        for _ in range(self.ranks - 1):
            self.schedule.step()


@bug("accelerate #963, KDFlow #4", "lr", "", "is the lr of update 3, not 1")
class SchedulePerMicroBatch(ByHand):
    """The schedule goes on with every micro-batch."""

    decay = 0.5

    def micro(self, number, batch, batches):
        self.schedule.step()
        return super().micro(number, batch, batches)

    def update(self):
        self.optim.step()


@bug("accelerate docs, several", "lr", "", "times 2, the number of ranks", ranks=2)
class LrTimesRanks(ByHand):
    """The lr is multiplied by the number of ranks, unasked."""

    def make(self, module):
        self.lr *= self.ranks
        return self.optimizer(module)


@bug("WeatherGenerator #1601, cosmos-rl #511", "eps", "", "1e-05, where the plain optimizer has 1e-08")
class EpsIgnored(ByHand):
    """The configuration's eps never reaches the optimizer."""

    made, wrong = torch.optim.AdamW, {"eps": 1e-5}


@bug("grokking-at-the-edge #11, PWC-Net #23", "betas[1]", "", "0.95, where the plain optimizer has 0.999")
class BetasIgnored(ByHand):
    """The configuration's betas never reach the optimizer."""

    made, wrong = torch.optim.AdamW, {"betas": (0.9, 0.95)}


class _Coupled(WithGroups):
    def other(self, group):
        for param in group["params"]:
            param.grad.add_(param.detach(), alpha=group["weight_decay"])
        return {"weight_decay": 0.0}


@bug("nntrainer #3565", "weight", "", "weight decay added to the gradient, not to the weights")
class DecayCoupled(ByHand):
    """AdamW adds its decay to the gradient, as Adam does."""

    made = _Coupled


@bug("OLMo-core #317, caffe #4224", "weight", "", "no bias correction")
class NoBiasCorrection(ByHand):
    """The count of steps is never incremented right: no bias is corrected."""

    made = CountedOutside

    def make(self, module):
        made = super().make(module)
        made.updates = 10**6
        return made


@bug("accelerate #3209, #3256", "optimizer", "embed.weight", "not among the optimizer's parameters", ranks=2)
class MadeBeforeWrapping(Fsdp):
    """The optimizer was made before FSDP2 has put other parameters into the modules."""

    def setup(self, model):
        early = self.optimizer(model)
        super().setup(model)
        self.optim = early
        return self.module, early


@bug("composer #3493, several", "optimizer", "up.bias", "not among the optimizer's parameters")
class ParameterLeftOut(ByHand):
    """No group's pattern matches a parameter, so it is never updated."""

    def make(self, module):
        optim = self.optimizer(module)
        others = optim.param_groups[1]
        others["params"] = [param for param in others["params"] if param is not module.up.bias]
        return optim


@bug("S-Prompts #2, fairseq #4702", "frozen weight", "embed.weight", "")
class FrozenDecays(ByHand):
    """Weight decay moves what is frozen."""

    frozen = "embed.weight"

    def update(self):
        super().update()
        self.module.embed.weight.mul_(1 - self.lr * self.weight_decay)


class _DecaysAll(WithGroups):
    def other(self, group):
        for param in (param for param in group["params"] if param.grad is None):
            param.data *= 1 - group["lr"] * group["weight_decay"]
        return {}


@bug("Muon #54", "weight without a gradient", "unused.weight", "moved by weight decay or momentum alone")
class DecaysWithoutGradient(ByHand):
    """Weight decay moves a parameter that got no gradient in this step."""

    def model(self):
        net = super().model()
        net.unused = nn.Linear(4, 4, bias=False)
        return net

    made = _DecaysAll


@bug("DeepSpeed #195", "weight", "", "updated twice")
class TwiceInGroup(ByHand):
    """A tied parameter is in its group twice, and updated twice."""

    def make(self, module):
        optim = self.optimizer(module)
        optim.param_groups[0]["params"].append(module.embed.weight)
        return optim


@bug("several", "updates", "the optimizer", "2 updates in one step, which has 2 micro-batches")
class UpdatePerMicroBatch(ByHand):
    """The optimizer steps with every micro-batch."""

    def micro(self, number, batch, batches):
        loss = super().micro(number, batch, batches)
        self.optim.step()
        return loss

    def update(self):
        pass


@bug(
    "pytorch-benchmarks #1", "copies (weight)", "on rank 1", "a rank that draws, reduces or updates by itself", ranks=2
)
class OwnWeightsAtStart(ByHand):
    """Ranks draw their own initial weights, and nobody broadcasts."""

    def wrap(self, model):
        if self.rank:
            model.up.reset_parameters()
        return model


@bug("several", "initial weight", "up.weight", "")
class WeightsDrawnAnew(ByHand):
    """Wrapping on a meta device draws the weights anew: what was loaded is lost."""

    def wrap(self, model):
        model.up.reset_parameters()
        return model


@bug("several", "weight", "", "states lost: this update began with zeros")
class StatesLost(ByHand):
    """The states are lost between two steps, and the count is kept."""

    def clear(self):
        super().clear()
        for of in self.optim.state.values():
            of["exp_avg"].zero_()
            of["exp_avg_sq"].zero_()


@bug("pytorch #1489, fairscale #380", "weight", "embed.weight", "with the states of head.weight")
class StatesOfAnother(ByHand):
    """A resume finds the parameters in another order, and states go by that order: two of one shape change places."""

    def clear(self):
        super().clear()
        (one, other), state = (self.module.embed.weight, self.module.head.weight), self.optim.state
        if state:
            state[one], state[other] = state[other], state[one]


class _BetasSwapped(WithGroups):
    def other(self, group):
        return {"betas": group["betas"][::-1]}


@bug("several", "exp_avg", "", "the betas are swapped")
class BetasSwapped(ByHand):
    """The equation swaps the two betas."""

    made = _BetasSwapped


@bug("several", "betas[0]", "", "0.999, where the plain optimizer has 0.9: the betas are swapped")
class BetasGivenSwapped(ByHand):
    """The betas are given in the wrong order."""

    made, wrong = torch.optim.AdamW, {"betas": (0.999, 0.9)}


class _EpsInRoot(torch.optim.AdamW):
    @torch.no_grad()
    def step(self, closure=None):
        kept = {param: param.clone() for group in self.param_groups for param in group["params"]}
        super().step()
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for param in group["params"]:
                of = self.state[param]
                mean, square = of["exp_avg"] / (1 - beta1 ** of["step"]), of["exp_avg_sq"] / (1 - beta2 ** of["step"])
                param.copy_(kept[param] * (1 - lr * group["weight_decay"]) - lr * mean / (square + group["eps"]).sqrt())


@bug("keras-radam #29, Flux #448", "weight", "", "eps inside the root")
class EpsInRoot(ByHand):
    """AdamW adds eps to the square, and then takes the root."""

    made = _EpsInRoot


@bug("Open-Sora-Plan #186, waifu-diffusion #31", "weight", "", "an average of the weights left in the model")
class AverageLeft(ByHand):
    """An evaluation puts the average of the weights into the model, and nobody takes it out again."""

    updates = 0

    def wrap(self, model):
        self.average = [param.detach().clone() for param in model.parameters()]
        return model

    def update(self):
        super().update()
        self.updates += 1
        for mean, param in zip(self.average, self.module.parameters(), strict=True):
            mean.lerp_(param.data, 0.1)
            if self.updates == 3:
                param.data.copy_(mean)


@bug("pytorch #96136, torchtitan #1593", "buffer", "norm.", "moved twice by each micro-batch")
class BuffersMovedTwice(ByHand):
    """Recompute counts a forward's side effect twice: running means move twice."""

    batch_norm = True

    def wrap(self, model):
        hidden = model.hidden
        model.hidden = lambda x: checkpoint(hidden, x, use_reentrant=False)
        return model


@bug("several", "buffer", "norm.", "never moved")
class BuffersNeverMoved(ByHand):
    """The module stays in the mode of evaluation for its buffers: they never move."""

    batch_norm = True

    def wrap(self, model):
        model.norm.momentum = 0.0
        return model


class Turned(ByHand):
    def model(self):
        net = super().model()
        net.embed = nn.Sequential(net.embed, Rotary())
        return net


@bug("SpecForge #265", "initial buffer", "embed.1.inv_freq", "to the power of 1.425, as rotary frequencies")
class AnotherBase(Turned):
    """The base of rotary positions in the configuration never reaches the model that is trained."""

    def wrap(self, model):
        model.embed[1] = Rotary(base=5e5)
        return model


@bug("LlamaFactory #10820, transformers #48892", "initial buffer", "embed.1.inv_freq", "as to_empty() leaves it")
class BufferLost(Turned):
    """`to_empty()` gives a buffer new memory, too, and no state dict brings back one that is not persistent."""

    def wrap(self, model):
        torch.use_deterministic_algorithms(True)  # unfilled memory is NaN then, and not a value by chance
        try:
            model.embed[1].to_empty(device="cpu")
        finally:
            torch.use_deterministic_algorithms(False)
        return model


@bug("LlamaFactory #10820", "initial buffer", "embed.1.inv_freq on rank 1", "nothing but zeros", ranks=2)
class BufferOfOneRank(Turned):
    """A buffer is restored on rank 0, and nobody broadcasts it."""

    def wrap(self, model):
        model.embed[1].inv_freq *= self.rank == 0
        return model


@bug("transformers #25681", "initial buffer", "embed.1.inv_freq", "rounded to BF16, as parameters are")
class BufferRounded(Turned):
    """The model was cast to BF16 and back, its table of positions with it."""

    def wrap(self, model):
        model.embed[1].bfloat16().float()
        return model


@bug("VeOmni #414", "buffer", "embed.1.inv_freq", "forward does not move it, and it is nothing but zeros")
class BufferLostLater(Turned):
    """The table of positions is right at the start, and zero once training is under way."""

    def update(self):
        super().update()
        self.module.embed[1].inv_freq.zero_()


def _orthogonal(matrix):
    matrix = matrix / matrix.norm()
    for _ in range(5):
        matrix = 1.5 * matrix - 0.5 * matrix @ matrix.T @ matrix
    return matrix


class _Muon(torch.optim.Optimizer):
    """Muon of whole matrices."""

    parts = 1

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for param in (param for group in self.param_groups for param in group["params"] if param.grad is not None):
            parts = [_orthogonal(part) for part in param.grad.view(len(param), -1).chunk(self.parts)]
            param -= self.defaults["lr"] * torch.cat(parts).view_as(param)


class _ByParts(_Muon):
    parts = 2


@bug("DeepSpeed #7807", "weight", "embed.weight", "each of 2 parts of its rows updated by itself")
class MuonByParts(ByHand):
    """Muon makes each partition orthogonal by itself."""

    kind, made, weight_decay = _Muon, _ByParts, 0.0
