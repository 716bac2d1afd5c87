"""A log line's rates and shares are those of its interval, without validation; the progress bar appears only on a
terminal.
"""

import builtins
import os
import subprocess
import sys

import pytest
import torch

from megamix import clock as clock_module
from megamix.clock import Clock
from megamix.mixed_precision.step import Recorded, StepResult
from megamix.report import interval_report as report_module
from megamix.report.interval_report import IntervalReport, Outcome, Readout, peak_memory_gib
from megamix.supervise.console import Console

CPU = torch.device("cpu")
NOTHING = Recorded((), torch.zeros(0, 2), torch.zeros((), dtype=torch.float64))
OUTCOME = Outcome(
    5.0,
    False,
    1.0,
    loss_scale=8.0,
    lr=0.1,
    stop_requested=0,
    by_piece=torch.zeros(2, 1),
    recorded=NOTHING,
    tallied={},
    peak_rows=torch.zeros(2, 0),
)


@pytest.fixture
def now(monkeypatch):
    """Return a clock in seconds that the test moves by hand."""
    time = {"s": 100.0}
    for module in (clock_module, report_module):
        monkeypatch.setattr(module.time, "perf_counter", lambda: time["s"])
    return time


def _spend(clock, now, name, seconds):
    with clock.span(name):
        now["s"] += seconds


def test_rates_and_shares_of_an_interval(now):
    clock = Clock(CPU)
    report = IntervalReport(clock, lambda update: 100 * (10 - update), mfu_per_token_rate=0.001)
    for name, seconds in (("data", 0.5), ("forward_backward", 6.0), ("exposed_reduce_scatter", 1.0), ("update", 2.0)):
        _spend(clock, now, name, seconds)
    now["s"] += 0.5
    for _ in range(4):
        report.launched(100)
    report.add(3.0, 100)
    report.add(1.0, 100)
    metrics = report.metrics(3, OUTCOME, 1, scaled=True, device=CPU)
    assert metrics.tokens_per_s == pytest.approx(40.0)
    assert metrics.mfu == pytest.approx(0.04)
    assert metrics.eta_s == pytest.approx(17.5)  # 7 updates of 2.5 s
    shares = (metrics.data_share, metrics.forward_backward_share, metrics.reduce_scatter_share, metrics.update_share)
    assert shares == pytest.approx((0.05, 0.6, 0.1, 0.2))
    assert metrics.all_gather_share == 0
    assert (metrics.loss, metrics.skipped_steps, metrics.loss_scale) == (2.0, 1, 8.0)
    assert report.tokens == 200  # two updates


def test_tokens_are_counted_on_where_a_run_goes_on():
    report = IntervalReport(Clock(CPU), lambda update: 0, mfu_per_token_rate=None)
    report.tokens = 250
    report.add(3.0, 100)
    assert report.tokens == 350


def test_a_validation_is_left_out_of_the_interval(now):
    clock = Clock(CPU)
    report = IntervalReport(clock, lambda update: 0, mfu_per_token_rate=None)
    _spend(clock, now, "forward_backward", 1.0)
    report.pause()
    _spend(clock, now, "exposed_all_gather", 50.0)
    report.resume()
    _spend(clock, now, "forward_backward", 1.0)
    report.launched(100)
    report.launched(100)
    report.add(1.0, 100)
    metrics = report.metrics(2, OUTCOME, 0, scaled=False, device=CPU)
    assert metrics.tokens_per_s == pytest.approx(100.0)
    assert (metrics.forward_backward_share, metrics.all_gather_share) == (1.0, 0.0)
    assert (metrics.mfu, metrics.loss_scale) == (None, None)


