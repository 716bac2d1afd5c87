"""Jobs that overflow requeue, redo, skip, set aside or give up as configured, in the same order on any ranks; overflows
whose batches are tried again leave no trace but their order.
"""

import json
import math
import random
import re
from pathlib import Path
from unittest import mock

import pytest
from safetensors.torch import load_file, save_file

from megamix.base.console import COLUMNS
from megamix.checkpoint.folder import checkpoints
from megamix.log.overflows import GaveUpError
from megamix.mixed_precision.engine import ShardedEngine
from megamix.train import job
from megamix.train.batch_plan import Attempt, BatchPlan
from tests.builders import run_on_ranks, tiny_job
from tests.checkpoint.seal import edit
from tests.conftest import FULL
from tests.train.recorded import run_recorded

AT_8 = {"loss_scale": {"init_scale": 2.0**8}}
FLOOR = {"loss_scale": {"init_scale": 2.0**8, "min_scale": 2.0**6}}


def _job(folder, data, precision, **training):
    own = {"eval_interval": 0, "global_batch_size": 4, "micro_batch_size": 1}
    layer = {"lr_schedule": {"decay_style": "constant"}, "metrics": {"log_interval": 1000}}
    return tiny_job(folder, layer, tokens=data, precision=precision, training=own | training)


def _run(config, bad=frozenset()):
    """Return the run's record, and its weights as bytes."""
    return run_recorded(config, bad), (Path(config.checkpoint.folder) / "weights.safetensors").read_bytes()


def test_the_search_for_the_first_scale_is_one_line_and_later_overflows_are_told(tmp_path, data, capsys):
    record = run_recorded(_job(tmp_path, data, {"loss_scale": {"init_scale": 2.0**24}}, steps=6), frozenset([16]))
    tries = len(record.attempts) - 7
    assert tries > 3
    assert sorted(record.samples()) == list(range(24))  # each is applied once
    lines = capsys.readouterr().out.splitlines()
    (at,) = (number for number, line in enumerate(lines) if line.startswith("loss scale"))
    assert lines[at] == f"loss scale: 2^24 -> 2^{24 - tries} in {tries} tries, nothing lost"
    assert lines[at + 1].startswith("step 1/6 | loss ")
    assert len([line for line in lines if "| overflow at scale" in line]) == 1
    assert not (tmp_path / "run/set_aside.jsonl").exists()
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["optim/loss_scale"] for row in rows[:tries]] == [2.0 ** (24 - number) for number in range(tries)]


def test_the_same_overflows_give_the_same_order_on_any_number_of_ranks(run_ranks, tmp_path, data):
    bad = frozenset(random.Random(0).sample(range(15), 5))
    orders = []
    for ranks in (1, 2, 4):
        config = _job(tmp_path / str(ranks), data, AT_8, steps=10, eval_interval=4)
        records = run_ranks(run_recorded, ranks, config, bad)
        orders += [(record.attempts, record.applied) for record in records]
    assert all(order == orders[0] for order in orders)
    assert sorted(records[0].samples()) == list(range(40))


