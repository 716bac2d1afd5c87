"""Trainings of others to verify: a small net under torch's own wrappers, as a user's script has them."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from megamix import ForeignTrainer


class Plain(ForeignTrainer):
    """Training in which every rank takes the whole batch, by itself: right on one rank only."""

    clip_grad = 0.5
    accumulation = 2

    def model(self):
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 50))

    def loss(self, model, batch):
        tokens, targets = batch
        return F.cross_entropy(model(tokens), targets)

    def batches(self, step, rank, ranks):
        drawn = torch.Generator().manual_seed(1000 * step + rank)
        return [tuple(torch.randint(50, (2, 16), generator=drawn)) for _ in range(self.accumulation)]

    def optimizer(self, model):
        matrices = [param for param in model.parameters() if param.dim() > 1]
        others = [param for param in model.parameters() if param.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-2)

    def wrap(self, model):
        return model

    def setup(self, model):
        self.module = self.wrap(model)
        self.optim = self.optimizer(self.module)
        return self.module, self.optim

    def step(self, batches):
        self.optim.zero_grad()
        total = 0.0
        for batch in batches:
            loss = self.loss(self.module, batch) / len(batches)
            loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), self.clip_grad)
        self.optim.step()
        return {"loss": total, "grad_norm": float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)}


class Ddp(Plain):
    def wrap(self, model):
        return DistributedDataParallel(model)


class Fsdp(Plain):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def loss(self, model, batch):
        tokens, targets = batch
        logits = model(tokens)
        return F.cross_entropy(logits.float() if logits.dtype == torch.bfloat16 else logits, targets)

    def wrap(self, model):
        fully_shard(model[1], mp_policy=self.policy)
        return fully_shard(model, mp_policy=self.policy)


class _Fabric(nn.Module):
    """Wrapper that holds its module twice, as Lightning Fabric's does."""

    def __init__(self, forward_module, original_module):
        super().__init__()
        self._forward_module, self._original_module = forward_module, original_module

    def forward(self, *args):
        return self._forward_module(*args)


class InFabric(Plain):
    def wrap(self, model):
        return _Fabric(DistributedDataParallel(model), model)


class OtherNames(Plain):
    """Wrapper whose names nobody knows."""

    def wrap(self, model):
        return nn.ModuleDict({"inner": model})

    def loss(self, model, batch):
        return super().loss(model["inner"] if isinstance(model, nn.ModuleDict) else model, batch)


class RowsMoved(Plain):
    """The rows of a table are turned by one."""

    def wrap(self, model):
        with torch.no_grad():
            model[0].weight.copy_(model[0].weight.roll(1, 0))
        return model


class OthersValues(Plain):
    """One layer begins with another layer's values."""

    def model(self):
        net = super().model()
        net[3] = nn.Linear(64, 64)
        net.insert(4, nn.Linear(64, 64))
        return net

    def wrap(self, model):
        model[4].load_state_dict(model[3].state_dict())
        return model


class Padded(Plain):
    """The vocabulary is padded to a multiple of 64."""

    def wrap(self, model):
        model[0] = nn.Embedding(64, 32)
        return model


class FsdpEvaluates(Fsdp):
    """It evaluates at a step's end, and FSDP2 leaves the root's parameters whole, in BF16, until the next backward."""

    def step(self, batches):
        told = super().step(batches)
        with torch.no_grad():
            self.loss(self.module, batches[0])
        return told


class Zero(Ddp):
    def setup(self, model):
        self.module = self.wrap(model)
        self.optim = ZeroRedundancyOptimizer(self.module.parameters(), torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
        return self.module, self.optim

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


class Scaled(Ddp):
    """FP16 by autocast; the first steps overflow."""

    unscales = True

    def setup(self, model):
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**19)
        return super().setup(model)

    def loss(self, model, batch):
        tokens, targets = batch
        with torch.autocast("cpu", torch.float16):
            return F.cross_entropy(model(tokens), targets)

    def step(self, batches):
        self.optim.zero_grad()
        for batch in batches:
            self.scaler.scale(self.loss(self.module, batch) / len(batches)).backward()
        if self.unscales:
            self.scaler.unscale_(self.optim)
        nn.utils.clip_grad_norm_(self.module.parameters(), self.clip_grad)
        self.scaler.step(self.optim)
        self.scaler.update()


class AutocastInStep(Scaled):
    """FP16 by autocast as torch's recipe has it: `step` enters it around model and loss."""

    loss = Plain.loss

    def step(self, batches):
        with torch.autocast("cpu", torch.float16):
            losses = [self.loss(self.module, batch) / len(batches) for batch in batches]
        self.optim.zero_grad()
        for loss in losses:
            self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optim)
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), self.clip_grad)
        self.scaler.step(self.optim)
        self.scaler.update()
        return {"loss": float(sum(losses).detach()), "grad_norm": float(norm)}


class AutocastInForward(Plain):
    """Training in BF16 as accelerate has it: the forward that it wraps enters autocast, and gives FP32."""

    def wrap(self, model):
        plain = model.forward

        def forward(tokens):
            with torch.autocast("cpu", torch.bfloat16):
                return plain(tokens).float()

        model.forward = forward
        return model


class AutocastAlone(AutocastInForward):
    """AutocastInForward with a gradient of which half is lost."""

    def setup(self, model):
        model[1].weight.register_hook(lambda grad: grad / 2)
        return super().setup(model)


