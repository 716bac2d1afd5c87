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
    ({"pp_schedule": "zbv_zero_bubble", "pp_stages_per_rank": 3}, {}, "write pp_stages_per_rank = 2"),
    ({"pp_schedule": "interleaved_1f1b", "pp_stages_per_rank": 1}, {}, "takes 2 or more; write pp_stages_per_rank = 2"),
    ({"pp_schedule": "interleaved_1f1b"}, {"num_layers": 3}, "these are 4 stages, but model.num_layers is 3"),
    ({"pp_schedule": "interleaved_zero_bubble"}, {"compile": True}, 'write pp_schedule = "interleaved_1f1b", or comp'),
    ({"shard": "parameters"}, {}, 'write shard = "gradients", or pp_size = 1'),
    ({"accumulate": "owner"}, {}, 'write accumulate = "local", or pp_size = 1'),
]


@pytest.mark.parametrize(("parallelism", "model", "fix"), WRONG)
def test_what_a_schedule_cannot_run_is_refused(parallelism, model, fix):
    (problem,) = problems_of(_tree({"pp_size": 2} | parallelism, model))
    assert fix in problem
    config_from_dict(_tree({}, model))  # without a pipeline nothing of it matters


def test_micro_batches_must_suit_the_schedule_and_ranks():
    config = config_from_dict(_tree({"pp_size": 4}))
    assert check_world_size(config, 8) == []
    assert check_world_size(config, 16) == [
        'training.global_batch_size: got 16, which is 2 micro-batches a step, but pp_schedule = "1f1b" needs at least '
        "pp_size 4; write global_batch_size = 32"
    ]
    odd = _tree({"pp_size": 2, "dp_size": 1, "pp_schedule": "interleaved_1f1b"}, global_batch_size=10)
    (problem,) = check_world_size(config_from_dict(odd), 2)
    assert "runs them in 2 equal rounds (count / pp_size, rounded down); write global_batch_size = 8" in problem
    config_from_dict(_tree({"pp_size": 2, "dp_size": 1, "pp_schedule": "zbv_zero_bubble"}, global_batch_size=10))


@pytest.mark.parametrize(("schedule", "wrong"), [("interleaved_1f1b", 0), ("zbv_zero_bubble", 1)])
def test_an_older_torch_is_told_which_one_splits_backward(monkeypatch, schedule, wrong):
    """Only where ranks are about to start: a run's file still loads there."""
    config = config_from_dict(_tree({"pp_size": 2, "pp_schedule": schedule}))
    for version, problems in (((2, 13), 0), ((2, 11), wrong)):
        monkeypatch.setattr(mesh_checks, "torch_version", lambda version=version: version)
        found = check_world_size(config, 2)
        assert len(found) == problems
        assert all('install torch >= 2.13, or write pp_schedule = "interleaved_1f1b"' in one for one in found)
