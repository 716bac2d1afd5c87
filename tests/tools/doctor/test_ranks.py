"""The measurements of `megamix doctor` on ranks are right on a sound machine and name planted faults: a wrong gather, a
wrong compiled gradient, a slow link, card, copy, product or training.
"""

import inspect
from contextlib import ExitStack, nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megamix.comm.collectives import GlooCollectives, Pending
from megamix.config import ModelConfig
from megamix.tools.bench.sides import Work, fitted
from megamix.tools.doctor import measured, ranks
from megamix.tools.doctor.finding import expected, run_check
from tests.tools.doctor.test_machine import with_cards

H100 = "NVIDIA H100 80GB HBM3"
TINY = ModelConfig(vocab_size=64, seq_len=8, hidden_size=32, num_layers=1, num_heads=2)


gather = GlooCollectives.all_gather


def gathers_wrong(self, flat, shard):
    return Pending(gather(self, flat, shard), then=lambda: flat[0].add_(1))


def measure():
    """Return this rank's measurements, and its sums where the last rank's gather is wrong."""
    work = Work(model=TINY, micro_batch_size=2, compile_update=False)
    rates = {side: ranks.train_rate(work, side, 1)[0] for side in ranks.COMPARED}
    right, last = ranks.sums_off(numel=64), dist.get_rank() == dist.get_world_size() - 1
    with mock.patch.object(GlooCollectives, "all_gather", gathers_wrong) if last else nullcontext():
        wrong = ranks.sums_off(numel=64)
    return right, wrong, ranks.wire_rates(1024), ranks.seconds_by_source(1024), rates


def test_ranks_measure_sums_wires_links_and_steps_and_name_a_wrong_gather_of_one(run_ranks):
    right, wrong, *measures = zip(*run_ranks(measure, 2), strict=True)
    assert (measured.judge_shares("collectives", right).verdict, len(right[0])) == ("ok", 9)
    broken = measured.judge_shares("collectives", wrong)
    assert broken.verdict == "broken"
    assert broken.seen.count("gather of") == 3
    assert "sum" not in broken.seen
    for wires, links, rates in zip(*measures, strict=True):
        assert {*wires} == {"reduce-scatter", "all-gather"}
        assert {*rates} == {"ours", "fsdp2", "plain"}
        assert len(links) == 1
        assert min([*wires.values(), *dict(links).values(), *rates.values()]) > 0


def test_a_check_whose_ranks_are_late_is_one_line(capfd):
    with ExitStack() as stack:
        measure, _ = measured.checks({"cards": []}, stack)["collectives"]
        (late,) = run_check("collectives", lambda: measure(0.0), 60.0)
    assert "rank 1: did not answer in time" in "".join(late.lines())
    assert "Thread" not in capfd.readouterr().err


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_wrong_compiled_gradient_is_named(monkeypatch, share):
    def compile(block, **_):
        weight = block.feed_forward_norm.weight
        # The right value, and a gradient that is too large.
        block.register_forward_hook(lambda module, args, out: out + share * (weight - weight.detach()))

    monkeypatch.setattr(nn.Module, "compile", compile)
    finding = measured.judge_shares("compiled blocks", [ranks.blocks_off(tokens=256, width=64)])
    assert finding.verdict == ("broken" if share else "ok")
    assert ("SwiGLU feed_forward_norm.weight is off by" in finding.seen) == (share > 0)
    assert "attention" not in finding.seen


def test_this_cpu_has_rates(monkeypatch):
    monkeypatch.setattr(ranks, "probe_cards", None)  # a CPU asks no card's driver
    rates, loaded = ranks.device_rates(16, 64)
    assert {name: rate > 0 for name, rate in rates.items()} == {"products": True, "copy": True}
    assert [one.verdict for one in measured.judge_rates([(rates, loaded)], "")] == ["ok", "ok"]


RATES = {"products": 700e12, "copy": 3.0e12}
CARD = RATES, with_cards({}, {})
CASE, WORK = "train 1.3 B", measured._work(expected()["trained"]["train 1.3 B"])
GOOD = {"ours": 57_500.0, "fsdp2": 55_000.0, "plain": 56_000.0}


