"""Scripts that know nothing of an audit: `python -m tests.tools.audit.scripts NAME` calls NAME."""

import os
import sys
from contextlib import nullcontext
from itertools import count

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import FullyShardedDataParallel
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


def half():
    """Train in BF16 without masters."""
    module = model().bfloat16()
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR)
    for step in count():
        optimizer.zero_grad()
        loss_of(module, step).backward()
        optimizer.step()


def overflowing():
    """Train by DDP and a GradScaler whose scale overflows at the third attempt, and at the fourth."""
    dist.init_process_group("gloo")
    module = DistributedDataParallel(model())
    optimizer, scaler = torch.optim.AdamW(module.parameters(), lr=1e-3), torch.amp.GradScaler("cpu")
    for step in count():
        if step == 2:
            scaler.update(2.0**32)
        elif step == 4:
            scaler.update(2.0**10)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_of(module, step)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def by_closure():
    """Let each update compute its own gradients, as Lightning does."""
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
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
    take_updates(model(), 2)


def once():
    """End after one update."""
    take_updates(model(), 1)


def by_epochs():
    """Make an optimizer for each epoch of two updates."""
    module = model()
    for _ in range(8):
        take_updates(module, 2)


def by_many():
    """Make an optimizer for each update."""
    module = model()
    for _ in range(8):
        take_updates(module, 1)


def take_updates(module, number):
    """Make an optimizer, and take some updates with it."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(number):
        optimizer.zero_grad()
        loss_of(module, step).backward()
        optimizer.step()


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
    take_updates(FullyShardedDataParallel(model(), device_id=torch.device("cpu")), 9)


def masters_by_hand():
    """Train in BF16 with FP32 masters, whose values the parameters get behind each update."""
    module = model().bfloat16()
    masters = [param.detach().float() for param in module.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-4)
    for step in count():
        module.zero_grad()
        loss_of(module, step).backward()
        for master, param in zip(masters, module.parameters(), strict=True):
            assert param.grad is not None
            master.grad = param.grad.float()
        optimizer.step()
        for master, param in zip(masters, module.parameters(), strict=True):
            param.data.copy_(master)


def partly_held():
    """Leave a weight out of the optimizer, and let another model, which nothing trains, get gradients."""
    module, judge = model(), model()
    optimizer = torch.optim.SGD([*module[0].parameters(), module[1].bias], lr=0.1)
    for step in count():
        (loss_of(module, step) + loss_of(judge, step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def evaluating():
    """Train in FP32, and evaluate in BF16 behind each update."""
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in count():
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            loss_of(module, step)
        loss_of(module, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def compiled_step():
    """Compile the function that computes the loss, and not the module."""
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    compiled = torch.compile(lambda tokens: cross_entropy(module(tokens), tokens), backend="aot_eager")
    for _ in count():
        compiled(torch.arange(NUM_TOKENS)).backward()
        optimizer.step()
        optimizer.zero_grad()


def by_hand():
    """Move the weights without an optimizer, once."""
    module = model()
    loss_of(module, 0).backward()
    with torch.no_grad():
        for param in module.parameters():
            assert param.grad is not None
            param -= param.grad


def accumulating():
    """Accumulate 300 micro-batches for each update, whose activations are made anew in backward."""
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in count():
        head = checkpoint(module[1], module[0](torch.arange(NUM_TOKENS)), use_reentrant=True)
        cross_entropy(head, torch.arange(NUM_TOKENS)).div(300).backward()
        if step % 300 == 299:
            optimizer.step()
            optimizer.zero_grad()


def from_an_edge():
    """Begin each backward pass at an edge of the graph, and not at a tensor."""
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in count():
        optimizer.zero_grad()
        torch.autograd.backward(get_gradient_edge(loss_of(module, step)), torch.ones(()))
        optimizer.step()


def by_grad_forever():
    """Move the weights by hand and without `backward`, until someone ends it."""
    module = model()
    for step in count():
        grads = torch.autograd.grad(outputs=loss_of(module, step), inputs=[*module.parameters()])
        with torch.no_grad():
            for param, grad in zip(module.parameters(), grads, strict=True):
                param -= grad


def by_hand_forever():
    """Move the weights without an optimizer, until someone ends it."""
    while True:
        by_hand()


def half_without_masters():
    """Train in FP16, in which AdamW's eps is zero."""
    module = model().half()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, eps=1e-8)
    for step in count():
        optimizer.zero_grad()
        loss_of(module, step).backward()
        optimizer.step()


