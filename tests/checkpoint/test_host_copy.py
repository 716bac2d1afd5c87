"""A snapshot of a GPU's state lies in pinned blocks, of sizes that torch does not round up, and is awaited on that GPU
by whatever thread waits.
"""

import threading
from unittest import mock

import pytest
import torch

from megamix.checkpoint.boxes import Box
from megamix.checkpoint.manifest import Manifest
from megamix.checkpoint.snapshot import HostCopy, Part, Snapshot, pinned_sizes

MIB = 1 << 20


class OnGpu(torch.Tensor):
    """A tensor of the host that says it is of the second GPU."""

    is_cuda = True
    device = torch.device("cuda", 1)


@pytest.fixture
def gpu(monkeypatch):
    """Record what the host asks of the GPUs: sizes of pinned memory, and the device of each wait."""
    asked = {"pinned": [], "waited on": []}
    current, empty = threading.local(), torch.empty

    def pinned(*size, pin_memory=False, **more):
        asked["pinned"] += size if pin_memory else ()
        return empty(*size, **more)

    event = mock.Mock()
    event.synchronize = lambda: asked["waited on"].append(getattr(current, "device", 0))  # a new thread has device 0
    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(current, "device", device.index))
    return asked


def snapshot(*numels):
    values = torch.arange(sum(numels), dtype=torch.float32).split(numels)
    shapes = [(numel // 64, 64) for numel in numels]
    parts = [
        Part(f"p{number}", "master", Box.whole(shape), flat.view(shape).as_subclass(OnGpu))
        for number, (flat, shape) in enumerate(zip(values, shapes, strict=True))
    ]
    return Snapshot(Manifest.model_construct(), parts)


def test_blocks_are_powers_of_two_and_hold_no_mebibyte_too_much(gpu):
    taken = HostCopy().start(snapshot(640_000, 64, 1_000_000))
    sizes = gpu["pinned"]
    assert all(size.bit_count() == 1 for size in sizes)
    assert sizes == sorted({*sizes}, reverse=True)
    assert 0 <= sum(sizes) - 4 * 1_640_064 < MIB
    # In the order of the elements, whatever was cut: what is written is what was taken.
    assert torch.equal(torch.cat([part.tensor for part in taken.parts]), torch.arange(1_640_064.0))
    assert all(part.tensor.numel() == part.box.numel for part in taken.parts)
    assert len(taken.parts) > 3


@pytest.mark.parametrize(("size", "blocks"), [(0, []), (11 * MIB + 1, [8, 4])])
def test_sizes_of_blocks(size, blocks):
    assert pinned_sizes(size) == [MIB * block for block in blocks]


def test_a_thread_waits_on_the_gpu_that_copies(gpu):
    copy = HostCopy()
    copy.start(snapshot(6_400))
    thread = threading.Thread(target=copy.read().__enter__)
    thread.start()
    thread.join()
    assert gpu["waited on"] == [1]
