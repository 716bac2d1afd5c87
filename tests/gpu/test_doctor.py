"""`megamix doctor` on a machine with two simulated GPUs has a verdict on each part and ends with 0: sums, layouts,
norms and steps without host waits are right, and work that an H100 does faster than a CPU is slow
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from megamix.cli import main
from megamix.tools.doctor import cards, measured, ranks
from megamix.tools.doctor.finding import expected
from megamix.tools.ranks import RankPool
from tests.gpu.pools import on_gpu, processes_with_gpus
from tests.tools.doctor.test_command import sound  # noqa: F401  # a fixture, named by tests here
from tests.tools.doctor.test_machine import FACTS, NVLINKED, with_cards

TINY = {"vocab_size": 64, "seq_len": 8, "hidden_size": 32, "num_layers": 1, "num_heads": 2}
OK = ["cards", "torch", "links", "collectives", "host waits", "verify dp2", "verify dp1tp2", "compiled norms"]
SLOW = ["wire", "products", "copy", "pinned memory", "CUDA graph", "update", "train 124 M"]


class Pool(RankPool):
    """Nothing is compiled there, and each side trains as ours: torch's own ways are not simulated."""

    def call(self, function: Callable[..., Any], *args: Any, **limits: Any) -> list[Any]:
        return super().call(on_gpu, 0, True, _uncompiled, function, *args, **limits)


def _uncompiled(function: Callable[..., Any], *args: Any) -> Any:
    with (
        mock.patch.object(torch, "compile", lambda module, **_: module),
        mock.patch.dict(ranks.SIDES, dict.fromkeys(ranks.SIDES, ranks.SIDES["ours"])),
    ):
        return function(*args)


@pytest.mark.usefixtures("sound", "gpu_ranks")
def test_a_page_has_a_verdict_on_each_part(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "RankPool", Pool)
    for name, answer in {"torch": FACTS, "cards": (with_cards({}, {}), ""), "pci": 2}.items():
        monkeypatch.setattr(cards, f"probe_{name}", lambda answer=answer: answer)
    monkeypatch.setattr(cards, "ask_driver", lambda *_: (NVLINKED, ""))
    monkeypatch.setitem(expected(), "sizes", {"cuda": [16, 1024, 16, 64]})
    monkeypatch.setitem(expected(), "trained", [expected()["trained"][0] | {"model": TINY, "steps": 1}])
    with processes_with_gpus():
        assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    marks = {line[7:22].strip(): line[:7].strip() for line in lines[:-1] if line[0] != " "}
    assert {check: marks[check] for check in OK + SLOW} == dict.fromkeys(OK, "ok") | dict.fromkeys(SLOW, "SLOW")
    assert "-" not in {mark for check, mark in marks.items() if check != "port"}


def test_every_other_rank_has_a_link(gpu_ranks: Callable[..., list[Any]]) -> None:
    by_rank = gpu_ranks(ranks.seconds_by_source, 2, 1024)
    assert [[(source, seconds > 0) for source, seconds in taken] for taken in by_rank] == [[(1, True)], [(0, True)]]