def test_a_redone_overflow_leaves_no_trace_and_a_requeued_one_only_its_order(tmp_path, data):
    static = {"loss_scale": {"rule": "static", "init_scale": 1024.0}}
    clean = _run(_job(tmp_path / "clean", data, static, steps=8))[1]
    redo = _run(_job(tmp_path / "redo", data, {**static, "on_overflow": "redo"}, steps=8), frozenset([5]))[1]
    requeue, requeued = _run(_job(tmp_path / "requeue", data, static, steps=8), frozenset([5]))
    assert redo == clean
    order = [attempt.batch.samples[0].start // 4 for attempt in requeue.applied]
    assert order == [0, 1, 2, 3, 4, 6, 5, 7]

    class InOrder(BatchPlan):
        """Plan that gives a run the batches in the order in which the other run applied them."""

        def launch(self):
            attempt = Attempt(super().launch().number, requeue.applied[self.launched - 1].batch)
            self._in_flight[-1] = attempt
            return attempt

    with mock.patch.object(job, "BatchPlan", InOrder):
        _, fed = _run(_job(tmp_path / "fed", data, static, steps=8))
    assert requeued == fed != clean


def test_a_skipped_batch_is_reported_as_lost(tmp_path, data, capsys):
    record = run_recorded(_job(tmp_path, data, AT_8 | {"on_overflow": "skip"}, steps=8), frozenset([3]))
    assert record.samples() == [sample for sample in range(36) if sample not in range(12, 16)]
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("step 4/8 | overflow at scale 2^8, nothing changed | samples 12..15 lost | overflows 1")
    assert lines[at + 1].startswith("  the loss is inf: ")
    assert max(len(line) for line in lines if line.startswith(("step", "megamix", "  "))) <= COLUMNS


def test_a_batch_that_overflows_too_often_is_named_and_the_run_goes_on(tmp_path, data):
    config = _job(tmp_path, data, {"loss_scale": {"init_scale": 2.0**10}}, steps=10)
    record = run_recorded(config, bad_samples=frozenset([13]))
    assert sorted(record.samples()) == [sample for sample in range(44) if sample not in range(12, 16)]
    (row,) = [json.loads(line) for line in (tmp_path / "run/set_aside.jsonl").read_text().splitlines()]
    assert row["samples"] == [[12, 4]]
    assert row["tries"] == 4
    assert row["loss_scale"] < 2.0**10


ON_AND_ON = range(7, 1000)
IN_A_ROW = "7 updates: {} attempts in a row overflowed "


@pytest.mark.parametrize(
    ("precision", "bad", "told"),
    [
        (FLOOR | {"max_overflows_at_floor": 4}, ON_AND_ON, IN_A_ROW.format(4) + "at the lowest loss scale"),
        (AT_8 | {"max_overflows_in_a_row": 5}, ON_AND_ON, IN_A_ROW.format(5) + "(precision.max_overflows_in_a_row)"),
        ({"dtype": "bf16", "max_overflows_at_floor": 6}, ON_AND_ON, IN_A_ROW.format(6) + "at the lowest loss scale"),
        (AT_8 | {"max_overflows_per_window": 5}, (2, 4, 7, 10, 12), "5 of the last 13 attempts overflowed"),
    ],
)
def test_a_run_that_overflows_on_and_on_gives_up_with_its_weights_saved(tmp_path, data, precision, bad, told):
    with pytest.raises(GaveUpError) as caught:
        run_recorded(_job(tmp_path, data, precision, steps=50), frozenset(bad))
    assert told in str(caught.value)
    assert (tmp_path / "run/gave_up.txt").read_text() == f"{caught.value}\n"
    if "(precision" in told:
        _, want = _run(_job(tmp_path / "short", data, precision, steps=7))
        assert (tmp_path / "run/weights.safetensors").read_bytes() == want


def test_a_run_whose_weights_are_not_finite_does_not_say_that_they_are(tmp_path, data):
    precision = AT_8 | {"max_overflows_in_a_row": 3}
    run_recorded(_job(tmp_path, data, precision, steps=2))
    (saved,) = checkpoints(tmp_path / "run/checkpoints")
    file = saved / "rank_00000.safetensors"
    state = load_file(file)
    next(value for name, value in state.items() if name.startswith("norm.weight|master|")).view(-1)[0] = math.nan
    save_file(state, file)
    edit(saved, lambda fields: None)
    with pytest.raises(GaveUpError) as caught:
        run_recorded(_job(tmp_path, data, precision, steps=4))
    assert "nothing that overflowed is in them" not in str(caught.value)
    assert "weights that are not finite: norm.weight" in str(caught.value)


@pytest.mark.parametrize("seed", range(20 if FULL else 2))
def test_the_report_names_the_parameter_that_overflowed_and_no_other(tmp_path, data, seed):
    rng = random.Random(seed)
    config = _job(tmp_path, data, FLOOR | {"max_overflows_at_floor": 3, "max_retries": 9}, steps=50)
    first, value, fault = rng.randrange(6), *rng.choice([(math.inf, "inf"), (-math.inf, "inf"), (math.nan, "NaN")])
    backward, injected = ShardedEngine.backward, []

    def poisoned(engine, loss, weight):
        if not injected:
            injected.append(rng.choice(engine.plan.param_names))
            param = engine.module.get_parameter(injected[0])
            place = rng.randrange(param.numel())

            def poison(grad):
                grad = grad.clone()
                grad.view(-1)[place] += value if engine.skipped_steps + engine.applied_updates >= first else 0
                return grad

            param.register_hook(poison)
        backward(engine, loss, weight)

    with mock.patch.object(ShardedEngine, "backward", poisoned), pytest.raises(GaveUpError) as caught:
        run_recorded(config)
    report = str(caught.value)
    named = re.findall(r"^  (\S+): (\S+) in (\d+) of (\d+)$", report, re.MULTILINE)
    assert [(name, kind) for name, kind, *_ in named] == [(injected[0], fault)]
    assert named[0][2] == named[0][3]  # in every overflow
    assert f"  {injected[0]}: {fault} on rank 0, micro-batch" in report


def test_dropout_depends_on_sample_and_try_and_not_on_ranks(run_ranks, tmp_path, data):
    losses = []
    for ranks in (1, 2):
        config = _job(tmp_path / str(ranks), data, {"dtype": "fp32"}, steps=3, micro_batch_size=2)
        config = config.with_keys(model={"dropout": 0.3})
        losses.append(run_on_ranks(config) if ranks == 1 else run_ranks(run_on_ranks, ranks, config)[0])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
