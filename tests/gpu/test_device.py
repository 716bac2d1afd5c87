"""A simulated GPU fails where a real one fails: fresh memory is garbage, devices do not mix, a copy to pinned memory
has not arrived before it is awaited, and pinned memory is not free before that.
"""

import pytest
import torch
import torch.distributed as dist

from megamix.mixed_precision.examination import count_exponents
from megamix.mixed_precision.step import put_table


def fresh_memory():
    """It is garbage, and counted."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = torch.empty(1000, device="cuda")
    assert torch.cuda.memory_allocated() - before == 4096
    assert torch.cuda.max_memory_allocated() - before == 4096
    assert kept.isnan().all()
    del kept
    assert torch.cuda.memory_allocated() == before


def pinned_copies():
    """One is there once it was waited for, and its memory in use until then."""
    there, arrived = torch.ones(3, device="cuda"), torch.zeros(3, pin_memory=True)
    arrived.copy_(there, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    assert not event.query()
    assert arrived.isnan().all()
    event.synchronize()
    assert event.query()
    assert torch.equal(arrived, torch.ones(3))
    there.copy_(arrived, non_blocking=True)
    arrived.fill_(2)
    with pytest.raises(RuntimeError, match="pinned memory was written to"):
        torch.cuda.synchronize()


def gradients():
    """They are those of a CPU."""
    model = torch.nn.Sequential(torch.nn.Embedding(9, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 9))
    grads = []
    for device in ("cpu", "cuda"):
        model.zero_grad()
        tokens = torch.arange(9).to(device)
        torch.nn.functional.cross_entropy(model.to(device)(tokens), tokens).backward()
        grads.append([param.grad.cpu() for param in model.parameters()])
    assert all(map(torch.equal, *grads))


def exponents():
    """Counted in lanes they are those of a CPU."""
    values, found = torch.randn(5000), []
    for device in ("cuda", "cpu"):
        counts = torch.zeros(256, dtype=torch.int64, device=device)
        count_exponents(values.to(device), counts)
        found.append(counts.cpu().tolist())
    assert found[0] == found[1]
    assert sum(found[0]) == 5000


def tables_of_the_host():
    """They reach the GPU from pinned memory, whatever torch's default device is."""
    with torch.device("cuda"):
        table = put_table([1.0, 2.0], torch.device("cuda"))
    assert table.is_cuda
    assert table.tolist() == [1.0, 2.0]


def nothing_to_send():
    """A rank may have nothing to give and nothing to get, in memory at no address."""
    dist.all_to_all_single(*torch.empty(2, 0, device="cuda"), [0], [0])


def devices_do_not_mix():
    here, other = torch.ones(3, device="cuda"), torch.ones(3, device="cuda:1")
    for mix in (lambda: here + torch.ones(3), lambda: here + other, lambda: torch.ones(3).add_(here)):
        with pytest.raises(RuntimeError, match="to be on the same device"):
            mix()
    assert torch.equal(here + torch.tensor(1.0), here + 1)  # a number may come from the host
    assert torch.equal(here, other.to(here.device))


@pytest.mark.parametrize(
    "case", [fresh_memory, pinned_copies, gradients, exponents, tables_of_the_host, nothing_to_send]
)
def test_a_simulated_gpu_is_like_one(gpu_ranks, case):
    gpu_ranks(case, 1)


def test_a_touch_of_another_gpu_is_told(gpu_ranks):
    with pytest.raises(RuntimeError, match=r"rank 0 has touched the GPUs \[0, 1\]"):
        gpu_ranks(devices_do_not_mix, 1)
