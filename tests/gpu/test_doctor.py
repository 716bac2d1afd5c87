"""`megamix doctor` on a machine with two simulated GPUs has a verdict on each part and ends with 0: sums, layouts,
blocks and steps without host waits are right, and work that an H100 does faster than a CPU is slow. It names planted
faults: a kernel that writes zeros, a host wait, a wrong sum of NCCL's, a norm 2 % off, half the bandwidth.
"""

import re
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor

from megamix.cli.verbs import main
from megamix.config import ModelConfig
from megamix.mixed_precision.engine import ShardedEngine
from megamix.model import wide
from megamix.model.ops import Ops
from megamix.tools.bench import ranks as bench_ranks
from megamix.tools.bench.sides import Work
from megamix.tools.doctor import cards, measured, ranks
from megamix.tools.doctor.finding import expected
from megamix.tools.ranks import RankPool
from tests.gpu.pools import on_gpu, processes_with_gpus
from tests.tools.doctor.test_command import sound  # noqa: F401  # a fixture, named by tests here
from tests.tools.doctor.test_machine import FACTS, NVLINKED, with_cards

TINY = ModelConfig(vocab_size=64, seq_len=8, hidden_size=32, num_layers=1, num_heads=2)
OK = ["cards", "torch", "links", "collectives", "host waits", "compiled blocks"]
SLOW = ["wire", "products", "copy", "train 124 M"]
NOT_HERE = ["port", "train 3 M"]


class Pool(RankPool):
    """Nothing is compiled there, and each side trains as ours: torch's own ways are not simulated."""

    def __init__(self, *args, environment=None, **settings):
        super().__init__(*args, **settings)  # a new interpreter would have no simulated GPU

    def call(self, function, *args, **limits):
        return super().call(on_gpu, 0, _uncompiled, function, *args, **limits)


def _uncompiled(function, *args):
    with (
        mock.patch.object(torch, "compile", lambda module, **_: module),
        mock.patch.dict(ranks.SIDES, dict.fromkeys(ranks.SIDES, ranks.SIDES["ours"])),
        mock.patch.dict(ranks._BLOCKS["GELU"], bias=False),  # a CPU's kernel sums their gradients in half
    ):
        return function(*args)


@pytest.fixture
def two_cards(sound, gpu_ranks, monkeypatch):  # noqa: F811
    """Fake a machine with two sound cards, and the time to measure them."""
    monkeypatch.setattr(measured, "RankPool", Pool)
    for name, answer in {"torch": FACTS, "cards": (with_cards({}, {}), ""), "pci": 2}.items():
        monkeypatch.setattr(cards, f"probe_{name}", lambda answer=answer: answer)
    monkeypatch.setattr(cards, "ask_driver", lambda *_: (NVLINKED, ""))
    monkeypatch.setitem(expected(), "sizes", {"cuda": [256, 64, 1024, 16, 64]})
    monkeypatch.setitem(measured.SIZES, "124M", Work(model=TINY))
    monkeypatch.setitem(measured.SIZES, "1.3B", Work(model=TINY))
    with processes_with_gpus():
        yield


def _marks(capsys):
    """Return the mark and the text of each line of the page, by check."""
    lines = capsys.readouterr().out.splitlines()
    return {line[7:22].strip(): (line[:7].strip(), line[23:]) for line in lines[:-1] if line[0] != " "}


@pytest.mark.usefixtures("two_cards")
def test_a_page_has_a_verdict_on_each_part(capsys):
    assert main(["doctor"]) == 0
    marks = {check: mark for check, (mark, _) in _marks(capsys).items()}
    want = dict.fromkeys(OK, "ok") | dict.fromkeys(SLOW, "SLOW")
    assert {check: marks[check] for check in want} == want
    assert [check for check, mark in marks.items() if mark == "-"] == NOT_HERE


def kernel_writes_zeros():
    right = wide.SwiGLU.backward

    def wrong(ctx, grad):
        return tuple(
            torch.zeros_like(slope) if grad.dtype == torch.bfloat16 and slope is not None else slope
            for slope in right(ctx, grad)
        )

    return mock.patch.object(wide.SwiGLU, "backward", staticmethod(wrong))


def norm_is_off():
    right = Ops.rms_norm

    def wrong(self, x, *args):
        return right(self, x, *args) * (1.02 if x.dtype == torch.bfloat16 else 1)

    return mock.patch.object(Ops, "rms_norm", wrong)


