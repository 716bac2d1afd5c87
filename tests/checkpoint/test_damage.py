"""Whoever has a disk that rots, or copies half a folder: a changed bit, and a short, missing or foreign file, are
refused with the file's name on every rank, and the older checkpoint is loaded. Links to other disks are followed.
`megamix checkpoint ls` and `verify` distinguish complete, damaged and unfinished checkpoints; a stray file does not
stop them.
"""

import errno
import logging
import os
import random
import re
import shutil
from unittest import mock

import pytest
import torch

from megamix.checkpoint.folder import Files, checkpoints
from megamix.checkpoint.load import load_or_older, newest_checkpoint
from megamix.checkpoint.save import remove_old
from megamix.checkpoint.snapshot import owned_parts
from megamix.checkpoint.verify import verify_checkpoint
from megamix.cli.verbs import main
from megamix.train.check import folder_problems
from tests.builders import tiny_job
from tests.checkpoint.faults import listing
from tests.checkpoint.seal import edit
from tests.checkpoint.state import alone, differences, fill, fp16_engine, resume, save_steps
from tests.conftest import FULL

FLIPS, TRUNCATIONS = (200, 50) if FULL else (30, 9)
OLDER, NEWER = "step_00000001", "step_00000002"
FILES = ("manifest.json", "rank_00000.safetensors", "rank_00001.safetensors")


@pytest.fixture(scope="module")
def ready(run_ranks, tmp_path_factory):
    """Save two checkpoints of two ranks."""
    folder = tmp_path_factory.mktemp("ready") / "checkpoints"
    run_ranks(save_steps, 2, folder, [1, 2])
    return folder


@pytest.fixture(scope="module")
def engine():
    return fp16_engine()


@pytest.fixture
def refused(ready, engine, tmp_path, caplog):
    """`refused(hurt, named)` damages the newer checkpoint of a copy: it is refused in one line that names the file, and
    the older one loads.
    """

    def refused(hurt, named):
        folder = tmp_path / "copy"
        shutil.copytree(ready, folder)
        hurt(folder / NEWER)
        caplog.clear()
        fill(engine, 5)
        with caplog.at_level(logging.WARNING, logger="megamix"):
            assert _newest_loads_as(folder, engine) == OLDER
        assert differences(engine, 1) == []
        (line,) = caplog.messages
        assert named in line
        kept, aside = listing(folder)
        assert (kept, aside.partition("-")[0]) == (OLDER, f"{NEWER}.damaged")
        shutil.rmtree(folder)

    return refused


def _flip(path, bit):
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def _flip_late(path):
    _flip(path, 8 * path.stat().st_size - 1000)


def test_one_wrong_bit_anywhere_is_found(ready, refused):
    rng = random.Random(0)
    for number in range(FLIPS):
        name = FILES[number % len(FILES)]
        bit = rng.randrange(8 * (ready / NEWER / name).stat().st_size)
        refused(lambda path, name=name, bit=bit: _flip(path / name, bit), name)


def test_a_file_that_ends_early_is_found(ready, refused):
    rng = random.Random(1)
    for number in range(TRUNCATIONS):
        name = FILES[number % len(FILES)]
        size = (ready / NEWER / name).stat().st_size
        length = (0, size - 1, rng.randrange(size))[number % 3]
        refused(lambda path, name=name, length=length: os.truncate(path / name, length), name)


def _swap(path):
    one, other = (path / name for name in FILES[1:])
    one.rename(path / "aside")
    other.rename(one)
    (path / "aside").rename(other)


def _lead_out(fields):
    fields["files"][0]["name"] = f"../{OLDER}/{FILES[1]}"


@pytest.mark.parametrize(
    ("hurt", "named"),
    [
        *((lambda path, name=name: (path / name).unlink(), name) for name in FILES),
        *((lambda path, name=name: shutil.copy(path.parent / OLDER / name, path / name), name) for name in FILES[1:]),
        (_swap, FILES[1]),
        (lambda path: edit(path, lambda fields: fields["files"].pop()), "elements are there"),
        (lambda path: edit(path, _lead_out), "files.0.name"),
    ],
    ids=[*(f"{name} gone" for name in FILES), *(f"old {name}" for name in FILES[1:]), "swapped", "fewer", "led out"],
)
def test_a_missing_or_foreign_file_is_found(refused, hurt, named):
    refused(hurt, named)


def _newest_loads_as(folder, engine, hurt=lambda path: None):
    """Damage the newest checkpoint after its headers were found good. Return the name of the one that is loaded."""
    checkpoint = newest_checkpoint(folder, alone())
    hurt(checkpoint.path)
    found = load_or_older(checkpoint, engine, alone())
    return None if found is None else found.path.name


