"""A rank is killed at any point of a step, and all checkpoints are gone: the run goes on from the nodes' memory, redoes
one attempt at most, and ends bitwise equal to one that nobody killed and that keeps no mirror. Slots that are not right
are not taken; a node may lose its memory.
"""

import errno
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from megamix.checkpoint import in_memory, slots
from megamix.checkpoint.folder import Files
from megamix.checkpoint.mirror import Mirror
from megamix.checkpoint.snapshot import Part
from megamix.config import ConfigError
from megamix.train.checkpointing import RunCheckpoints
from tests.builders import EXPERTS, tiny_job
from tests.conftest import FULL
from tests.train.kill_points import AT_A_START, POINTS, SENDS
from tests.train.outcome import differences, end_of
from tests.train.recorded import run_recorded

STEPS, PER_RANK = (24, 4) if FULL else (12, 2)  # updates, and sequences of each
LENGTH = 6  # kills of a chain
DEADLINE_S = 120.0
PRETRAIN = Path(__file__).resolve().parents[2] / "launch/pretrain.sh"
OVERFLOWS = {"loss_scale": {"init_scale": 2.0**20, "growth_interval": 2}}
MIXED = {"shard": "parameters", "experts": EXPERTS, "average": {"decay": 0.9}, "precision": OVERFLOWS}
LAYOUTS = {  # ranks, settings; a kill can be of the first, the middle and the last rank
    "dp 3": (3, {}),
    "replicas 2": (4, {"replicas": 2}),
    "tp 2": (4, {"tensor": {"size": 2}}),
    "pp 2": (4, {"pipeline": {"size": 2}}),
    "ep 2": (4, {"expert": {"size": 2}, "experts": EXPERTS}),
    "gradients": (3, {"shard": "gradients"}),
    "parameters": (3, {"shard": "parameters"}),
    "overflows": (3, {"precision": OVERFLOWS}),
    "muon": (3, {"optimizer": {"name": "muon"}}),
    "average": (3, {"average": {"decay": 0.9}}),
}
ALL = LAYOUTS | {"mixed": (2, MIXED), "dp 2": (2, {}), "replicas of one": (2, {"replicas": 2})}


def _config(folder, layout, **settings):
    ranks, own = ALL[layout]
    markov = [{"markov": 4}]
    base = {
        "steps": STEPS,
        "global_batch_size": PER_RANK * ranks,
        "dropout": 0.1,
        "eval_interval": 4,
        "log_interval": 1,
    }
    base |= {"train": markov, "valid": markov, "bucket_size": 8192, "plugins": ["tests.train.kill_points"]}
    base |= {"mirror": 1, "save_interval": 3, "max_restarts": 1000, "replica_check_interval": 0}
    return tiny_job(folder, **base | own | settings)


def _made(folder, nodes="0"):
    """Make the folders of the nodes' shared memory."""
    for node in {*nodes}:
        (folder / "shm" / node).mkdir(parents=True, exist_ok=True)
    return folder


# Ranks are killed.


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, run_ranks):
    """Return the folder of a run of a layout that nobody kills, and that keeps no mirror."""

    @cache
    def run_whole(layout):
        folder = _made(tmp_path_factory.mktemp("unbroken"))
        run_ranks(_start, ALL[layout][0], _config(folder, layout, mirror=0), folder)
        return folder

    return run_whole


def _differences(folder, other):
    """Return what two runs have ended with otherwise: weights, states, counters, place in the data, rows of metrics."""
    weights = [(one / "run/weights.safetensors").read_bytes() for one in (folder, other)]
    return differences(*map(end_of, (folder, other))) + ["weights"] * (weights[0] != weights[1])


