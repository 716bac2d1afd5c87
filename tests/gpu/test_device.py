"""A simulated GPU fails where a real one fails: a copy to pinned memory has not arrived before it is awaited, and
pinned memory is not free before that. What lanes of a GPU count, and tables of the host, are those of a CPU.
"""

import pytest
import torch

from megamix.mixed_precision.examination import count_exponents
from megamix.mixed_precision.step import put_table


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


@pytest.mark.parametrize("case", [pinned_copies, exponents, tables_of_the_host])
def test_a_simulated_gpu_is_like_one(gpu_ranks, case):
    gpu_ranks(case, 1)
