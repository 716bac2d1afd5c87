"""What `megamix doctor` measures on GPUs goes on simulated ones, by NCCL: sums, wires, links, rates, norms, steps that
make the host wait for nothing, and training
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from megamix.bench.sides import Work
from megamix.config import ModelConfig
from megamix.doctor import measured, ranks
from megamix.doctor.finding import expected

TINY = ModelConfig(vocab_size=64, seq_len=8, hidden_size=32, num_layers=1, num_heads=2)


def _examined() -> dict[str, Any]:
    from tests.gpu.simulated import NAME

    work = Work(model=TINY, micro_batch_size=2, compile_update=False, device="cuda")
    with (
        mock.patch.object(torch, "compile", lambda module, **_: module),
        mock.patch.object(torch.cuda, "set_sync_debug_mode", lambda mode: None),  # the simulation refuses waits itself
    ):
        return {
            "name": NAME,
            "sums": ranks.sums_off(numel=64),
            "wires": ranks.wire_rates(1024),
            "links": ranks.seconds_by_source(1024),
            "rates": ranks.device_rates(16, 64),
            "norms": ranks.norms_off(tokens=16, width=64),
            "update": ranks.update_share(TINY),
            "waits": ranks.waits(),
            "trained": ranks.train_rate(work, "ours", 1),  # torch's own ways are not simulated
        }


def test_all_that_is_measured_goes_on_gpus(gpu_ranks: Callable[..., list[Any]]) -> None:
    by_rank = gpu_ranks(_examined, 2)
    card, case = by_rank[0]["name"], measured.Trained(**expected()["trained"][0])
    assert measured.judge_shares("collectives", [told["sums"] for told in by_rank]).verdict == "ok"
    assert measured.judge_shares("compiled norms", [told["norms"] for told in by_rank]).verdict == "ok"
    assert all(told["waits"] == {"waits in two steps": 0.0} for told in by_rank)
    assert all(told["update"] > 0 for told in by_rank)
    slow = [
        measured.judge_wire([told["wires"] for told in by_rank], on_gpus=True),
        *measured.judge_rates([told["rates"] for told in by_rank], card),
        measured.judge_training(case, {"ours": by_rank[0]["trained"], "FSDP2": 1.0}, card),
    ]
    assert [(one.check, one.verdict) for one in slow] == [
        (check, "slow") for check in ("wire", "products", "copy", "pinned memory", "train 124 M")
    ]  # a CPU is no H100
    assert slow[1].expected == "643 TFLOP/s or more"