def rates(**changes):
    return measured.judge_rates([CARD, (RATES | changes, with_cards({}, {}))], H100)


def training(**changes):
    return [measured.judge_training(CASE, WORK, GOOD | changes, H100)]


HOT = with_cards({}, {"clocks_event_reasons.active": 0x40})
WRONG = [
    (rates(products=400e12), "products", "400.0 TFLOP/s, card 1 of 2"),
    (rates(copy=1e12), "copy", "1,000.0 GB/s"),
    (measured.judge_rates([(RATES, HOT)], H100), "throttled under load", "card 1: 64"),
    ([measured.judge_wire([{"all-gather": 5e9}, {"all-gather": 90e9}], on_gpus=True)], "wire", "all-gather 5.00 GB/s"),
    (training(fsdp2=60_000.0), CASE, "0.96 of fsdp2"),
    (training(ours=46_000.0, fsdp2=44_000.0, plain=45_000.0), CASE, "MFU 4"),
]


@pytest.mark.parametrize(("findings", "check", "seen"), WRONG)
def test_what_is_slow_is_named(findings, check, seen):
    (wrong,) = [one for one in findings if one.verdict != "ok"]
    assert (wrong.check, wrong.verdict) == (check, "slow")
    assert seen in wrong.seen
    assert wrong.fix


def test_a_sound_card_is_ok():
    findings = [*rates(), *training()]
    findings.append(measured.judge_wire([{"all-gather": 90e9}] * 2, on_gpus=True))
    assert {one.verdict for one in findings} == {"ok"}
    small = measured.judge_training(CASE, fitted(WORK, 20e9), {side: rate / 9 for side, rate in GOOD.items()}, "T4")
    assert (small.verdict, small.expected) == ("ok", "0.97 of the best")  # its peak is not known
    assert small.seen.endswith("; all that fits: 1 sequence(s), 12 layers")
    assert "MFU 50%: " in findings[-2].expected
    unknown = measured.judge_rates([CARD], "NVIDIA B200")
    assert {one.expected for one in unknown[:2]} == {"no figure is known here"}
    assert measured.judge_wire([{"all-gather": 1.0}], on_gpus=True).verdict == "does not apply"


ANSWERS = {
    "sums_off": {"sum of float16": 0.5}, "wire_rates": {"all-gather": 90e9}, "device_rates": CARD,
    "waits": {"waits in two steps": 0.0}, "blocks_off": {"SwiGLU the input": 0.1},
}  # fmt: skip


def _call(function, *args, deadline_s):
    inspect.signature(function).bind(*args)
    assert 0 < deadline_s <= 240
    return [(GOOD[args[1]], args[0]) if function is ranks.train_rate else ANSWERS[function.__name__]] * 8


def test_all_cards_of_a_machine_are_measured(monkeypatch):
    pool = mock.MagicMock(call=_call)
    pool.__enter__.return_value = pool
    monkeypatch.setattr(measured, "RankPool", lambda size, device, *, stacks: pool)
    with ExitStack() as stack:
        examined = measured.checks({"cards": [H100] * 8}, stack).items()
        findings = {one.check: one for _, (check, limit_s) in examined if check for one in check(limit_s)}
    assert [check for check, one in findings.items() if one.verdict != "ok"] == ["train 124 M"]
    assert {"host waits", "compiled blocks", "collectives", "wire", "copy", "train 1.3 B"} <= {*findings}
    assert [name for name, (check, _) in examined if check is None] == ["train 3 M"]


def test_a_step_that_waits_leaves_torch_as_it_was(monkeypatch):
    modes = []

    def step():
        if modes:
            raise RuntimeError("called a synchronizing CUDA operation")
        return torch.zeros(())

    monkeypatch.setattr(ranks, "make_step", lambda *_: step)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with pytest.raises(RuntimeError, match="synchronizing"):
        ranks.waits()
    assert modes == ["error", "default"]
