"""Whoever looks into a folder after a crash: `megamix checkpoint ls` and `verify` distinguish complete, damaged and
unfinished checkpoints and use no damaged one; a stray file does not stop them.
"""

import os
import re
import shutil
from pathlib import Path

import pytest

from megamix.checkpoint.folder import checkpoints
from megamix.cli import main
from megamix.run.run_folder import folder_problems
from tests.builders import tiny_job
from tests.checkpoint.state import save_steps

OLDER, NEWER = "step_00000001", "step_00000002"
FILES = ("manifest.json", "rank_00000.safetensors", "rank_00001.safetensors")


@pytest.fixture(scope="module")
def ready(run_ranks, tmp_path_factory):
    """Save a run with two checkpoints of two ranks."""
    run = tmp_path_factory.mktemp("ready")
    run_ranks(save_steps, 2, run / "checkpoints", [1, 2])
    return run


@pytest.fixture
def run(ready, tmp_path):
    """Return a copy of the run, to be damaged."""
    return Path(shutil.copytree(ready, tmp_path / "run"))


def _flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


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


@pytest.mark.parametrize("name", FILES)
def test_verify_names_the_damaged_file_and_fails(run, capsys, name):
    hurt = run / "checkpoints" / NEWER
    _flip(hurt / name)
    for path, good in ((run, [OLDER]), (hurt, [])):
        assert main(["checkpoint", "verify", str(path)]) == 1
        printed = capsys.readouterr()
        assert [line.split(":")[0] for line in printed.out.splitlines()] == good
        title, problem = printed.err.splitlines()
        assert title == "megamix checkpoint verify: damaged"
        assert problem.startswith(f"  {hurt / name}: its checksum ")


def test_no_command_uses_what_is_damaged(run, tmp_path, capsys):
    older, newer = run / "checkpoints" / OLDER, run / "checkpoints" / NEWER
    _flip(newer / FILES[2])
    output = tmp_path / "out"
    assert main(["checkpoint", "export", str(newer), "--to", "dcp", str(output)]) == 1
    said = capsys.readouterr().err
    assert str(newer / FILES[2]) in said
    assert f"{older} is good: name this one" in said
    assert not output.exists()


def test_a_wrong_path_is_told_with_the_right_one(run, tmp_path, capsys):
    newer = str(run / "checkpoints" / NEWER)
    empty = tmp_path / "empty"
    (empty / "checkpoints").mkdir(parents=True)
    for flags, told in (
        (
            ["verify", str(empty)],
            f"{empty / 'checkpoints'} holds no checkpoint; give a run that has saved, or a checkpoint",
        ),
        (["export", newer, "--to", "dcp", str(run)], f"OUT: {run} is there already; give a new name"),
    ):
        assert main(["checkpoint", *flags]) == 2
        assert capsys.readouterr().err == f"megamix checkpoint {flags[0]}: {told}\n"
    assert main(["checkpoint", "ls", str(empty)]) == 0
    assert capsys.readouterr().out == f"{empty / 'checkpoints'} holds no checkpoint\n"
