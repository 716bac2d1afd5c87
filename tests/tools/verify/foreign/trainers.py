"""Trainings of others to verify, as a user's script has them: what is unusual in them, or wrong."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.tools.verify.catalogue.bugs import bug
from tests.tools.verify.catalogue.foreign import HIDDEN, VOCAB, Block, ByHand, Ddp, Fsdp, wide
from tests.tools.verify.engine_bugs import GradientTimes

TABLE = 1e4 ** -(torch.arange(8) / 8)


class FsdpEvaluates(Fsdp):
    """It evaluates at a step's end, and FSDP2 leaves the root's parameters whole, in BF16, until the next backward."""

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def loss(self, model, batch):
        return F.cross_entropy(wide(model(batch[0])), batch[1])

    def told(self, losses, batches):
        with torch.no_grad():
            self.loss(self.module, batches[0])
        return super().told(losses, batches)


class TwoOptimizers(Fsdp):
    """Muon for a hidden matrix, whose equation computes in BF16, and AdamW for the rest: each has its schedule."""

    clip_grad = 0.5

    def optimizer(self, model):
        hidden = [model.up.weight]
        rest = [param for name, param in model.named_parameters() if name != "up.weight"]
        return [torch.optim.Muon(hidden, lr=2e-2), torch.optim.AdamW(rest, lr=1e-2)]

    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5 if "momentum" in optimizer.defaults else 0.9)

    def setup(self, model):
        self.module = self.wrap(model)
        self.optim = self.optimizer(self.module)
        self.schedules = [*map(self.scheduler, self.optim)]
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)
        return self.module, self.optim

    def clear(self):
        self.module.zero_grad()

    def update(self):
        for one in (*self.optim, *self.schedules):
            one.step()


@bug("", "updates", "", "1 and 0 updates in one step", ranks=2)
class OneNeverSteps(TwoOptimizers):
    """The second optimizer is forgotten."""

    def update(self):
        self.optim[0].step()


class Factored(ByHand):
    """Adafactor, which keeps means over rows and columns in place of a moment."""

    def optimizer(self, model):
        return torch.optim.Adafactor(model.parameters(), lr=1e-2, weight_decay=0.1)


@bug("", "weight", "", "states lost: this update began with zeros", ranks=2)
class MeansLost(Factored):
    """The means are lost between two steps, and the count is kept."""

    def clear(self):
        super().clear()
        for of in self.optim.state.values():
            for mean in (of[key] for key in of if key != "step"):
                mean.zero_()


@bug("", "gradient", "", "before that 2 times the right one (counted twice", ranks=2)
class AddedUp(Ddp):
    """Its micro-batches are added up, not averaged; if clipping hides that, only the norm shows it."""

    clip_grad = 1.0  # between the right norm and twice that

    def share(self, batch, batches):
        return 1.0

    def told(self, losses, batches):
        return None


class NeverClipped(ByHand):
    """It clips behind the update, to a norm that no gradient has, and its loss scale never overflows."""

    clip_grad, start = 100.0, 2.0

    def clip(self):
        self.scaler.unscale_(self.optim)

    def update(self):
        super().update()
        nn.utils.clip_grad_norm_(self.module.parameters(), self.clip_grad)


class AtRateZero(ByHand):
    """Its learning rate is zero."""

    lr = 0.0


class OtherNames(ByHand):
    """Wrapper whose names nobody knows."""

    def wrap(self, model):
        return nn.ModuleDict({"inner": model})

    def loss(self, model, batch):
        return super().loss(model["inner"] if isinstance(model, nn.ModuleDict) else model, batch)


class Renamed(OtherNames):
    """It says which names are the plain model's."""

    def weights(self, module, optimizer):
        return super().weights(module["inner"], optimizer)

    def gradients(self, module, optimizer):
        return super().gradients(module["inner"], optimizer)

    def groups(self, module, optimizer):
        return super().groups(module["inner"], optimizer)

    def states(self, module, optimizer):
        return super().states(module["inner"], optimizer)


class Padded(ByHand):
    """The vocabulary is padded to a multiple of 64."""

    def wrap(self, model):
        model.embed = nn.Embedding(64, HIDDEN)
        return model


class RowsMoved(ByHand):
    """The rows of a table are turned by one."""

    def wrap(self, model):
        model.embed.weight.data.copy_(model.embed.weight.roll(1, 0))
        return model


class OthersValues(ByHand):
    """One layer begins with another layer's values."""

    def wrap(self, model):
        model.head.load_state_dict(model.embed.state_dict())
        return model


@bug("", "gradient", "up.weight", "0.5 times the right one")
class AutocastInForward(ByHand):
    """Half of a gradient is lost, in BF16 as accelerate has it: the forward that it wraps enters autocast."""

    def wrap(self, model):
        plain = model.forward

        def forward(tokens):
            with torch.autocast("cpu", torch.bfloat16):
                return plain(tokens).float()

        model.forward = forward
        model.up.weight.register_hook(lambda grad: grad / 2)
        return model


class More(ByHand):
    """Its optimizer keeps states that the plain one does not; every rank has its own."""

    def update(self):
        super().update()
        for of in self.optim.state.values():
            of["shard"] = torch.full((3,), 7.0)


class _Averaging(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure=None):
        for param in (param for group in self.param_groups for param in group["params"] if param.grad is not None):
            kept = self.state[param].setdefault("last", [])
            kept.append(param.grad.clone())
            param -= self.defaults["lr"] * torch.stack(kept).mean(0)


class Listed(ByHand):
    """Its optimizer goes on from a list, which nobody can read."""

    def optimizer(self, model):
        return _Averaging(model.parameters(), {"lr": 1e-2})


class AnotherOptimizer(ByHand):
    """It trains with RMSprop."""

    weight_decay = 0.0

    def make(self, module):
        return torch.optim.RMSprop(module.parameters(), lr=1e-2)


class Kept(ByHand):
    """Training whose running statistics go on, whose table is kept in BF16, and whose router's bias moves with every
    update, by no forward.
    """

    batch_norm = True

    def model(self):
        net = super().model()
        net.register_buffer("router_bias", torch.zeros(4))
        net.register_buffer("table", TABLE.repeat(2))
        net.embed.register_forward_hook(lambda module, args, out: out + net.table.to(out.dtype))
        return net

    def wrap(self, model):
        model.table = model.table.bfloat16()
        model.register_buffer("of_the_wrapper", torch.zeros(2))
        return model

    def update(self):
        super().update()
        self.module.router_bias += torch.tensor([1e-3, 0.0, 0.0, -1e-3])


class Deep(Ddp):
    """Blocks with a residual path, as a transformer has them. `spoiled`: module, and what is wrong with it."""

    spoiled = ("", "")
    blocks = 3

    def model(self):
        torch.manual_seed(0)
        blocks = (Block() for _ in range(self.blocks))
        return nn.Sequential(nn.Embedding(VOCAB, HIDDEN), *blocks, nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB))

    def wrap(self, model):
        name, what = self.spoiled
        if name:
            spoil(model.get_submodule(name), what)
        return super().wrap(model)


class Mixed(Deep):
    """One module computes in BF16 and the others in FP32, as a policy for each has it."""

    blocks = 1

    def wrap(self, model):
        fully_shard(model[1], mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32))
        return fully_shard(model)


def spoil(module, what):
    """Make a module's output, or the gradient of it, a hundredth larger."""
    right = module.forward
    change = GradientTimes.apply if what == "gradient" else torch.mul
    module.forward = lambda *args, **kwargs: change(1.01, right(*args, **kwargs))