def _killed(folder, layout, kills, nodes):
    """Run a job by the launcher, which starts the ranks again after each kill, to its end. Return what it says."""
    config = _config(_made(folder, nodes), layout)
    (folder / "job.toml").write_text(config.text)
    environment = {
        "MEGAMIX_PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
        "NPROC_PER_NODE": str(ALL[layout][0]),
        "MEGAMIX_TEST_FOLDER": str(folder),
        "MEGAMIX_TEST_NODES": nodes,
        "MEGAMIX_TEST_KILLS": ",".join(kills),
    }
    command = [PRETRAIN, folder / "job.toml"]
    ended = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=DEADLINE_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def _cover():
    """Return chains of kills, (layout, kills, nodes): every pair of a point, a victim and a layout is met, and each
    chain has a kill in a recovery: as it loads, or right after its first mirror.
    """
    rng, chains = random.Random(0), list[tuple[str, list[str], str]]()
    for column, (layout, (ranks, _)) in enumerate(LAYOUTS.items()):
        victims = (0, ranks // 2, ranks - 1)
        kills = [f"{victims[(row + column) % 3]}:{{}}:{point}" for row, point in enumerate(POINTS)]
        rng.shuffle(kills)
        several = "012" if ranks == 3 else "0011"
        if layout != "replicas 2":  # another replica is the mirror
            kills[:0] = [f"{victims[(row + column) % 3]}:{{}}:{point}" for row, point in enumerate(SENDS, len(POINTS))]
        for first in range(0, len(kills), LENGTH):
            chain = [kill.format(attempt) for attempt, kill in enumerate(kills[first : first + LENGTH], 1)]
            chain.insert(2, f"{rng.choice(victims)}:-1:{rng.choice([*AT_A_START, 'mirrored'])}")
            chains.append((layout, chain, several if first == 0 else "0000"))
    return chains


SOME = ["1:1:sum arrived", "0:2:copy to slot 1", "1:-1:loading", "0:-1:mirrored", "1:3:second gather", "0:5:log row"]


@pytest.mark.parametrize(
    ("layout", "kills", "nodes"), [*_cover(), ("mixed", SOME, "0000")][0 if FULL else -1 :], ids=str
)
def test_killed_at_any_point_it_ends_bitwise_equal(tmp_path, unbroken, layout, kills, nodes):
    said = _killed(tmp_path, layout, kills, nodes)
    assert [kill for kill in kills if not (tmp_path / f"{kill}.mark").exists()] == []
    assert said.count("was killed by SIGKILL") == len(kills)
    assert "goes on from memory" in said
    assert f"goes on from {tmp_path}/run" not in said
    told = (tmp_path / "attempts.txt").read_text().split("start\n")
    starts = [[*map(int, start.split())] for start in told if start]
    for before, after in pairwise(starts):
        assert after[0] >= before[-1] - 1, f"redone: {starts}"  # the last one was under way
    assert _differences(tmp_path, unbroken(layout)) == []
    assert not [*tmp_path.glob("shm/*/*")], "nothing is left in the nodes' memory"


# What a start finds in memory that is not as a dying run left it. Here all ranks end at an exception, and others that
# are up already go on, which is quicker.

CRASH_AT, SAVED_AT, SLOW_S = 5, 3, 0.05


def _start(config, folder, nodes="0000", crash_at=None, full_on=None, slow_on=None, is_old=False):
    """Start a job on this rank. Return what it says, or why it does not start.

    `full_on`: a rank without room. `slow_on`: one whose disk is slow. `is_old`: the mirror is of the time before the
    step.
    """
    said, rank, before = io.StringIO(), dist.get_rank(), list[Part]()
    fallocate, share, write = os.posix_fallocate, Mirror._share, Files.write

    def no_room(*arguments):
        if rank == full_on:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fallocate(*arguments)

    def slow(*arguments):
        time.sleep(SLOW_S if rank == slow_on else 0)
        write(*arguments)

    def remember(checkpoints):
        before[:] = [replace(part, tensor=part.tensor.clone()) for part in share(checkpoints._mirror)]

    with ExitStack() as patched:
        for module in (slots, in_memory):
            patched.enter_context(mock.patch.object(module, "SHARED", folder / "shm" / nodes[rank]))
        patched.enter_context(mock.patch.object(os, "posix_fallocate", no_room))
        patched.enter_context(mock.patch.object(Files, "write", slow))
        if is_old:
            patched.enter_context(mock.patch.object(RunCheckpoints, "finish_mirror", remember))
            patched.enter_context(mock.patch.object(Mirror, "_share", lambda mirror: before or share(mirror)))
        patched.enter_context(redirect_stdout(said))
        try:
            run_recorded(config, crash_at=crash_at)
        except ConfigError as error:
            return "; ".join(error.problems)
    return said.getvalue()


_crash = partial(_start, crash_at=CRASH_AT)


@pytest.fixture(scope="module")
def crashed_once(tmp_path_factory, run_ranks):
    folder = _made(tmp_path_factory.mktemp("crashed"))
    run_ranks(_crash, 2, _config(folder, "dp 2"), folder)
    shutil.copytree(folder, folder.with_name("as_crashed"))
    return folder


@pytest.fixture
def crashed(crashed_once):
    """Return the folder of a run of two ranks that crashed after update 5, with a checkpoint of update 3."""
    shutil.rmtree(crashed_once)
    shutil.copytree(crashed_once.with_name("as_crashed"), crashed_once)
    return crashed_once


def _torn(file, record):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _changed(key, file, record):
    told = json.loads(record.read_text())
    record.write_text(json.dumps(told | {key: told[key] + 1}))


def _gone(file, record):
    record.unlink()


FAULTS = [(_torn, 1), (partial(_changed, "total"), 1), (_gone, 1), (partial(_changed, "began"), 3)]


@pytest.mark.parametrize(("fault", "count"), FAULTS, ids=["torn", "its sum lies", "none", "of another run"])
def test_a_slot_that_is_not_right_is_not_taken(crashed, run_ranks, unbroken, fault, count):
    """The start takes the attempt before it, or the checkpoint, says why, and ends with the same bits."""
    records = sorted(crashed.glob("shm/0/*/*.rank_00001.slot_*.json"), key=lambda record: record.stat().st_mtime_ns)
    for record in records[-count:]:
        fault(record.with_suffix(".safetensors"), record)
    said, _ = run_ranks(_start, 2, _config(crashed, "dp 2"), crashed)
    assert f"a newer state that is not whole: that of attempt {CRASH_AT} lacks the share of rank 1" in said
    place, update = ("memory", CRASH_AT - 1) if count == 1 else (f"{crashed}/run/checkpoints", SAVED_AT)
    assert re.search(rf"goes on from {re.escape(place)}.* after update {update}\n", said)
    assert _differences(crashed, unbroken("dp 2")) == []


def test_no_room_is_refused_on_every_rank(crashed, run_ranks):
    before = {*crashed.glob("shm/0/*/*.json")}
    answers = run_ranks(partial(_start, full_on=1), 2, _config(crashed, "dp 2"), crashed)
    assert answers == ["checkpoint.mirror: rank 1: OSError: [Errno 28] No space left on device"] * 2
    assert len(before & {*crashed.glob("shm/0/*/*.json")}) == 2, "the state from which it would have gone on stays"


def test_another_run_leaves_what_a_dead_one_needs(crashed, run_ranks, unbroken, tmp_path):
    """It removes the memory of a run that is done, or whose folder is gone. It ends while a save is under way."""
    (home,) = (crashed / "shm/0").iterdir()
    others = [(tmp_path / "gone/run", "gone"), (unbroken("dp 2") / "run", "done")]
    for folder, name in others:
        shutil.copytree(home, home.parent / f"megamix-{os.getuid()}-{name}")
        (home.parent / f"megamix-{os.getuid()}-{name}/run.txt").write_text(str(folder))
    kept = {path.name: path.read_bytes() for path in home.iterdir()}
    config = _config(tmp_path, "dp 2", steps=SAVED_AT + 1)
    run_ranks(partial(_start, slow_on=1), 2, config, crashed)
    assert [*home.parent.iterdir()] == [home]
    assert {path.name: path.read_bytes() for path in home.iterdir()} == kept


def test_a_node_takes_its_neighbours_copy_and_not_what_is_dead(tmp_path, run_ranks, unbroken):
    """The first nodes are away while the run goes on from a checkpoint; then one of them comes back for another."""
    config = _config(_made(tmp_path, "0123"), "dp 2")
    run_ranks(_crash, 2, config, tmp_path, "01")
    run_ranks(partial(_start, crash_at=SAVED_AT + 1), 2, config, tmp_path, "23")
    shutil.rmtree(tmp_path / "shm/2")
    said, _ = run_ranks(_start, 2, config, tmp_path, "03")
    assert re.search(rf"goes on from memory .* after update {SAVED_AT + 1}\n", said)
    assert _differences(tmp_path, unbroken("dp 2")) == []


def test_another_replica_is_the_mirror(tmp_path, run_ranks, unbroken):
    """A node dies, and with it the first rank, before it has logged the last step."""
    layout = "replicas of one"
    config = _config(_made(tmp_path, "01"), layout)
    run_ranks(_crash, 2, config, tmp_path, "01")
    assert {path.name[12:22] for path in tmp_path.glob("shm/0/*/start_*")} == {"rank_00000"}, "no bytes are sent"
    for home in (tmp_path / "shm/0").iterdir():
        shutil.rmtree(home)
    metrics = tmp_path / "run/metrics.jsonl"
    metrics.write_bytes(b"".join(metrics.read_bytes().splitlines(keepends=True)[:-1]))
    said, _ = run_ranks(_start, 2, config, tmp_path, "01")
    assert re.search(rf"goes on from memory .* after update {CRASH_AT - 1}\n", said)
    assert _differences(tmp_path, unbroken(layout)) == []


def test_a_start_keeps_the_state_that_it_has_loaded_of_all_replicas(tmp_path, run_ranks, unbroken):
    """It dies before it has kept another one. The next start needs that of the first rank, too."""
    layout = "replicas of one"
    config = _config(_made(tmp_path), layout)
    run_ranks(_crash, 2, config, tmp_path)
    run_ranks(_crash, 2, config, tmp_path)
    assert {path.name[12:22] for path in tmp_path.glob("shm/0/*/start_00001*")} == {"rank_00000", "rank_00001"}
    said, _ = run_ranks(_start, 2, config, tmp_path)
    assert re.search(rf"goes on from memory .* after update {CRASH_AT}\n", said)
    assert _differences(tmp_path, unbroken(layout)) == []


def test_other_ranks_go_on_from_the_memory_of_a_node(tmp_path, run_ranks):
    """A run of 2, 1 and 2 ranks ends as one that goes on from checkpoints."""
    settings = {"steps": 4, "save_interval": 1, "async_save": False}
    for folder, mirror in ((tmp_path / "memory", 1), (tmp_path / "disk", 0)):
        config = _config(_made(folder), "dp 2", mirror=mirror, **settings)
        for ranks, crash_at in ((2, 2), (1, 3), (2, None)):
            said, *_ = run_ranks(partial(_start, crash_at=crash_at), ranks, config, folder)
        assert f"goes on from {f'memory ({folder}' if mirror else f'{folder}/run'}" in said
        assert "changed since: ranks: 1 -> 2" in said
    assert _differences(tmp_path / "memory", tmp_path / "disk") == []


def test_a_mirror_that_is_one_step_old_would_be_seen(tmp_path, run_ranks, unbroken):
    config = _config(_made(tmp_path), "dp 2")
    run_ranks(partial(_crash, is_old=True), 2, config, tmp_path)
    run_ranks(_start, 2, config, tmp_path)
    assert {"files", "weights"} <= {*_differences(tmp_path, unbroken("dp 2"))}
