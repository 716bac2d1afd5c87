"""A run can be as long as a number of tokens: it takes as many updates as reach them, through its ramp, and its
learning rate follows tokens. The file that the run keeps says the same.
"""

import pytest

from megamix.config import ConfigError, config_from_dict, load_config
from megamix.config.unread import without
from tests.builders import lrs_of
from tests.config.test_errors import GOOD

RAMP = {"batch_ramp": [[0, 4], [3, 8], [5, 16]]}  # of 8 tokens a sequence: 32, 64 and 128 an update


def _config(training, **schedule):
    tree = without(GOOD, ["training", "steps"])
    min_lr = 0.0 if schedule.get("decay_style") == "constant" else 1e-4
    return config_from_dict(tree, {"training": training, "lr_schedule": schedule, "optimizer": {"min_lr": min_lr}})


@pytest.mark.parametrize(
    ("tokens", "steps"), [(1, 1), (32, 1), (33, 2), (97, 4), (160, 4), (224, 5), (225, 6), (1000, 12)]
)
def test_a_run_takes_as_many_updates_as_reach_its_tokens(tokens, steps):
    config = _config({"tokens": tokens, **RAMP})
    assert config.training.steps == steps
    assert config.pace.tokens(steps - 1) < tokens <= config.pace.tokens(steps)


@pytest.mark.parametrize("style", ["cosine", "linear", "wsd", "inverse_sqrt", "constant"])
def test_without_a_ramp_the_rates_are_those_by_updates(style):
    decay = {} if style in ("inverse_sqrt", "constant") else {"decay": 30}
    lengths = {"warmup": 10, **decay}
    by_tokens = _config(
        {"tokens": 128 * 50}, decay_style=style, **{f"{key}_tokens": 128 * it for key, it in lengths.items()}
    )
    by_updates = _config({"steps": 50}, decay_style=style, **{f"{key}_steps": it for key, it in lengths.items()})
    assert lrs_of(by_tokens) == pytest.approx(lrs_of(by_updates), rel=1e-12)


def test_with_a_ramp_the_rates_follow_tokens():
    config = _config({"tokens": 480, **RAMP}, decay_style="linear", warmup_tokens=96)
    # Tokens in front of each update: 0, 32, 64, 96, 160, 224, 352 of 480.
    factors = [1 / 3, 2 / 3, 1, 1, 1 - 64 / 384, 1 - 128 / 384, 1 - 256 / 384]
    assert lrs_of(config) == pytest.approx(
        [1e-3 * factor if n < 3 else 1e-4 + 9e-4 * factor for n, factor in enumerate(factors)]
    )


def test_a_run_s_file_says_tokens_and_loads_as_the_same(tmp_path):
    config = _config({"tokens": 480, **RAMP}, warmup_tokens=96)
    (tmp_path / "job.toml").write_text(text := config.text)
    assert "tokens = 480" in text
    assert "\nsteps" not in text
    assert load_config(tmp_path / "job.toml") == config
    longer = load_config(tmp_path / "job.toml", ["training.tokens=481"])
    assert longer.training.steps == config.training.steps + 1


@pytest.mark.parametrize(
    ("training", "schedule", "told"),
    [
        ({}, {}, "training.steps: missing; write for example steps = 1000"),
        ({"tokens": 100}, {"decay_style": "wsd"}, "needs the length of its final decay; write decay_tokens = 20"),
    ],
)
def test_lengths_that_do_not_go_together_are_refused(training, schedule, told):
    with pytest.raises(ConfigError, match=f": 1 problem\n.*{told}"):
        _config(training, **schedule)
