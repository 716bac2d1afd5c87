"""Scripts that know nothing of an audit: `python -m tests.tools.audit.scripts NAME` calls NAME."""

import importlib
import os
import sys
from contextlib import nullcontext
from itertools import count

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.nn.functional import all_reduce, all_to_all_single
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

NUM_TOKENS = 64
LR = 6e-6


def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(NUM_TOKENS, 16), nn.Linear(16, NUM_TOKENS))


def loss_of(module, step):
    tokens = torch.randint(NUM_TOKENS, (128,), generator=torch.Generator().manual_seed(step))
    return cross_entropy(module(tokens).float(), (tokens + 1) % NUM_TOKENS)


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1)


def adamw(module, lr=1e-3):
    return torch.optim.AdamW(module.parameters(), lr=lr)


def train(module, optimizer, loss=loss_of, steps=None):
    """Take some steps, or steps until someone ends it."""
    for step in count() if steps is None else range(steps):
        optimizer.zero_grad()
        loss(module, step).backward()
        optimizer.step()


def half():
    """Train in BF16 without masters."""
    module = model().bfloat16()
    train(module, adamw(module, LR))


def half_without_masters():
    """Train in FP16, in which AdamW's eps is zero."""
    module = model().half()
    train(module, adamw(module))


def overflowing():
    """Train by DDP and a GradScaler whose scale overflows at the third attempt, and at the fourth."""
    dist.init_process_group("gloo")
    module = DistributedDataParallel(model())
    optimizer, scaler = adamw(module), torch.amp.GradScaler("cpu")
    for step in count():
        if step in (2, 4):
            scaler.update(2.0**32 if step == 2 else 2.0**10)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_of(module, step)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def by_closure():
    """Let each update compute its own gradients, as Lightning does."""
    module = model()
    optimizer = adamw(module)
    for step in count():

        def closure(step=step):
            optimizer.zero_grad()
            loss = loss_of(module, step)
            loss.backward()
            return loss

        optimizer.step(closure)


def in_turns():
    """Train two modules, the second one with every eighth update of the first, and move a tensor of no module."""
    first, second, loose = model(), model().bfloat16(), torch.zeros(3, requires_grad=True)
    by_first = torch.optim.SGD([*first.parameters(), loose], lr=0.1)
    by_second = torch.optim.SGD(second.parameters(), lr=1e-9)
    for step in count():
        (loss_of(first, step) + loose.sum()).backward()
        by_first.step()
        by_first.zero_grad()
        loss_of(second, step).backward()
        if step % 8 == 7:
            by_second.step()
            by_second.zero_grad()


def twice():
    """End after two updates."""
    module = model()
    train(module, sgd(module), steps=2)


def once():
    """End after one update."""
    module = model()
    train(module, sgd(module), steps=1)


def by_epochs():
    """Make an optimizer for each epoch of two updates."""
    module = model()
    for _ in range(8):
        train(module, sgd(module), steps=2)


def by_many():
    """Make an optimizer for each update."""
    module = model()
    for _ in range(8):
        train(module, sgd(module), steps=1)


def inside_backward():
    """Update each parameter as soon as its gradient is there."""
    module = model()
    for param in module.parameters():
        optimizer = torch.optim.SGD([param], lr=0.1)
        param.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    for step in range(8):
        loss_of(module, step).backward()


def flat():
    """Train by FSDP1, which keeps weights as views of flat parameters."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    module = FullyShardedDataParallel(model(), device_id=torch.device("cpu"))
    train(module, sgd(module), steps=9)


def masters_by_hand():
    """Train in BF16 with FP32 masters, whose values the parameters get behind each update."""
    module = model().bfloat16()
    masters = [param.detach().float() for param in module.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-4)
    for step in count():
        module.zero_grad()
        loss_of(module, step).backward()
        for master, param in zip(masters, module.parameters(), strict=True):
            master.grad = param.grad.float()
        optimizer.step()
        for master, param in zip(masters, module.parameters(), strict=True):
            param.data.copy_(master)


def partly_held():
    """Leave a weight out of the optimizer, and let another model, which nothing trains, get gradients."""
    module, judge = model(), model()
    optimizer = torch.optim.SGD([*module[0].parameters(), module[1].bias], lr=0.1)
    train(module, optimizer, lambda module, step: loss_of(module, step) + loss_of(judge, step))


def evaluating():
    """Train in FP32, and evaluate in BF16 between updates."""

    def loss(module, step):
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            loss_of(module, step)
        return loss_of(module, step)

    module = model()
    train(module, sgd(module), loss)


def compiled_step():
    """Compile the function that computes the loss, and not the module."""
    module = model()
    compiled = torch.compile(lambda tokens: cross_entropy(module(tokens), tokens), backend="aot_eager")
    train(module, sgd(module), lambda module, step: compiled(torch.arange(NUM_TOKENS)))


def accumulating():
    """Accumulate 300 micro-batches for each update, whose activations are made anew in backward."""
    module = model()
    optimizer = sgd(module)
    for step in count():
        head = checkpoint(module[1], module[0](torch.arange(NUM_TOKENS)), use_reentrant=True)
        cross_entropy(head, torch.arange(NUM_TOKENS)).div(300).backward()
        if step % 300 == 299:
            optimizer.step()
            optimizer.zero_grad()


def from_an_edge():
    """Begin each backward pass at an edge of the graph, and not at a tensor."""
    module = model()
    optimizer = sgd(module)
    for step in count():
        optimizer.zero_grad()
        torch.autograd.backward(get_gradient_edge(loss_of(module, step)), torch.ones(()))
        optimizer.step()


def by_hand():
    """Move the weights without an optimizer, once."""
    module = model()
    loss_of(module, 0).backward()
    for param in module.parameters():
        param.data -= param.grad


def by_hand_forever():
    """Move the weights without an optimizer, until someone ends it."""
    while True:
        by_hand()


def by_grad_forever():
    """Move the weights by hand and without `backward`, until someone ends it."""
    module = model()
    for step in count():
        grads = torch.autograd.grad(outputs=loss_of(module, step), inputs=[*module.parameters()])
        for param, grad in zip(module.parameters(), grads, strict=True):
            param.data -= grad


def log_of_negative():
    """Compute a loss that is NaN from the second update on, with finite gradients."""

    def loss(module, step):
        right = loss_of(module, step)
        return right + torch.log(right.detach() if step == 0 else -right.detach())

    module = model()
    train(module, sgd(module), loss)


def root_of_zero():
    """Compute a gradient that is not finite from the third update on."""
    module = model()
    train(
        module, sgd(module),
        lambda module, step: loss_of(module, step) + (module[1].bias * (step < 2)).square().sum().sqrt(),
    )  # fmt: skip


def by_engine():
    """Train by megamix's own engine, imported as a new Python would."""
    from megamix import NAG
    from megamix.mixed_precision import engine

    trained = importlib.reload(engine).ShardedEngine(model(), NAG(lr=0.1), compile_update=False)
    for step in count():
        trained.backward(loss_of(trained, step))
        trained.step()


