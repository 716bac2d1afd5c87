"""Scripts that know nothing of an audit: `python -m tests.tools.audit.scripts NAME` calls NAME."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

NUM_TOKENS = 64
LR = 6e-6


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(NUM_TOKENS, 16), nn.Linear(16, NUM_TOKENS))


def loss_of(module: nn.Module, step: int) -> Tensor:
    tokens = torch.randint(NUM_TOKENS, (128,), generator=torch.Generator().manual_seed(step))
    return cross_entropy(module(tokens).float(), (tokens + 1) % NUM_TOKENS)


def half() -> None:
    """Train in BF16 without masters."""
    module = model().bfloat16()
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR)
    for step in count():
        optimizer.zero_grad()
        loss_of(module, step).backward()
        optimizer.step()


def overflowing() -> None:
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


def by_closure() -> None:
    """Let each update compute its own gradients, as Lightning does."""
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    for step in count():

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(module, step)
            loss.backward()
            return loss

        optimizer.step(closure)


def in_turns() -> None:
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


def twice() -> None:
    """End after two updates."""
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(2):
        loss_of(module, step).backward()
        optimizer.step()


def by_hand() -> None:
    """Move the weights without an optimizer, once."""
    module = model()
    loss_of(module, 0).backward()
    with torch.no_grad():
        for param in module.parameters():
            assert param.grad is not None
            param -= param.grad


def loose_tensor() -> None:
    """Move a tensor that is in no module."""
    weight = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in count():
        weight.sum().backward()
        optimizer.step()


SCRIPTS: dict[str, Callable[[], None]] = {
    one.__name__: one for one in (half, overflowing, by_closure, in_turns, twice, by_hand, loose_tensor)
}

if __name__ == "__main__":
    SCRIPTS[sys.argv[1]]()
