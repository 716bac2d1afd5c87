"""What checkpoint.mirror takes of a node's shared memory is told before, with its bytes, and refused where it has no
room. `megamix status` lists what runs keep there, and `--clear` removes it, so that a run goes back to a checkpoint.
"""

from types import SimpleNamespace

import pytest

from megamix.checkpoint import slots
from megamix.checkpoint.mirror import Mirror
from megamix.checkpoint.slots import Kept, all_kept, held_home, home_of
from megamix.cli.verbs import main
from megamix.launch import leftovers
from megamix.launch.leftovers import room_for
from megamix.log.report import overview
from megamix.log.report.goodput import read_goodput
from megamix.tools.plan.memory_plan import held_memory
from megamix.train import job_size
from megamix.train.job_size import JobSize
from megamix.train.least_memory import amount
from tests.builders import tiny_job
from tests.train.recorded import run_recorded

MIRRORED = {"mirror": 1, "async_save": False, "save_interval": 5}


@pytest.fixture(autouse=True)
def shared(tmp_path, monkeypatch):
    """Return a folder that takes the place of /dev/shm in this process."""
    folder = tmp_path / "shm"
    folder.mkdir()
    for module in (slots, leftovers, overview, job_size):
        monkeypatch.setattr(module, "SHARED", folder)
    return folder


def test_status_lists_a_killed_run_which_takes_what_was_told_and_a_clear_sends_it_back_to_the_disk(
    tmp_path, data, shared, capsys, monkeypatch
):
    config = tiny_job(tmp_path, tokens=data, hidden_size=128, eval_interval=0, checkpoint=MIRRORED)
    run, other, sizes, take = tmp_path / "run", tmp_path / "other", [], Mirror.take

    def measured(mirror, record):
        sizes.append(sum(path.stat().st_size for path in shared.rglob("*.safetensors")))
        take(mirror, record)

    monkeypatch.setattr(Mirror, "take", measured)
    for crash_at in (7, 9):  # the second start goes on from memory
        run_recorded(config, crash_at=crash_at)
    assert 0.98 < JobSize(config)._mirrored()[1] / max(sizes) <= 1.0
    assert f"megamix status {run} --clear, on each machine\n" in capsys.readouterr().out
    told = "memory has the state after update 9, which a start takes if it is whole; else "
    assert main(["train", str(tmp_path / "run/config.toml"), "--check"]) == 0
    assert f"; {told}would go on from step 5" in capsys.readouterr().out
    (run / "checkpoints").rename(tmp_path / "away")
    assert main(["train", str(run / "config.toml"), "optimizer.lr=0.02", "--check"]) == 0
    assert told in capsys.readouterr().out
    (tmp_path / "away").rename(run / "checkpoints")
    size = f"{all_kept()[0].size / 2**20:,.1f} MiB"
    with held_home(other):
        assert main(["status", str(run)]) == 0
        assert capsys.readouterr().out.splitlines()[-2:] == [
            f"  {other}: 0.0 MiB, update 0, lives",
            f"  {run}: {size}, update 9",
        ]
        assert main(["status", str(other), "--clear"]) == 2
        assert f"RUN: {other} lives, and writes to {home_of(other)}; end it" in capsys.readouterr().err
        for said in (f"removed {size}, the state after update 9", f"keeps nothing in {shared} of this machine"):
            assert main(["status", f"{other}/../run", "--clear"]) == 0
            assert capsys.readouterr().out == f"{other}/../run: {said}\n"
        assert [kept.folder for kept in all_kept()] == [other]
    run_recorded(config)
    assert [one.source for one in read_goodput(run).starts] == ["", "memory", "disk"]


def test_what_another_user_may_have_made_is_not_taken(tmp_path, shared):
    (tmp_path / "theirs").mkdir()
    home_of(tmp_path / "run").symlink_to(tmp_path / "theirs")
    with pytest.raises(PermissionError, match="is another user's, or a link"), held_home(tmp_path / "run"):
        pass


def test_room_for_a_run_is_what_is_free_with_its_own_and_what_no_run_needs(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    sizes = {"run": 10, "gone": 100, "lives": 1000}
    found = [Kept(home_of(tmp_path / it), tmp_path / it, size, 7, it == "lives") for it, size in sizes.items()]
    monkeypatch.setattr(leftovers, "all_kept", lambda: found)
    monkeypatch.setattr(leftovers.shutil, "disk_usage", lambda path: SimpleNamespace(free=1))
    assert [room_for(tmp_path / name) for name in sizes] == [111, 101, 1101]


def test_shared_memory_without_room_is_refused_with_both_numbers_and_noted_by_a_check(
    tmp_path, data, shared, monkeypatch, capsys
):
    config = tiny_job(tmp_path, tokens=data, checkpoint=MIRRORED)
    job = tmp_path / "job.toml"
    job.write_text(config.text)
    need = JobSize(config)._mirrored()[1]
    monkeypatch.setattr(job_size, "room_for", lambda folder: need)
    assert JobSize(config).mirror_problem() is None
    its = amount(need)
    assert JobSize(config).lines()[-1] == f"mirror        takes {its} a rank, {its} of the {its} free in {shared} here"
    monkeypatch.setattr(job_size, "room_for", lambda folder: need / 2)
    told = f"checkpoint.mirror: got 1, which takes {its} of {shared}, where {amount(need / 2)} can be taken; write "
    for arguments, status in (([], 2), (["--check"], 0)):
        assert main(["train", str(job), *arguments]) == status
        assert f"{told}mirror = 0, or in a container make it larger: docker run --shm-size=2g" in "".join(
            capsys.readouterr()
        )
    monkeypatch.setattr(job_size, "room_for", room_for)
    shared.rmdir()
    assert f"of {shared}, which this machine lacks; write" in JobSize(config).mirror_problem()


# Two or three slots, and the one that a restart has loaded. On several machines the next one has as many.
@pytest.mark.parametrize(("beside", "here", "copies"), [(False, 2, 3), (True, 2, 4), (True, 1, 8)])
def test_bytes_follow_from_slots_and_machines_and_the_plan_tells_them_too(tmp_path, monkeypatch, beside, here, copies):
    config = tiny_job(tmp_path, hidden_size=256, async_save=beside, average={"decay": 0.9})
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    share = JobSize(config)._mirrored()[0]
    assert share == copies * 16 * JobSize(config)._least.params / 2
    planned = held_memory(config.with_keys(checkpoint={"mirror": 1}), 2, 0, "cpu")[1]["mirror in shared memory"]
    assert 1.0 <= planned / (share * here / 2) < 1.1


def test_a_container_s_memory_holds_copies_beside_what_the_ranks_of_a_cpu_hold(tmp_path, monkeypatch):
    config = tiny_job(tmp_path, checkpoint=MIRRORED)
    monkeypatch.setenv("WORLD_SIZE", "2")
    share, held = JobSize(config)._mirrored()[0], sum(JobSize(config)._held.values())
    told = f"{amount(share)} a rank beside the {amount(held)} that it holds, and of what 2 may take it has "
    for gpu, need in ((True, share), (False, share + held)):
        monkeypatch.setattr(job_size, "has_gpu", lambda gpu=gpu: gpu)
        for limit in (need, need - 1):
            monkeypatch.setattr(job_size, "memory_for_each", lambda ranks, it=limit: (it, f"what {ranks} may take"))
            assert (told in str(JobSize(config).mirror_problem())) is (limit < need)
