"""Whoever configures a pipeline: a pipeline schedule's demands on stages, layers and micro-batches are checked with the
configuration; errors name field, value and fix.
"""

import pytest

from megamix.config import check_world_size, config_from_dict, mesh_checks
from tests.config.test_errors import changed, problems_of

SIZES = {"num_layers": 8}
BATCH = {"micro_batch_size": 2, "global_batch_size": 16}


def _tree(parallelism, model=None, **training):
    return changed(model=SIZES | (model or {}), parallelism=parallelism, training=BATCH | training)


WRONG = [
    ({"schedule": "zbv_zero_bubble", "stages_per_rank": 3}, {}, {}, "write stages_per_rank = 2"),
    ({"schedule": "interleaved_1f1b", "stages_per_rank": 1}, {}, {}, "takes 2 or more; write stages_per_rank = 2"),
    ({"schedule": "interleaved_1f1b"}, {}, {"num_layers": 3}, "these are 4 stages, but model.num_layers is 3"),
    ({"schedule": "interleaved_zero_bubble"}, {}, {"compile": True}, 'write schedule = "interleaved_1f1b", or compile'),
    ({}, {"shard": "parameters"}, {}, 'write shard = "gradients", or parallelism.pipeline = false'),
    ({}, {"accumulate": "owner"}, {}, 'write accumulate = "local", or parallelism.pipeline = false'),
]


@pytest.mark.parametrize(("pipeline", "beside", "model", "fix"), WRONG)
def test_what_a_schedule_cannot_run_is_refused(pipeline, beside, model, fix):
    (problem,) = problems_of(_tree({"pipeline": {"size": 2} | pipeline, **beside}, model))
    assert fix in problem
    config_from_dict(_tree({}, model))  # without a pipeline nothing of it matters


def test_micro_batches_must_suit_the_schedule_and_ranks():
    config = config_from_dict(_tree({"pipeline": {"size": 4}}))
    assert check_world_size(config, 8) == []
    assert check_world_size(config, 16) == [
        'training.global_batch_size: got 16, which is 2 micro-batches a step, but pipeline.schedule = "1f1b" needs at '
        "least pipeline.size 4; write global_batch_size = 32"
    ]
    odd = _tree({"pipeline": {"size": 2, "schedule": "interleaved_1f1b"}, "dp_size": 1}, global_batch_size=10)
    (problem,) = check_world_size(config_from_dict(odd), 2)
    assert "runs them in 2 equal rounds (count / pipeline.size, rounded down); write global_batch_size = 8" in problem
    zbv = {"pipeline": {"size": 2, "schedule": "zbv_zero_bubble"}, "dp_size": 1}
    config_from_dict(_tree(zbv, global_batch_size=10))


@pytest.mark.parametrize(("schedule", "wrong"), [("interleaved_1f1b", 0), ("zbv_zero_bubble", 1)])
def test_an_older_torch_is_told_which_one_splits_backward(monkeypatch, schedule, wrong):
    """Only where ranks are about to start: a run's file still loads there."""
    config = config_from_dict(_tree({"pipeline": {"size": 2, "schedule": schedule}}))
    for version, problems in (((2, 13), 0), ((2, 11), wrong)):
        monkeypatch.setattr(mesh_checks, "torch_version", lambda version=version: version)
        found = check_world_size(config, 2)
        assert len(found) == problems
        assert all('install torch >= 2.13, or write schedule = "interleaved_1f1b"' in one for one in found)
