"""A simulated GPU fails where a GPU fails: fresh memory is garbage, devices do not mix, a copy to pinned memory is not
there before it was waited for, and pinned memory is not free before that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megamix.mixed_precision.examination import count_exponents


def _fails(action: Callable[[], Any]) -> str:
    try:
        action()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def _memory() -> tuple[int, int, int]:
    """Return bytes of a tensor as torch counts them: while it lives, behind it, and the peak."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = torch.empty(1000, device="cuda")
    during = torch.cuda.memory_allocated() - before
    peak = torch.cuda.max_memory_allocated() - before
    assert kept.isnan().all()
    del kept
    return during, torch.cuda.memory_allocated() - before, peak


def _devices() -> list[str]:
    here, other = torch.ones(3, device="cuda"), torch.ones(3, device="cuda:1")
    mixed = [
        _fails(lambda: here + torch.ones(3)),
        _fails(lambda: here + other),
        _fails(lambda: torch.ones(3).add_(here)),
    ]
    assert torch.equal(here + torch.tensor(1.0), here + 1)  # a number may come from the host
    assert torch.equal(here, other.to(here.device))
    return mixed


def _copies() -> tuple[bool, bool, str]:
    """Return whether a copy to the host is NaN before it was waited for, and whole behind it; and what becomes of
    pinned memory that is written while it is copied from.
    """
    there, arrived = torch.ones(3, device="cuda"), torch.zeros(3, pin_memory=True)
    arrived.copy_(there, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    late = bool(arrived.isnan().all()) and not event.query()
    event.synchronize()
    whole = torch.equal(arrived, torch.ones(3)) and event.query()
    there.copy_(arrived, non_blocking=True)
    arrived.fill_(2)
    return late, whole, _fails(torch.cuda.synchronize)


def _autograd() -> bool:
    model = torch.nn.Sequential(torch.nn.Embedding(9, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 9))
    tokens = torch.arange(9)
    grads = []
    for device in ("cpu", "cuda"):
        model.zero_grad()
        loss = torch.nn.functional.cross_entropy(model.to(device)(tokens.to(device)), tokens.to(device))
        loss.backward()
        grads.append([param.grad.cpu() for param in model.parameters()])
    return all(map(torch.equal, *grads))


def _counts() -> tuple[list[int], list[int]]:
    """Return exponents counted on a GPU, in lanes, and on a CPU."""
    values, found = torch.randn(5000, generator=torch.Generator().manual_seed(0)), []
    for device in ("cuda", "cpu"):
        counts = torch.zeros(256, dtype=torch.int64, device=device)
        count_exponents(values.to(device), counts)
        found.append(counts.cpu().tolist())
    return found[0], found[1]


def test_exponents_counted_in_lanes_are_those_of_a_cpu(gpu_ranks) -> None:
    ((on_gpu, on_cpu),) = gpu_ranks(_counts, 1)
    assert on_gpu == on_cpu
    assert sum(on_cpu) == 5000


def test_memory_and_gradients_are_those_of_a_gpu(gpu_ranks) -> None:
    assert gpu_ranks(_memory, 1) == [(4096, 0, 4096)]
    assert gpu_ranks(_autograd, 1) == [True]


def test_a_copy_is_there_once_it_was_waited_for_and_its_memory_in_use_until_then(gpu_ranks) -> None:
    ((late, whole, written),) = gpu_ranks(_copies, 1)
    assert late
    assert whole
    assert "pinned memory was written to" in written


def test_devices_do_not_mix_and_a_touch_of_another_one_is_told(gpu_ranks) -> None:
    with pytest.raises(RuntimeError, match=r"rank 0 has touched the GPUs \[0, 1\]"):
        gpu_ranks(_check_mixed, 1)


def _check_mixed() -> None:
    assert all("to be on the same device" in line for line in _devices())