def test_two_lines_due_at_once_share_their_rates(now):
    report = IntervalReport(Clock(CPU), lambda update: 0, mfu_per_token_rate=None)
    for tokens in (50, 50, 150, 150):  # batches grow within the interval
        report.launched(tokens)
    now["s"] += 2.0
    lines = []
    for update in (3, 4):
        report.add(float(update), 150)
        lines.append(report.metrics(update, OUTCOME, 0, scaled=False, device=CPU))
    assert [line.tokens_per_s for line in lines] == [200.0, 200.0]
    assert [line.loss for line in lines] == [3.0, 4.0]


def test_peak_memory_counts_what_was_once_held():
    before = peak_memory_gib(CPU)
    block = torch.ones(256 * 2**20 // 4)
    del block
    assert peak_memory_gib(CPU) >= max(before, 0.25)


def test_a_slot_keeps_its_step_until_it_is_read():
    lag = 2
    readout = Readout(CPU, lag)
    live, pieces, rows = torch.zeros(()), torch.zeros(2, 3), torch.zeros(2, 2, dtype=torch.int64)
    names = (("first", "mean"), ("second", "max"), ("third", "sum"))
    for attempt in range(10):
        if attempt >= lag:
            past = float(attempt - lag)
            outcome = readout.read(attempt - lag)
            assert outcome[:5] == (past, past > 4, past, past, past)
            assert torch.equal(outcome.by_piece, torch.full((2, 3), past, dtype=torch.float64))
            assert torch.equal(outcome.peak_rows, torch.full((2, 2), past, dtype=torch.float64))
            assert outcome.recorded.names == names[: attempt - lag]
            assert outcome.recorded.num_values == past
            assert [*outcome.tallied] == [*"ab"][: attempt - lag]
            assert all(counts.tolist() == [past] * 3 for counts in outcome.tallied.values())
            assert torch.equal(outcome.recorded.table, torch.full((len(outcome.recorded.names), 2), past).double())
        live.fill_(attempt)
        pieces.fill_(attempt)
        rows.fill_(attempt)
        recorded = Recorded(names[:attempt], torch.full((min(attempt, 3), 2), float(attempt)), live.double())
        tallied = {name: torch.full((3,), float(attempt)) for name in [*"ab"][:attempt]}
        result = StepResult(live, live > 4, live, live, live, live, live, pieces, rows, recorded, tallied)
        readout.write(attempt, result)
        live.fill_(-1)  # a live tensor in the slot would show this
        pieces.fill_(-1)
        for table in (rows, recorded.table, *tallied.values()):
            table.fill_(-1)


def test_a_log_file_gets_lines_and_no_bar(capsys):
    console = Console(10, speaks=True)
    console.line("hello")
    console.advance()
    console.close()
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("hello\n", "")


def test_other_ranks_are_silent(capsys):
    console = Console(10, speaks=False)
    console.line("hello")
    console.advance()
    console.close()
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_lines_above_a_bar(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    console = Console(10, speaks=True)
    console.line("hello")
    console.begin(3)
    for _ in range(4):
        console.advance()
    console.show("loss 5.4322, 12,346 tokens/s")
    console.close()
    captured = capsys.readouterr()
    assert "hello\n" in captured.out
    assert "7/10" in captured.err
    assert ", loss 5.4322, 12,346 tokens/s]" in captured.err


def test_without_tqdm_a_terminal_gets_lines(capsys, monkeypatch):
    real_import = builtins.__import__

    def no_tqdm(name, *args, **kwargs):
        if name == "tqdm":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_tqdm)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    console = Console(10, speaks=True)
    console.line("hello")
    assert capsys.readouterr().out == "hello\n"


def test_a_console_that_nobody_can_write_to_ends_nothing(monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        console = Console(10, speaks=True)
        console.line("hello")
        console.advance()
        console.close()
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # rows that are held back go there


def test_what_stdout_never_took_does_not_change_the_exit_status():
    program = (
        "from megamix.supervise.console import drop_unwritten, say; say('hello'); drop_unwritten(); raise SystemExit(3)"
    )
    with open("/dev/full", "w") as full:
        ended = subprocess.run([sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stderr) == (3, b"")
