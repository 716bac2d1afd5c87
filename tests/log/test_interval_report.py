"""A log line's rates and shares are those of its interval, without validation; the progress bar appears only on a
terminal.
"""

import subprocess
import sys

import pytest
import torch

from megamix.base import clock as clock_module
from megamix.base.clock import Clock
from megamix.base.console import Console
from megamix.log import interval_report as report_module
from megamix.log.interval_report import IntervalReport
from megamix.log.outcome import Outcome, Readout
from megamix.log.readout import peak_memory_gib
from megamix.mixed_precision.step import Recorded, StepResult

CPU = torch.device("cpu")
RECORDED = Recorded((), torch.zeros(0, 2), torch.zeros((), dtype=torch.float64))
OUTCOME = Outcome(5.0, False, 1.0, 8.0, 0.1, 0, torch.zeros(2, 1), torch.zeros(2, 0), RECORDED, {})


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


def _report(clock=None, updates_left=0, **settings):
    return IntervalReport(
        clock or Clock(CPU), lambda update: 100 * updates_left, **{"mfu_per_token_rate": None, **settings}
    )


def test_rates_and_shares_of_an_interval(now):
    clock = Clock(CPU)
    report = _report(clock, updates_left=7, mfu_per_token_rate=0.001)
    report.tokens = 250  # of the run so far
    for name, seconds in (("data", 0.5), ("forward_backward", 6.0), ("exposed_reduce_scatter", 1.0), ("update", 2.0)):
        _spend(clock, now, name, seconds)
    now["s"] += 0.5
    for _ in range(4):
        report.launched(tokens=100)
    report.add(3.0, 100)
    report.add(1.0, 100)
    metrics = report.metrics(3, OUTCOME, 1, scaled=True, memory_gib=1.5)
    assert metrics.tokens_per_s == pytest.approx(40.0)
    assert metrics.mfu == pytest.approx(0.04)
    assert metrics.eta_s == pytest.approx(17.5)  # 7 updates of 2.5 s
    shares = (metrics.data_share, metrics.forward_backward_share, metrics.reduce_scatter_share, metrics.update_share)
    assert shares == pytest.approx((0.05, 0.6, 0.1, 0.2))
    assert metrics.all_gather_share == 0
    assert (metrics.loss, metrics.skipped_steps, metrics.loss_scale, metrics.memory_gib) == (2.0, 1, 8.0, 1.5)
    assert report.tokens == 450  # two updates more


def test_a_validation_is_left_out_of_the_interval(now):
    clock = Clock(CPU)
    report = _report(clock)
    _spend(clock, now, "forward_backward", 1.0)
    report.pause()
    _spend(clock, now, "exposed_all_gather", 50.0)
    report.resume()
    _spend(clock, now, "forward_backward", 1.0)
    report.launched(tokens=100)
    report.launched(tokens=100)
    report.add(1.0, 100)
    metrics = report.metrics(2, OUTCOME, 0, scaled=False, memory_gib=1.5)
    assert metrics.tokens_per_s == pytest.approx(100.0)
    assert (metrics.forward_backward_share, metrics.all_gather_share) == (1.0, 0.0)
    assert (metrics.mfu, metrics.loss_scale) == (None, None)


def test_two_lines_due_at_once_share_their_rates(now):
    report = _report()
    for tokens in (50, 50, 150, 150):  # batches grow within the interval
        report.launched(tokens=tokens)
    now["s"] += 2.0
    for update in (3, 4):
        report.add(float(update), 150)
        line = report.metrics(update, OUTCOME, 0, scaled=False, memory_gib=1.5)
        assert (line.tokens_per_s, line.loss) == (200.0, update)


def test_peak_memory_counts_what_was_once_held():
    before = peak_memory_gib(CPU)
    block = torch.ones(256 * 2**20 // 4)
    del block
    assert peak_memory_gib(CPU) >= max(before, 0.25)


def test_a_readout_keeps_each_step_until_it_is_read():
    lag, readout = 2, Readout(CPU)
    live, pieces, rows = torch.zeros(()), torch.zeros(2, 3), torch.zeros(2, 2, dtype=torch.int64)
    names = (("first", "mean"), ("second", "max"), ("third", "sum"))
    for attempt in range(10):
        if attempt >= lag:
            past = attempt - lag
            outcome = readout.read(past)
            assert outcome[:5] == (past, past > 4, past, past, past)
            assert outcome.recorded.names == names[:past]
            assert outcome.recorded.num_values == past
            assert [*outcome.tallied] == [*"ab"][:past]
            tables = outcome.by_piece, outcome.peak_rows, outcome.recorded.table, *outcome.tallied.values()
            assert all((table == past).all() for table in tables)
        for tensor in (live, pieces, rows):
            tensor.fill_(attempt)
        recorded = Recorded(names[:attempt], torch.full((min(attempt, 3), 2), float(attempt)), live.double())
        tallied = {name: torch.full((3,), float(attempt)) for name in [*"ab"][:attempt]}
        result = StepResult(live, live > 4, live, live, live, live, live, pieces, rows, recorded, tallied)
        readout.write(attempt, result)
        for table in (live, pieces, rows, recorded.table, *tallied.values()):
            table.fill_(-1)  # a live tensor in the readout would show this


@pytest.mark.parametrize(("speaks", "told"), [(True, "hello\n"), (False, "")])
def test_a_log_file_gets_lines_and_no_bar_and_nothing_of_other_ranks(capsys, speaks, told):
    console = Console(10, speaks=speaks)
    console.line("hello")
    console.advance()
    console.close()
    assert capsys.readouterr() == (told, "")


@pytest.mark.parametrize("tqdm", [True, False])
def test_a_terminal_gets_lines_above_a_bar_if_there_is_tqdm(capsys, monkeypatch, tqdm):
    if not tqdm:
        monkeypatch.setitem(sys.modules, "tqdm", None)
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
    assert ("7/10" in captured.err) is tqdm
    assert (", loss 5.4322, 12,346 tokens/s]" in captured.err) is tqdm


def test_a_log_on_a_full_disk_ends_nothing_and_does_not_change_the_exit_status():
    program = (
        "from megamix.base.console import Console, drop_unwritten; console = Console(10, speaks=True); "
        "console.line('hello'); console.advance(); console.close(); drop_unwritten(); raise SystemExit(3)"
    )
    with open("/dev/full", "w") as full:
        ended = subprocess.run([sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE)
    assert (ended.returncode, ended.stderr) == (3, b"")
