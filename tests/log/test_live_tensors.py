"""A rank without memory lists its live tensors by name: its own, those of the pass that failed, and what autograd
keeps, each storage once.
"""

import re

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.checkpoint import checkpoint

from megamix.log.live_tensors import tell_live_tensors


def _fail(layer):
    given = torch.randn(500, 300)
    # A compiler holds fake tensors, which take no memory and have no number as size.
    fake = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.randn(40, 30), static_shapes=False)
    result = layer(given).exp().sin()
    view = result[0]
    again = checkpoint(layer, given, use_reentrant=False)
    assert (view.shape, again.shape, fake.dim()) == ((300,), (500, 300), 2)
    raise MemoryError("no more")


def test_live_tensors_are_named_and_counted_once(tmp_path, capsys):
    layer, calls = nn.Linear(300, 300), []
    layer.register_forward_hook(lambda *_: calls.append(1))
    try:
        _fail(layer)
    except MemoryError as error:
        tell_live_tensors(tmp_path, 5, None, error)
    first, *largest = capsys.readouterr().err.splitlines()
    assert re.fullmatch(rf"rank 5: .* MiB of live tensors, listed in {tmp_path}/memory_rank5.txt; the largest:", first)
    assert len(largest) == 3
    lines = (tmp_path / "memory_rank5.txt").read_text().splitlines()
    assert lines[0] == "no more"
    for words in ("given in _fail", "result in _fail", "again in _fail"):
        (line,) = [line for line in lines if f" {words}, test_live_tensors.py:" in line]
        assert line.startswith("        0.57 MiB      1 x ")
    assert [line for line in lines if "kept for backward by SinBackward0, float32 (500, 300)" in line]
    assert not [line for line in lines if "view in _fail" in line or "fake in _fail" in line]
    assert len(calls) == 2  # the layer whose backward would compute it again was not


def test_a_list_that_cannot_be_written_changes_no_end(tmp_path, capsys):
    tell_live_tensors(tmp_path / "missing", 0, None, MemoryError("no more"))
    assert capsys.readouterr().err == ""
