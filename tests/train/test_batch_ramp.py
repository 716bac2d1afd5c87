"""A ramp of the global batch in one run gives the numbers of a run that is started again with each size, on every
layout and with overflows at the border; a run that is cut beside a border goes on as if it had not stopped.
"""

import math
from typing import get_args
from unittest import mock

import pytest

from megamix.mixed_precision.step import StepProgress
from megamix.train.batch_plan import OnOverflow
from tests.builders import SEQ_LEN, run_on_ranks, tiny_job
from tests.conftest import FULL
from tests.train.outcome import differences, end_of
from tests.train.recorded import run_recorded

RAMP = [[0, 4], [4, 8]]
BEFORE, AT = 3, 5  # attempts that overflow: the last one in front of the border, and the first one behind it
INTERLEAVED = {"pipeline": {"size": 2, "schedule": "interleaved_1f1b"}}  # two stages a rank
LAYOUTS = {
    "one rank": (1, {}),
    "two ranks": (2, {"micro_batch_size": 1}),
    "four ranks": (4, {"micro_batch_size": 1}),
    "a pipeline": (2, {"pipeline": {"size": 2}}),
    "an interleaved pipeline": (2, {"parallelism": INTERLEAVED, "micro_batch_size": 1, "num_layers": 4}),
    "owners add up": (2, {"shard": "gradients", "accumulate": "owner"}),
    "parameters": (2, {"shard": "parameters", "micro_batch_size": 1}),
}
SOME = [("one rank", "redo"), ("one rank", "skip"), ("a pipeline", "requeue")]
MORE = [(layout, on_overflow) for layout in LAYOUTS for on_overflow in get_args(OnOverflow)]


def _job(folder, tokens, layout, on_overflow, training):
    own = {"dropout": 0.1, "tie_embeddings": False, "on_overflow": on_overflow, "steps": 8}
    own |= {"eval_interval": 2, "eval_batches": 1, "save_interval": 4, "max_restarts": 100, "log_interval": 1}
    own |= {"replica_check_interval": 3, "precision_interval": 3}
    return tiny_job(folder, tokens=tokens, **own | LAYOUTS[layout][1], training=training)


def _run(config, crash_at=None):
    """Run the job with its overflows, until it crashes before an attempt. Return the samples of each attempt."""
    launched, scaled = [], StepProgress.scaled

    def overflowing(progress, loss, weight, *, counts):
        bad = launched[-1] in (BEFORE, AT)
        return scaled(progress, loss * math.inf if bad else loss, weight, counts=counts)

    with mock.patch.object(StepProgress, "scaled", overflowing):  # a pipeline's losses pass here, too
        record = run_recorded(config, crash_at=crash_at, before=lambda plan: launched.append(plan.launched))
    return [[*range(part.start, part.stop)] for attempt in record.attempts for part in attempt.batch.samples]


def _runs(run_ranks, layout, legs):
    """Run the legs of a run on the ranks of a layout. Return the samples of their attempts."""
    ranks = LAYOUTS[layout][0]
    return [
        samples
        for config, crash_at in legs
        for samples in (_run(config, crash_at) if ranks == 1 else run_ranks(_run, ranks, config, crash_at)[0])
    ]


@pytest.mark.parametrize(("layout", "on_overflow"), MORE if FULL else SOME)
def test_a_ramp_is_a_run_that_is_started_again_with_each_size(run_ranks, tmp_path, data, layout, on_overflow):
    ramp = {"global_batch_size": 8, "batch_ramp": RAMP}
    whole = _job(tmp_path / "whole", data, layout, on_overflow, ramp)
    # Validation reads as many sequences in each leg: two batches of 4, or one of 8.
    small = _job(tmp_path / "legs", data, layout, on_overflow, {"global_batch_size": 4, "eval_batches": 2})
    large = _job(tmp_path / "legs", data, layout, on_overflow, {"global_batch_size": 8})
    in_one = _runs(run_ranks, layout, [(whole, None)])
    assert in_one == _runs(run_ranks, layout, [(small, AT), (large, None)])
    assert differences(end_of(tmp_path / "whole"), end_of(tmp_path / "legs")) == []
    for crash_at in (BEFORE + 1, AT, AT + 1) if FULL else (AT + 1,):
        cut = _job(tmp_path / f"cut{crash_at}", data, layout, on_overflow, ramp)
        _runs(run_ranks, layout, [(cut, crash_at), (cut, None)])
        assert differences(end_of(tmp_path / "whole"), end_of(tmp_path / f"cut{crash_at}")) == []


def test_no_checkpoint_is_saved_where_a_ramp_begins(tmp_path, data):
    ramp = {"steps": 2, "global_batch_size": 8, "batch_ramp": [[0, 4], [1, 8]]}
    run_on_ranks(tiny_job(tmp_path, tokens=data, training=ramp, keep_every=2))
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step_00000002"]


def test_a_rate_that_reads_other_tokens_than_were_trained_on_is_told(tmp_path, data, capsys):
    updates = {"training": {"eval_interval": 0}}
    by_tokens = {"tokens": 2 * 4 * SEQ_LEN, "global_batch_size": 4}
    run_on_ranks(tiny_job(tmp_path, updates, tokens=data, training=by_tokens))
    more = {"tokens": 3 * 8 * SEQ_LEN, "global_batch_size": 8}
    run_on_ranks(tiny_job(tmp_path, updates, tokens=data, training=more))
    told = f"the rate counts {2 * 8 * SEQ_LEN} tokens for the updates so far, which had {8 * SEQ_LEN}"
    assert f"training.tokens: {told}; write batch_ramp" in capsys.readouterr().out
