"""Ours and torch alone train the same thing on a layout, and tokens of a model that several ranks share count once."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megamix.cli import main
from megamix.tools.bench import benches
from megamix.tools.bench.ranks import Settings, TrainRank, Turn
from megamix.tools.bench.report import Result
from megamix.tools.bench.train_bench import LAYOUTS, _measured
from tests.tools.bench.tiny import MODEL, WORK

UNTIED = replace(WORK, model=MODEL.model_copy(update={"tie_embeddings": False}), shared=True)
SMALL = {"tp2": UNTIED, "pp2": replace(UNTIED, micro_batches=4), "cp2": UNTIED}


def _sides(name):
    bench = LAYOUTS[name]
    return [bench.ours, *bench.peers, *bench.others]


def _losses(name, dtype, steps):
    traces = {}
    for side in _sides(name):
        losses = torch.tensor(TrainRank(side, replace(SMALL[name], dtype=dtype)).losses(steps), dtype=torch.float64)
        dist.all_reduce(losses, op=dist.ReduceOp.MAX)  # only one rank of a pipeline knows the loss, the other says 0
        traces[side.name] = losses.tolist()
    return traces


@pytest.mark.parametrize("name", LAYOUTS)
def test_all_sides_of_a_layout_agree_on_the_losses(name, run_ranks):
    traces, other = run_ranks(_losses, 2, name, torch.float32, 4)
    assert traces == other
    for side, losses in traces.items():
        assert losses == pytest.approx(traces["ours"], abs=1e-5), side
    assert abs(traces["ours"][3] - traces["ours"][0]) > 1e-3  # otherwise a side that never updates would agree as well
    for side, losses in run_ranks(_losses, 2, name, torch.bfloat16, 3)[0].items():
        assert losses == pytest.approx(traces["ours"][:3], abs=2e-2), side


def test_ranks_that_share_a_model_count_its_tokens_once():
    settings = Settings(work=SMALL["pp2"], rounds=1, ranks=2)
    measured = _measured([[Turn(0.5, 3.0, 0.0, 0.5, {}, 7), Turn(0.25, 4.0, 0.0, 1.0, {}, 7)]], 8, settings)
    assert measured.tokens_per_s == [256.0]  # 4 micro-batches x 2 sequences x 16 tokens in half a second


def test_a_layout_is_a_flag_of_bench_train(tmp_path, monkeypatch):
    ran = []

    def bench(name, settings):
        ran.append((name, settings.rounds))
        return Result(name, {}, {}, ("side",), [])

    monkeypatch.setattr(benches, "layout", bench)
    output = ["--rounds", "2", "--output", str(tmp_path / "lines.jsonl")]
    assert main(["bench", "--layout", "tp2", *output]) == 0
    assert main(["bench", "train", "--layout", "pp2", *output]) == 0
    assert ran == [("tp2", 2), ("pp2", 2)]
