"""Checkpoints of every keep_every-th update are saved and stay, beside the newest, over stops and damage; the log says
so, and they change no bit of the run.
"""

import os
import signal

import pytest

from megamix.checkpoint.folder import applied_updates, checkpoints
from megamix.run.resume_rules import outlook
from megamix.run.run_folder import checkpoint_words
from megamix.supervise.status import PreemptedError
from tests.builders import run_on_ranks, tiny_job
from tests.train.outcome import differences, end_of
from tests.train.recorded import Record, attempts_recorded

WORDS = "checkpoints: one after every 4 updates stays, 3 by update 14, beside the newest 2"


def _config(folder, data, **checkpoint):
    return tiny_job(
        folder,
        tokens=data,
        num_layers=1,
        steps=14,
        eval_interval=0,
        checkpoint={"save_interval": 5, **checkpoint},
        precision_interval=0,
    )


def _names(folder):
    return [int(path.name.removeprefix("step_")) for path in checkpoints(folder / "run/checkpoints")]


def test_they_stay_over_a_stop_and_damage_and_change_no_bit(tmp_path, data, capsys):
    config = _config(tmp_path, data, keep_every=4)

    def leave(plan):
        if plan.launched == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    with attempts_recorded(Record(), leave), pytest.raises(PreemptedError):
        run_on_ranks(config)
    told = capsys.readouterr().out
    assert WORDS in told
    newest, *_ = checkpoints(tmp_path / "run/checkpoints")
    assert 5 < applied_updates(newest) < 8
    (newest / "manifest.json").write_text("{}")
    run_on_ranks(config)
    assert "after update 5" in capsys.readouterr().out
    assert _names(tmp_path) == [14, 12, 8, 4]
    run_on_ranks(_config(tmp_path / "plain", data))
    assert differences(end_of(tmp_path), end_of(tmp_path / "plain")) == []


def test_they_are_the_only_ones_beside_the_last_where_no_other_save_is_due(tmp_path, data):
    config = _config(tmp_path, data, save_interval=0, keep_every=6, async_save=False)
    run_on_ranks(config)
    assert _names(tmp_path) == [14, 12, 6]
    assert outlook(config).endswith(f"\n  {checkpoint_words(config)}")
    assert checkpoint_words(_config(tmp_path, data)) == ""