class Scheduled(Ddp):
    """The lr falls with every update."""

    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def setup(self, model):
        made = super().setup(model)
        self.schedule = self.scheduler(self.optim)
        return made

    def step(self, batches):
        told = super().step(batches)
        self.schedule.step()
        return told


class TwoOptimizers(Fsdp):
    """Muon for the hidden matrix, whose equation computes in BF16, and AdamW for the rest: each has its schedule."""

    policy = MixedPrecisionPolicy()

    def optimizer(self, model):
        hidden = [model.get_parameter("1.weight")]
        rest = [param for name, param in model.named_parameters() if name != "1.weight"]
        return [torch.optim.Muon(hidden, lr=2e-2), torch.optim.AdamW(rest, lr=1e-2)]

    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5 if "momentum" in optimizer.defaults else 0.9)

    def setup(self, model):
        made = super().setup(model)
        self.schedules = [self.scheduler(one) for one in self.optim]
        return made

    def step(self, batches):
        self.module.zero_grad()
        for batch in batches:
            (self.loss(self.module, batch) / len(batches)).backward()
        nn.utils.clip_grad_norm_(self.module.parameters(), self.clip_grad)
        self.update()

    def update(self):
        for one in (*self.optim, *self.schedules):
            one.step()


class OneNeverSteps(TwoOptimizers):
    """The second optimizer is forgotten."""

    def update(self):
        self.optim[0].step()


class Factored(Ddp):
    """Adafactor, which keeps means over rows and columns in place of a moment."""

    def optimizer(self, model):
        return torch.optim.Adafactor(model.parameters(), lr=1e-2, weight_decay=0.1)

    def wrap(self, model):
        return super().wrap(model) if self.ranks > 1 else model


class MeansLost(Factored):
    """The means are lost between two steps, and the count is kept."""

    def step(self, batches):
        for of in self.optim.state.values():
            for mean in (of[key] for key in of if key != "step"):
                mean.zero_()
        return super().step(batches)


class More(Plain):
    """Its optimizer keeps states that the plain one does not; every rank has its own."""

    def step(self, batches):
        told = super().step(batches)
        for of in self.optim.state.values():
            of["shard"] = torch.full((3,), 7.0)
        return told


class Listed(Plain):
    """Its optimizer goes on from a list, which nobody can read."""

    def optimizer(self, model):
        return _Averaging(model.parameters(), {"lr": 1e-2})


class _Averaging(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in filter(lambda param: param.grad is not None, group["params"]):
                kept = self.state[param].setdefault("last", [])
                kept.append(param.grad.clone())
                param -= group["lr"] * torch.stack(kept).mean(0)


class AnotherOptimizer(Plain):
    """It trains with RMSprop."""

    def setup(self, model):
        self.module, self.optim = model, torch.optim.RMSprop(model.parameters(), lr=1e-2)
        return self.module, self.optim

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)


class NotReduced(Ddp):
    def step(self, batches):
        with self.module.no_sync():
            return super().step(batches)


class HalfMasters(Ddp):
    def wrap(self, model):
        return super().wrap(model.bfloat16())


class ScaledNorm(Scaled):
    """The gradient is clipped before it is unscaled."""

    unscales = False


class WrongDecay(Ddp):
    """A wrapper's names in front: the pattern finds no matrix."""

    def optimizer(self, model):
        named = [*model.named_parameters()]
        decayed = [param for name, param in named if name.split(".")[0].isdigit() and param.dim() > 1]
        others = [param for name, param in named if not (name.split(".")[0].isdigit() and param.dim() > 1)]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-2)


class LateSchedule(Scheduled):
    """The schedule is one update behind."""

    def step(self, batches):
        self.steps = getattr(self, "steps", 0) + 1
        told = Plain.step(self, batches)
        if self.steps > 1:
            self.schedule.step()
        return told


class Deep(Ddp):
    """Blocks with a residual path, as a transformer has them. `wrong`: module, and what is wrong with it."""

    wrong = ("", "")
    clip_grad = 0.0

    def model(self):
        torch.manual_seed(0)
        layers = [Block() for _ in range(3)]
        return nn.Sequential(nn.Embedding(50, 32), *layers, nn.LayerNorm(32), nn.Linear(32, 50))

    def wrap(self, model):
        name, what = self.wrong
        if name:
            part, spoil = model.get_submodule(name), SPOILS[what]
            right = part.forward
            part.forward = lambda *args: spoil(right(*args))
        return super().wrap(model)

    def step(self, batches):
        self.optim.zero_grad()
        for batch in batches:
            (self.loss(self.module, batch) / len(batches)).backward()
        self.optim.step()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, grad):
        return grad * 1.01


SPOILS = {"output": lambda x: x * 1.01, "gradient": _WrongGradient.apply}


class AddedUp(Ddp):
    """Its micro-batches are added up, not averaged; if clipping hides that, only the norm shows it."""

    clip_grad = 2.0  # between the right norm and twice that

    def step(self, batches):
        self.optim.zero_grad()
        for batch in batches:
            self.loss(self.module, batch).backward()
        nn.utils.clip_grad_norm_(self.module.parameters(), self.clip_grad)
        self.optim.step()


class Mixed(Ddp):
    """One module computes in BF16 and the others in FP32, as a policy for each has it."""

    def model(self):
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(50, 32), Block(), nn.LayerNorm(32), nn.Linear(32, 50))

    def wrap(self, model):
        fully_shard(model[1], mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32))
        return fully_shard(model)
