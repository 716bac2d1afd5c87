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


@pytest.mark.parametrize(
    ("parallelism", "model", "wrong"),
    [
        (
            {"pp_schedule": "zbv_zero_bubble", "pp_stages_per_rank": 3},
            {},
            'pp_stages_per_rank: got 3, but pp_schedule = "zbv_zero_bubble" takes 2; write pp_stages_per_rank = 2',
        ),
        (
            {"pp_schedule": "interleaved_1f1b", "pp_stages_per_rank": 1},
            {},
            'pp_stages_per_rank: got 1, but pp_schedule = "interleaved_1f1b" takes 2 or more; write '
            "pp_stages_per_rank = 2",
        ),
        (
            {"pp_schedule": "interleaved_1f1b"},
            {"num_layers": 3},
            "pp_size: got 2, these are 4 stages, but model.num_layers is 3; write pp_size = 1, or more layers",
        ),
        (
            {"pp_schedule": "interleaved_zero_bubble"},
            {"compile": True},
            'pp_schedule: got "interleaved_zero_bubble", which splits backward in two, and that of compiled blocks '
            '(model.compile = true) cannot be; write pp_schedule = "interleaved_1f1b", or compile = false',
        ),
        (
            {"shard": "parameters"},
            {},
            'shard: got "parameters", but a pipeline would gather each stage twice for every '
            'micro-batch; write shard = "gradients", or pp_size = 1',
        ),
        (
            {"accumulate": "owner"},
            {},
            'accumulate: got "owner", but a pipeline\'s stages have several micro-batches under way at a time; '
            'write accumulate = "local", or pp_size = 1',
        ),
    ],
)
def test_what_a_schedule_cannot_run_is_refused(parallelism, model, wrong):
    assert problems_of(_tree({"pp_size": 2} | parallelism, model)) == (f"parallelism.{wrong}",)
    config_from_dict(_tree({}, model))  # without a pipeline nothing of it matters


def test_micro_batches_must_suit_the_schedule_and_ranks():
    config = config_from_dict(_tree({"pp_size": 4}))
    assert check_world_size(config, 8) == []
    assert check_world_size(config, 16) == [
        'training.global_batch_size: got 16, which is 2 micro-batches a step, but pp_schedule = "1f1b" needs at least '
        "pp_size 4; write global_batch_size = 32"
    ]
    odd = _tree({"pp_size": 2, "dp_size": 1, "pp_schedule": "interleaved_1f1b"}, global_batch_size=10)
    assert check_world_size(config_from_dict(odd), 2) == [
        'training.global_batch_size: got 10, which is 5 micro-batches a step, but pp_schedule = "interleaved_1f1b" '
        "runs them in 2 equal rounds (count / pp_size, rounded down); write global_batch_size = 8"
    ]
    config_from_dict(_tree({"pp_size": 2, "dp_size": 1, "pp_schedule": "zbv_zero_bubble"}, global_batch_size=10))


def test_an_older_torch_is_told_which_one_splits_backward(monkeypatch):
    """Only where ranks are about to start: a run's file still loads there."""
    for pp_schedule, problems in (
        ("interleaved_1f1b", []),
        (
            "zbv_zero_bubble",
            [
                'parallelism.pp_schedule: got "zbv_zero_bubble", which splits backward in two, and torch 2.11 cannot '
                'split that of our operations; install torch >= 2.13, or write pp_schedule = "interleaved_1f1b"'
            ],
        ),
    ):
        config = config_from_dict(_tree({"pp_size": 2, "pp_schedule": pp_schedule}))
        for version in ((2, 13), (3, 0)):
            monkeypatch.setattr(mesh_checks, "torch_version", lambda version=version: version)
            assert check_world_size(config, 2) == []
        monkeypatch.setattr(mesh_checks, "torch_version", lambda: (2, 11))
        assert check_world_size(config, 2) == problems
