"""`megamix.Checkpoints`: a program gets back the progress that it saved; progress that JSON would change is refused on
all ranks before a byte is written. A failed save raises, one beside training in the next call. A folder without
checkpoints begins a run; one with only damaged checkpoints, or with a newer checkpoint that was not loaded, is refused.
"""

import math
from pathlib import Path

import pytest

from megamix import Checkpoints
from megamix.checkpoint.folder import Files
from megamix.checkpoint.manifest import DamagedCheckpoint
from megamix.hf.source import open_source
from tests.checkpoint.state import differences, fill, fp16_engine


def _at(step, folder):
    engine = fp16_engine()
    fill(engine, step)
    return Checkpoints(engine, folder)


@pytest.mark.parametrize("beside", [False, True])
def test_a_program_gets_back_what_it_saved(beside, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    saving = _at(3, Path("not/there/yet"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")  # the folder is the one that was meant when the object was made
    assert saving.load() is None
    progress = {"place": [7, "north \u20ac"], "numbers": [1e308, 5e-324, -0.0, True, None]}
    saving.save(progress, beside=beside)
    saving.wait()
    engine = fp16_engine()
    assert Checkpoints(engine, tmp_path / "not/there/yet").load() == progress
    assert differences(engine, 3) == []


def test_a_save_that_fails_is_raised_once_and_the_next_one_may_succeed(monkeypatch, tmp_path):
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


def test_two_objects_of_one_folder_wait_for_each_other_s_saves(tmp_path):
    two = _at(3, tmp_path), _at(3, tmp_path)
    for number in range(6):
        two[number % 2].save({"number": number}, beside=True)
        assert two[1 - number % 2].load() == {"number": number}
    for checkpoints in two:
        checkpoints.wait()


def test_damaged_checkpoints_are_no_beginning(tmp_path):
    checkpoints = _at(3, tmp_path / "run")
    checkpoints.save({"step": 3})
    (file,) = tmp_path.glob("run/*/rank_*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match=r"run has no good checkpoint left; give another folder"):
        checkpoints.load()


@pytest.mark.parametrize(
    ("progress", "message"),
    [
        ({"best": math.inf}, "progress.best: JSON does not give inf back; write plain JSON, and None for inf and nan"),
        ({"seen": {"dict": [1, math.nan]}}, r"progress.seen: JSON does not give {'dict': \[1, nan\]} back"),
        ({"a": {1: 2}}, "progress.a: JSON does not give {1: 2} back; write plain JSON"),
        ({"a": (1, 2)}, r"progress.a: JSON does not give \(1, 2\) back; write plain JSON"),
    ],
    ids=["inf", "nan within", "key", "tuple"],
)
def test_what_a_load_would_not_give_back_is_not_saved(progress, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        _at(3, tmp_path / "run").save(progress)
    assert not (tmp_path / "run").exists()


def test_a_newer_checkpoint_that_was_not_loaded_stops_a_save(tmp_path):
    _at(5, tmp_path).save({"old": 5})
    forgot = _at(2, tmp_path)
    with pytest.raises(ValueError, match=r"has a checkpoint of 5 updates, this engine has made 2; call load\(\) first"):
        forgot.save({"new": 2}, beside=True)
    assert forgot.load() == {"old": 5}
    later = _at(6, tmp_path)
    later.save({"new": 6})
    fill(later._engine, 1)
    later.save({"back": 1})  # its own checkpoints are no obstacle


def _told(folder):
    engine = fp16_engine()
    rank = engine.topology.world.rank
    fill(engine, 2)
    told = []
    checkpoints = Checkpoints(engine, folder)
    for progress in ({"seen": math.nan if rank else 1}, {"seen": rank}, {"a": 1, "b": 2} if rank else {"b": 2, "a": 1}):
        try:
            checkpoints.save(progress)
            told.append(str(checkpoints.load()))
        except ValueError as error:
            told.append(str(error))
    fill(engine, 1)
    try:
        Checkpoints(engine, folder).save({})
    except ValueError as error:
        told.append(str(error).removeprefix(str(folder)))
    return told


def test_all_ranks_learn_alike_that_a_save_is_refused(run_ranks, tmp_path):
    for told in run_ranks(_told, 2, tmp_path / "run"):
        assert told == [
            "progress.seen: JSON does not give nan back; write plain JSON, and None for inf and nan",
            "progress is not the same on every rank; give every rank the same, for one copy is saved",
            "{'b': 2, 'a': 1}",
            " has a checkpoint of 2 updates, this engine has made 1; call load() first, or give another folder",
        ]


def _save_alone(folder, call):
    checkpoints = Checkpoints(fp16_engine(), folder, timeout_s=0.3)
    if checkpoints._all_or_none.rank:
        return ""
    with pytest.raises(RuntimeError) as told:
        checkpoints.save({}) if call == "save" else checkpoints.load()
    return told.value.__notes__[0]


@pytest.mark.parametrize("call", ["save", "load"])
def test_a_rank_that_calls_alone_is_told_that_every_rank_must(run_ranks, call, tmp_path):
    told = run_ranks(_save_alone, 2, tmp_path, call)[0]
    assert told == f"in Checkpoints.{call}(): every rank must call it, so take it out of any `if rank == 0:`"


def test_what_wants_a_model_says_that_the_library_s_checkpoint_has_none(tmp_path):
    engine = fp16_engine()
    Checkpoints(engine, tmp_path / "mine").save({})
    with pytest.raises(ValueError, match=r"is a checkpoint of the library, without \[model\]; `megamix checkpoint"):
        open_source(tmp_path / "mine")
