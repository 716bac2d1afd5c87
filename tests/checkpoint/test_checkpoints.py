"""`megamix.Checkpoints`: what a program saves it gets back; a save that fails is raised, of one beside training by the
next call; a folder without checkpoints is a beginning, one with damaged ones alone is not.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megamix import Checkpoints
from megamix.checkpoint.folder import Files
from megamix.checkpoint.manifest import DamagedCheckpoint
from tests.checkpoint.state import differences, fill, make_engine


def _at(step: int, folder: Path) -> Checkpoints:
    engine = make_engine()
    fill(engine, step)
    return Checkpoints(engine, folder)


@pytest.mark.parametrize("beside", [False, True])
def test_a_program_gets_back_what_it_saved(beside: bool, tmp_path: Path) -> None:
    folder = tmp_path / "not/there/yet"
    saving = _at(3, folder)
    assert saving.load() is None
    saving.save({"place": [7, "north"]}, beside=beside)
    saving.wait()
    engine = make_engine()
    assert Checkpoints(engine, folder).load() == {"place": [7, "north"]}
    assert differences(engine, 3) == []


def test_a_save_that_fails_is_raised_once_and_the_next_one_may_succeed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checkpoints = _at(3, tmp_path)
    monkeypatch.setattr(Files, "free_space", lambda *_: 0)
    with pytest.raises(OSError, match=r"0 MiB are free"):
        checkpoints.save({})
    checkpoints.save({}, beside=True)
    with pytest.raises(OSError, match=r"0 MiB are free"):
        checkpoints.load()
    assert checkpoints.load() is None
    monkeypatch.undo()
    checkpoints.save({"step": 3})
    assert checkpoints.load() == {"step": 3}


def test_damaged_checkpoints_are_no_beginning(tmp_path: Path) -> None:
    checkpoints = _at(3, tmp_path / "run")
    checkpoints.save({"step": 3})
    (file,) = tmp_path.glob("run/*/rank_*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match=r"run has no good checkpoint left; give another folder"):
        checkpoints.load()
