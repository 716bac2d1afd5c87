"""`megamix verify` starts its ranks, prints one row for each layout with its device, names the first difference and
ends with 1. GPUs that are asked for and missing are told; a rank on the CPU sees none.
"""

import os
import signal
from pathlib import Path
from unittest import mock

import pytest
import torch

from megamix.cli.verbs import main
from megamix.tools.ranks import RankFailure, RankPool
from megamix.tools.verify.core.table import row
from megamix.tools.verify.core.verdict import Difference, Verdict
from megamix.tools.verify.layouts import layout_lines

CONFIG = str(Path(__file__).parents[3] / "configs/quickstart.toml")
SMALL = [
    "model.vocab_size=64", "model.seq_len=8", "model.hidden_size=24", "model.num_layers=1",
    "training.micro_batch_size=1", "precision.loss_scale.rule=static",
    "precision.loss_scale.init_scale=1024.0", "optimizer.compile=false",
]  # fmt: skip


def test_it_starts_its_own_ranks_and_says_that_they_pass(capsys):
    assert main(["verify", CONFIG, *SMALL, "--layouts", "dp2"]) == 0
    said = capsys.readouterr()
    assert said.err == f"megamix verify: dp2 on 2 rank(s), 1 of 1; {layout_lines.ATTEMPTS}\n"
    size, head, line, _ = said.out.splitlines()
    assert size == "at training.micro_batch_size=1 model.seq_len=8 (overrides take another size)"
    assert head.split() == ["layout", "on", "attempts", "skipped", "loss", "gradients", "norm", "weights", "moments"]
    assert line.split()[:4] == ["dp2", "cpu", "4", "1"]
    assert line.split()[-1] == "passes"


def test_a_difference_is_named_and_is_exit_status_1(monkeypatch, capsys):
    verdict = Verdict(attempts=4, worst={"gradient": 31.0})
    verdict.differences += [Difference(0, "gradient", name, 0.5, 0.016) for name in ("norm.weight", "head.weight")]
    monkeypatch.setattr(layout_lines, "verify_layout", lambda *_: verdict)
    assert main(["verify", CONFIG, *SMALL, "--layouts", "dp1"]) == 1
    out = capsys.readouterr().out
    assert "differs" in out
    assert "first: attempt 0: gradient of norm.weight is off by 0.5, bound 0.016" in out
    assert "and 1 more: gradient of head.weight" in out


@pytest.fixture
def jobs(monkeypatch):
    """Return the jobs that are verified, which all pass."""
    seen = []
    monkeypatch.setattr(layout_lines, "verify_layout", lambda job, *_: seen.append(job) or Verdict(attempts=4))
    return seen


@pytest.mark.parametrize(
    ("overrides", "want"),
    [
        ([], (2, 24)),
        (["model.seq_len = 64"], (2, 64)),
        (["training.micro_batch_size=8", "model.seq_len=256"], (8, 256)),
    ],
)
def test_the_size_is_small_unless_an_override_says_otherwise(jobs, capsys, overrides, want):
    assert main(["verify", CONFIG, *overrides, "--layouts", "dp2,tp2"]) == 0
    assert [(job.training.micro_batch_size, job.model.seq_len) for job in jobs] == [want, want]
    first = capsys.readouterr().out.splitlines()[0]
    assert first == f"at training.micro_batch_size={want[0]} model.seq_len={want[1]} (overrides take another size)"


def test_products_in_fp8_are_verified_behind_the_same_job_in_half(jobs, capsys):
    fp8 = "precision.fp8.recipe=tensorwise", "precision.fp8.weight_grad=fp8"
    assert main(["verify", CONFIG, "precision.dtype=bf16", *fp8, "--layouts", "dp2"]) == 0
    told = [(job.precision.fp8 and job.precision.fp8.recipe, job.training.micro_batch_size) for job in jobs]
    assert told == [(None, 16), ("tensorwise", 16)]
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:4]] == ["dp2", "in"]


def test_wrong_layouts_are_named_before_any_rank_is_started(capsys):
    assert main(["verify", CONFIG, "--layouts", "dp2,xp4,dp0,tp4"]) == 2
    said = capsys.readouterr().err
    assert "tp4: parallelism.tensor.size: got 4, must divide model.num_heads 6" in said
    assert "got xp4" in said
    assert "got dp0" in said


def test_a_rank_that_fails_is_told_and_exit_status_1(monkeypatch, capsys):
    why = "rank 1: ValueError: no such thing"
    monkeypatch.setattr(layout_lines, "verify_layout", mock.Mock(side_effect=RankFailure(why)))
    monkeypatch.setattr(layout_lines, "RankPool", lambda *_, **__: mock.Mock(where="cpu"))
    assert main(["verify", CONFIG, *SMALL, "--layouts", "dp2,dp1"]) == 1
    said = capsys.readouterr()
    first, second = said.err.splitlines()
    assert first == f"megamix verify: dp2 on 2 rank(s), 1 of 2; {layout_lines.ATTEMPTS}"
    assert second.startswith("megamix verify: dp1 on 1 rank(s), 2 of 2; 2 layout(s), 67 %, ")
    told = [line for name in ("dp2", "dp1") for line in (row(name, "cpu", "fails"), why)]
    assert said.out.splitlines()[2:6] == told


@pytest.mark.parametrize(
    ("arguments", "cards", "told"),
    [
        (["--device", "cuda"], 1, "needs 2 GPU(s), and torch can use 1; add --share-card, and all"),
        (["--device", "cuda", "--share-card"], 0, "needs 1 GPU(s), and torch can use 0; write --device cpu"),
        (["--share-card"], 1, "--share-card needs --device cuda; leave it out, or write both"),
        (
            ["--device", "cuda", "--share-card", "model.num_layers=2", "--layouts", "dp2,dp2pp2"], 1,
            "--share-card: got dp2pp2, but Gloo sends nothing between the stages of one GPU; verify them by --device",
        ),
    ],
)  # fmt: skip
def test_gpus_that_are_not_there_are_told_before_any_rank_is_started(monkeypatch, capsys, arguments, cards, told):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cards > 0)
    monkeypatch.setattr(layout_lines, "RankPool", None)
    with pytest.raises(SystemExit) as ended:
        main(["verify", CONFIG, *SMALL, *arguments])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("where", "cards", "expected"),
    [(None, 1, "cpu"), (None, 2, "cuda"), ("cpu", 2, "cpu"), ("cuda", 2, "cuda"), ("cuda:0", 1, "cuda:0")],
)
def test_the_gpus_are_used_where_there_are_enough_unless_one_says_otherwise(monkeypatch, where, cards, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cards > 0)
    assert RankPool(2, where).where == expected


def test_a_rank_on_the_cpu_sees_no_gpu():
    with RankPool(1, environment={"CUDA_VISIBLE_DEVICES": "0"}) as pool:
        assert pool.call(os.getenv, "CUDA_VISIBLE_DEVICES") == [""]


def test_who_is_asked_to_end_ends_the_ranks_first(monkeypatch):
    pool = mock.Mock()
    monkeypatch.setattr(layout_lines, "verify_layout", lambda *_: signal.raise_signal(signal.SIGTERM))
    monkeypatch.setattr(layout_lines, "RankPool", lambda *_, **__: pool)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # without a handler, this goes on and fails
    with pytest.raises(SystemExit) as ended:
        main(["verify", CONFIG, *SMALL, "--layouts", "dp1"])
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    assert ended.value.code == 128 + signal.SIGTERM
    pool.close.assert_called_once()