def never_met():
    """Train on ranks that read their own data and have no process group."""
    module = model()
    train(module, adamw(module), lambda module, step: loss_of(module, 2 * step + int(os.environ["RANK"])))


def each_alone(average=False):
    """Train on two ranks that read their own data and average only a count for a log, or, by hand, the gradients."""
    dist.init_process_group("gloo")
    module = model()
    optimizer = adamw(module)
    for step in count():
        optimizer.zero_grad()
        loss_of(module, 2 * step + dist.get_rank()).backward()
        for param in module.parameters() if average else ():
            dist.all_reduce(param.grad)
        dist.all_reduce(torch.ones(2))
        optimizer.step()


def averaging():
    """Average the gradients of two ranks by hand."""
    each_alone(average=True)


def never_synced():
    """Train by DDP, each micro-batch without its averages."""
    last_synced(around_last=DistributedDataParallel.no_sync)


def inner_called():
    """Train by DDP, and call the model inside the wrapper."""
    last_synced(lambda wrapper: wrapper.module)


def last_synced(called=lambda wrapper: wrapper, around_last=nullcontext):
    """Train by DDP on ranks that read their own data, two micro-batches an update, and average with the last one alone,
    as it should be, unless another context is around that.
    """
    dist.init_process_group("gloo")
    wrapper = DistributedDataParallel(model())
    optimizer = adamw(wrapper)
    for step in count():
        optimizer.zero_grad()
        for around in (DistributedDataParallel.no_sync, around_last):
            with around(wrapper):
                loss_of(called(wrapper), 2 * step + dist.get_rank()).backward()
        optimizer.step()


def forgotten_head():
    """Train by DDP, which is told to ignore a bias, and a head beside it that nobody wrapped."""
    dist.init_process_group("gloo")
    body, head = model(), nn.Linear(NUM_TOKENS, NUM_TOKENS)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(body, ["1.bias"])
    wrapper = DistributedDataParallel(body)
    optimizer = torch.optim.SGD([*wrapper.parameters(), *head.parameters()], lr=0.1)
    for step in count():
        optimizer.zero_grad()
        loss_of(nn.Sequential(wrapper, head), 2 * step + dist.get_rank()).backward()
        optimizer.step()


class Divided(nn.Module):
    """A layer of which each rank holds a part: half of its features, or every second expert."""

    def __init__(self, send):
        super().__init__()
        self.send, self.part = send, nn.Linear(16, 16, bias=False)
        with torch.no_grad():
            self.part.weight.mul_(1 + dist.get_rank())

    def forward(self, x):
        return self.send(self.part(x))


def divided(send):
    """Train by DDP a model of which each rank holds a part, whose activations `send` exchanges."""
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    body = nn.Sequential(nn.Embedding(NUM_TOKENS, 16), Divided(send), nn.Linear(16, NUM_TOKENS))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(body, ["1.part.weight"])
    wrapper = DistributedDataParallel(body)
    train(wrapper, sgd(wrapper), lambda module, step: loss_of(module, 2 * step + dist.get_rank()))


def tensor_parallel():
    """Sum the parts' outputs."""
    divided(all_reduce)


def expert_parallel():
    """Let each rank compute for tokens of both."""
    divided(lambda x: all_to_all_single(torch.empty_like(x), x))


def begun_by_dcp(loaded=0):
    """Ask for the optimizer's state before its first update, as DCP does, which makes a step to fill it."""
    module = model()
    optimizer = adamw(module)
    get_optimizer_state_dict(module, optimizer)
    if loaded:
        old = optimizer.state_dict()
        for state in old["state"].values():
            state["step"].fill_(loaded)
        optimizer.load_state_dict(old)
    train(module, optimizer)


def resumed_by_dcp():
    """Load the state of other updates after that."""
    begun_by_dcp(loaded=1000)


def loose_tensor():
    """Move a tensor that is in no module."""
    weight = torch.zeros(3, requires_grad=True)
    train(None, torch.optim.SGD([weight], lr=0.1), lambda module, step: weight.sum())


if __name__ == "__main__":
    globals()[sys.argv[1]]()