@pytest.mark.parametrize("length", [1, -1])
def test_a_file_that_is_cut_once_its_header_is_read_is_found(ready, engine, tmp_path, length, caplog):
    shutil.copytree(ready, tmp_path / "copy")

    def cut(path):
        file = path / FILES[1]
        os.truncate(file, length % file.stat().st_size)

    assert _newest_loads_as(tmp_path / "copy", engine, cut) == OLDER
    assert differences(engine, 1) == []
    assert f"{FILES[1]}: it became shorter" in caplog.text


@pytest.mark.parametrize("name", FILES)
def test_what_one_rank_finds_all_ranks_refuse(run_ranks, ready, tmp_path, name):
    for size in (2, 3):  # as many ranks as files, and one more, which verifies none
        folder = tmp_path / str(size)
        shutil.copytree(ready, folder)
        _flip_late(folder / NEWER / name)
        assert run_ranks(resume, size, folder) == [(1, [])] * size


def test_a_damaged_one_that_cannot_be_set_aside_is_passed_over(ready, engine, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(Files, "rename", mock.Mock(side_effect=OSError(errno.EROFS, os.strerror(errno.EROFS))))
    shutil.copytree(ready, tmp_path / "copy")
    assert _newest_loads_as(tmp_path / "copy", engine, lambda path: _flip_late(path / FILES[1])) == OLDER
    assert differences(engine, 1) == []
    assert "(and not set aside: [Errno 30]" in caplog.text
    assert listing(tmp_path / "copy") == [OLDER, NEWER]


def test_where_none_is_good_there_is_none_and_nothing_damaged_can_train_on(ready, engine, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(ready, folder)
    fill(engine, 5)
    half = [bucket.params.clone() for bucket in engine.buckets]
    for name in (OLDER, NEWER):
        _flip_late(folder / name / FILES[1])
    assert _newest_loads_as(folder, engine) is None
    assert all(part.tensor.isnan().all() for part in owned_parts(engine))
    assert all(map(torch.equal, (bucket.params for bucket in engine.buckets), half))
    assert (int(engine.applied_updates), float(engine.loss_scale.loss_scale)) == (5, 2.0**5)
    assert newest_checkpoint(folder, alone()) is None


def test_a_checkpoint_may_be_linked_from_another_disk(ready, tmp_path):
    """Whoever moves checkpoints, or a large file of one, to a larger disk and leaves a link."""
    shutil.copytree(ready / NEWER, tmp_path / "elsewhere")
    shutil.move(tmp_path / "elsewhere" / FILES[1], tmp_path / FILES[1])
    (tmp_path / "elsewhere" / FILES[1]).symlink_to(tmp_path / FILES[1])
    (tmp_path / "checkpoint").symlink_to(tmp_path / "elsewhere")
    assert verify_checkpoint(tmp_path / "checkpoint").manifest == verify_checkpoint(ready / NEWER).manifest


def test_a_checkpoint_that_is_linked_keeps_its_files_when_old_ones_are_removed(ready, tmp_path):
    """Whoever moves old checkpoints to an archive and leaves links."""
    archived, folder = tmp_path / "archive", tmp_path / "checkpoints"
    shutil.copytree(ready / OLDER, archived)
    folder.mkdir()
    (folder / OLDER).symlink_to(archived)
    for update in (2, 3, 4):
        shutil.copytree(ready / NEWER, folder / f"step_0000000{update}")
    remove_old(folder, 2, folder / "step_00000004", Files())
    assert sorted(path.name[-1] for path in folder.iterdir()) == ["1", "3", "4"]
    assert verify_checkpoint(archived).manifest == verify_checkpoint(ready / OLDER).manifest


@pytest.fixture
def run(ready, tmp_path):
    """Return a run with a copy of the checkpoints, to be damaged."""
    shutil.copytree(ready, tmp_path / "run/checkpoints")
    return tmp_path / "run"


def test_ls_shows_every_checkpoint_and_how_far_it_can_be_trusted(run, capsys):
    folder = run / "checkpoints"
    shutil.copytree(folder / OLDER, folder / f"{OLDER}.1")
    os.truncate(folder / f"{OLDER}.1" / FILES[1], 1000)
    shutil.copytree(folder / OLDER, folder / f"{OLDER}.damaged-0123abcd")
    shutil.copytree(folder / OLDER, folder / f"{OLDER}.damaged-4567abcd")
    (folder / f"{OLDER}.damaged-4567abcd" / FILES[0]).unlink()
    shutil.copytree(folder / OLDER, folder / "step_00000003.partial-0123abcd")
    written_s = 1_700_000_000
    os.utime(folder / NEWER / FILES[0], (written_s, written_s))
    assert main(["checkpoint", "ls", str(run)]) == 0
    printed = capsys.readouterr().out
    header, *rows = (re.split(r"  +", line) for line in printed.splitlines())
    assert header == ["checkpoint", "step", "written", "size", "layout", "state"]
    size = f"{sum(path.stat().st_size for path in (folder / NEWER).iterdir()) / 2**20:.1f} MiB"
    assert [(row[0], row[-1].partition(":")[0]) for row in rows] == [
        (OLDER, "complete"),
        (f"{OLDER}.1", "damaged"),
        (NEWER, "complete"),
        (f"{OLDER}.damaged-0123abcd", "whole, set aside"),
        (f"{OLDER}.damaged-4567abcd", "damaged, set aside"),
        ("step_00000003.partial-0123abcd", "unfinished"),
    ]
    assert f"{FILES[1]}: 1000 bytes" in rows[1][-1]
    name, step, written, *rest = rows[2]
    assert (name, step, rest) == (NEWER, "2", [size, "dp 2", "complete"])
    assert re.fullmatch(r"2023-11-1[45] \d\d:\d\d:\d\d", written)
    assert main(["checkpoint", "ls", str(folder)]) == 0
    assert capsys.readouterr().out == printed


STRAYS = ("step_00000003", f"{OLDER}.damaged-x", "step_7.partial-x", "notes.txt")


def test_a_file_that_bears_a_checkpoint_s_name_stops_nothing_and_stays(run, run_ranks, tmp_path, capsys):
    folder = run / "checkpoints"
    assert main(["checkpoint", "ls", str(run)]) == 0
    printed = capsys.readouterr().out
    for name in STRAYS:
        (folder / name).write_text("somebody's")
    (folder / "step_00000009").symlink_to("nowhere")
    assert main(["checkpoint", "ls", str(run)]) == 0
    assert capsys.readouterr().out == printed
    run_ranks(save_steps, 2, folder, [3])
    assert [path.name for path in checkpoints(folder)] == ["step_00000003.1", NEWER]
    assert main(["checkpoint", "verify", str(run)]) == 0
    assert {(folder / name).read_text() for name in STRAYS} == {"somebody's"}
    config = tiny_job(tmp_path, checkpoint={"folder": str(tmp_path / "begins")})
    (tmp_path / "begins/checkpoints").mkdir(parents=True)
    for name in STRAYS:
        (tmp_path / "begins/checkpoints" / name).touch()
    assert folder_problems(config) == []


def test_verify_reads_every_byte_of_all_or_of_one(run, capsys):
    assert main(["checkpoint", "verify", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in lines] == [NEWER, OLDER]
    assert "good; 2 files" in lines[0]
    assert "24 parameters, each with master, exp_avg, exp_avg_sq" in lines[0]
    assert main(["checkpoint", "verify", str(run / "checkpoints" / OLDER)]) == 0
    assert capsys.readouterr().out == lines[1] + "\n"


@pytest.mark.parametrize("name", FILES[:2])
def test_verify_names_the_damaged_file_and_fails(run, capsys, name):
    hurt = run / "checkpoints" / NEWER
    _flip(hurt / name, 8 * (hurt / name).stat().st_size - 8)
    for path, good in ((run, [OLDER]), (hurt, [])):
        assert main(["checkpoint", "verify", str(path)]) == 1
        printed = capsys.readouterr()
        assert [line.split(":")[0] for line in printed.out.splitlines()] == good
        title, problem = printed.err.splitlines()
        assert title == "megamix checkpoint verify: damaged"
        assert problem.startswith(f"  {hurt / name}: its checksum ")


def test_no_command_uses_what_is_damaged(run, tmp_path, capsys):
    older, newer = run / "checkpoints" / OLDER, run / "checkpoints" / NEWER
    _flip_late(newer / FILES[2])
    output = tmp_path / "out"
    assert main(["checkpoint", "export", str(newer), "--to", "dcp", str(output)]) == 1
    said = capsys.readouterr().err
    assert str(newer / FILES[2]) in said
    assert f"{older} is good: name this one" in said
    assert not output.exists()


def test_a_wrong_path_is_told_with_the_right_one(run, tmp_path, capsys):
    empty = tmp_path / "empty"
    (empty / "checkpoints").mkdir(parents=True)
    none = f"{empty / 'checkpoints'} holds no checkpoint"
    export = ["export", str(run / "checkpoints" / NEWER), "--to", "dcp", str(run)]
    for flags, told in (
        (["verify", str(empty)], f"{none}; give a run that has saved, or a checkpoint"),
        (export, f"OUT: {run} is there already; give a new name"),
    ):
        assert main(["checkpoint", *flags]) == 2
        assert capsys.readouterr().err == f"megamix checkpoint {flags[0]}: {told}\n"
    assert main(["checkpoint", "ls", str(empty)]) == 0
    assert capsys.readouterr().out == f"{none}\n"
