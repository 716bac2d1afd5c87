"""A run under signals, deaths, a full disk and damaged checkpoints, one after the other, ends as the run without
faults, and otherwise the soak reports it.
"""

import re

from tests.soak import Fight, faults_of, soak

SEED = 43  # strikes with a flipped bit, SIGINT, a death in a save and a full disk


def test_a_short_soak_passes_and_finds_what_is_wrong(tmp_path, capsys):
    wrong, _ = soak(tmp_path, steps=40, every=8, seed=SEED)
    told = capsys.readouterr().out
    assert wrong == [], told
    assert re.search(r"starts, [1-9] from memory, \d failed saves, 0 other ends than told", told)
    with (tmp_path / "fire/run/metrics.jsonl").open("a") as log:
        log.write('{"step": 40}\n')
    (tmp_path / "fire/run/checkpoints/step_00000044.partial-0").mkdir()
    wrong = faults_of(Fight([], 1, 0, 0, ["a start without end"]), tmp_path / "clean", tmp_path / "fire")
    assert [line.partition(" ")[0] for line in wrong] == ["surprise:", "metrics", "0", "left"]