def host_waits():
    right = ShardedEngine.step

    def wrong(self):
        result = right(self)
        assert result.loss.item() > 0
        return result

    return mock.patch.object(ShardedEngine, "step", wrong)


def nccl_loses_a_rank():
    from tests.gpu import nccl

    return mock.patch.object(nccl, "_sum", lambda parts, opts, right=nccl._sum: right(parts[:-1], opts))


@contextmanager
def card_of(bandwidth):
    """A clock that goes on as an H100's products and copies take it."""
    now_s, copy_, mm = 0.0, Tensor.copy_, torch.mm

    def timed_copy(self, source, **how):
        nonlocal now_s
        now_s += (self.nbytes + source.nbytes) / bandwidth if source.is_cuda else self.nbytes / 50e9
        return copy_(self, source, **how)

    def timed_mm(one, other, **how):
        nonlocal now_s
        now_s += 2 * len(one) ** 3 / 700e12
        return mm(one, other, **how)

    clock = SimpleNamespace(perf_counter=lambda: now_s)
    with (
        mock.patch.object(bench_ranks, "time", clock), mock.patch.object(Tensor, "copy_", timed_copy),
        mock.patch.object(torch, "mm", timed_mm), mock.patch.object(ranks, "probe_cards", lambda: ([], "")),
    ):  # fmt: skip
        yield


# Planted faults: the check that runs, and the line that names them.
FAULTS = {
    "no fault, of copies": (partial(card_of, 3e12), "device", "copy", "ok", "3,000.0 GB/s"),
    "a kernel writes zeros": (
        kernel_writes_zeros, "compiled blocks", "compiled blocks", "BROKEN",
        r"SwiGLU feed_forward_norm.weight is off by 200 bounds; SwiGLU feed_forward.gate.weight is off by 200 bounds",
    ),
    "a norm is off by 2 %": (norm_is_off, "compiled blocks", "compiled blocks", "BROKEN", "SwiGLU .* bounds"),
    "a host wait in a step": (host_waits, "host waits", "answer host waits", "BROKEN", "host read where the host must"),
    "NCCL loses a rank's part": (
        nccl_loses_a_rank, "collectives", "collectives", "BROKEN", "sum of float16 is off by .*; sum of bfloat16"
    ),
    "half the bandwidth": (partial(card_of, 1.5e12), "device", "copy", "SLOW", "1,500.0 GB/s.*2,848 GB/s or more"),
}  # fmt: skip


class FaultyPool(Pool):
    fault = ""

    def call(self, function, *args, **limits):
        return super().call(_with_fault, self.fault, function, *args, **limits)


def _with_fault(fault, function, *args):
    with FAULTS[fault][0]():
        return function(*args)


@pytest.mark.usefixtures("two_cards")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(capsys, monkeypatch, fault):
    monkeypatch.setattr(measured, "RankPool", FaultyPool)
    monkeypatch.setattr(FaultyPool, "fault", fault)
    _, only, check, mark, said = FAULTS[fault]
    assert main(["doctor", "--only", only]) == (mark == "BROKEN")
    marks = _marks(capsys)
    (name,) = [name for name in marks if check.startswith(name)]
    assert marks[name][0] == mark
    assert re.search(said, marks[name][1])


def test_every_other_rank_has_a_link(gpu_ranks):
    by_rank = gpu_ranks(ranks.seconds_by_source, 2, 1024)
    assert [[(source, seconds > 0) for source, seconds in taken] for taken in by_rank] == [[(1, True)], [(0, True)]]


def _captured():
    """Take a step in the capture of a CUDA graph, in which the host can wait for nothing."""
    from tests.gpu import simulated

    work, refuse = Work(model=TINY, device="cuda"), mock.Mock(side_effect=RuntimeError("not permitted in a capture"))
    step = ranks.make_step(ranks.Ours(work), work)
    for _ in range(3):
        step()
    with (
        simulated.host_may_not_wait(),
        mock.patch.object(simulated.Event, "synchronize", refuse),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True),
    ):
        step()
    return bool(step().isfinite())


def test_a_captured_step_asks_the_host_nothing(gpu_ranks):
    assert gpu_ranks(_uncompiled, 1, _captured) == [True]