def log_of_negative():
    """Compute a loss that is NaN from the second update on, with finite gradients."""
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    for step in count():
        optimizer.zero_grad()
        loss = loss_of(module, step)
        (loss + torch.log(loss.detach() if step == 0 else -loss.detach())).backward()
        optimizer.step()


def root_of_zero():
    """Compute a gradient that is not finite from the third update on."""
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    for step in count():
        optimizer.zero_grad()
        (loss_of(module, step) + (module[1].bias * (step < 2)).square().sum().sqrt()).backward()
        optimizer.step()


def each_alone():
    """Train on two ranks that read their own data and average only a count for a log."""
    train_on_ranks(average=False)


def averaging():
    """Average the gradients of two ranks by hand."""
    train_on_ranks(average=True)


def never_met():
    """Train on ranks that read their own data and have no process group."""
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    for step in count():
        optimizer.zero_grad()
        loss_of(module, 2 * step + int(os.environ["RANK"])).backward()
        optimizer.step()


def train_on_ranks(average):
    """Train a plain module on each rank. `average`: whether they average their gradients."""
    dist.init_process_group("gloo")
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    for step in count():
        optimizer.zero_grad()
        loss = loss_of(module, 2 * step + dist.get_rank())
        loss.backward()
        for param in module.parameters() if average else ():
            dist.all_reduce(param.grad)
        dist.all_reduce(torch.stack([loss.detach(), torch.ones(())]))
        optimizer.step()


def never_synced():
    """Train by DDP, each micro-batch without its averages."""
    train_by_ddp(lambda wrapper, tokens: wrapper(tokens), DistributedDataParallel.no_sync)


def inner_called():
    """Train by DDP, and call the model inside the wrapper."""
    train_by_ddp(lambda wrapper, tokens: wrapper.module(tokens), nullcontext)


def last_synced():
    """Train by DDP, and average with the last micro-batch alone, as it should be."""
    train_by_ddp(lambda wrapper, tokens: wrapper(tokens), nullcontext)


def train_by_ddp(call, around_last):
    """Train a wrapped model on ranks that read their own data, two micro-batches an update."""
    dist.init_process_group("gloo")
    wrapper = DistributedDataParallel(model())
    optimizer = torch.optim.AdamW(wrapper.parameters(), lr=1e-3)
    for step in count():
        optimizer.zero_grad()
        for around in (DistributedDataParallel.no_sync, around_last):
            tokens = torch.randint(
                NUM_TOKENS, (128,), generator=torch.Generator().manual_seed(2 * step + dist.get_rank())
            )
            with around(wrapper):
                cross_entropy(call(wrapper, tokens), tokens).backward()
        optimizer.step()


def loose_tensor():
    """Move a tensor that is in no module."""
    weight = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in count():
        weight.sum().backward()
        optimizer.step()


SCRIPTS = {
    one.__name__: one
    for one in (
        half, overflowing, by_closure, in_turns, twice, once, by_epochs, by_many, inside_backward, flat,
        masters_by_hand, partly_held, evaluating, compiled_step, by_hand, by_hand_forever,
        by_grad_forever, accumulating, from_an_edge, half_without_masters, log_of_negative, root_of_zero,
        each_alone, averaging, never_met, never_synced, inner_called, last_synced, loose_tensor,
    )
}  # fmt: skip

if __name__ == "__main__":
    SCRIPTS[sys.argv[1]]()
