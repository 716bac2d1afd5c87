"""On a real Slurm of three nodes (--full; it installs Slurm, which needs root): a job that is signalled at any time is
queued again and ends as one that never stopped; a dead node is replaced by a spare one; scancel saves.
"""

import json
import os
import random
import sys
import time
from pathlib import Path

import pytest

from megamix.launch.run_status import read_status
from tests.builders import tiny_job
from tests.conftest import FULL
from tests.slurm_cluster import Cluster, until

pytestmark = [
    pytest.mark.skipif(not FULL, reason="--full: it installs Slurm, and takes a quarter of an hour"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can install Slurm"),
]
ROOT = Path(__file__).resolve().parents[2]
SIGNALS = 10
STEPS = 150


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("slurm"), 3) as running:
        yield running


class Submitted:
    """Holds a job in the queue, in a folder of its own."""

    def __init__(self, cluster, folder, data, nodes, spare, steps=STEPS):
        self.cluster, self.folder = cluster, folder
        folder.mkdir()
        config = tiny_job(
            folder, tokens=data, valid=None, steps=steps, eval_interval=0, save_interval=20, log_interval=20, mirror=1
        )
        (folder / "job.toml").write_text(config.text)
        options = [f"--nodes={nodes}", f"--output={folder / 'log'}", f"--chdir={ROOT}", "--export=ALL"]
        settings = {"MEGAMIX_PYTHON": sys.executable, "NPROC_PER_NODE": "1", "OMP_NUM_THREADS": "1"}
        settings |= {"MASTER_ADDR": "127.0.0.1", "SPARE_NODES": str(spare)}
        script = [str(ROOT / "launch/slurm.sbatch"), str(folder / "job.toml")]
        said = cluster.call("sbatch", "--parsable", *options, *script, directory=ROOT, **settings)
        self.number = said.split()[-1]
        assert self.number.isdigit(), said

    @property
    def state(self):
        return self.cluster.job(self.number)["JobState"]

    @property
    def log(self):
        path = self.folder / "log"
        return path.read_text() if path.exists() else ""

    def losses(self):
        path = self.folder / "run/metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}

    def status(self):
        return read_status(self.folder / "run")

    def running(self):
        until(lambda: self.state == "RUNNING" and "slurm.sbatch: start" in self.log, "start", 60)

    def ended(self):
        """Wait until it has ended for good, and return its state. Slurm holds a job that is queued again for two
        minutes, so that the end of its script is not taken for that of the next one; five seconds are enough here.
        """
        queued_s = []

        def has_ended():
            job = self.cluster.job(self.number)
            if job["JobState"] == "PENDING" and job["Restarts"] != "0":
                queued_s.append(time.monotonic())
                if queued_s[-1] - queued_s[0] > 5:
                    self.cluster.call("scontrol", "update", f"JobId={self.number}", "StartTime=now")
            return job["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

        until(has_ended, f"end of job {self.number}", 400)
        return self.state


@pytest.fixture(scope="module")
def whole(cluster, tmp_path_factory, data):
    """A job that nobody disturbs, and the seconds that it took."""
    job = Submitted(cluster, tmp_path_factory.mktemp("whole") / "job", data, nodes=2, spare=0)
    job.running()
    began_s = time.monotonic()
    assert job.ended() == "COMPLETED", job.log
    return job, time.monotonic() - began_s


@pytest.mark.parametrize("number", range(SIGNALS))
def test_a_job_that_is_signalled_is_queued_again_and_ends_as_an_undisturbed_one(cluster, whole, tmp_path, data, number):
    undisturbed, took_s = whole
    job = Submitted(cluster, tmp_path / "job", data, nodes=2, spare=0)
    job.running()
    time.sleep((number + random.Random(number).random()) / SIGNALS * took_s * 0.9)
    cluster.call("scancel", "--signal=USR1", "--batch", job.number)
    assert job.ended() == "COMPLETED", job.log
    before, _, after = job.log.partition("queueing the job again")
    assert cluster.job(job.number)["Restarts"] == "1", job.log
    assert [text.count("slurm.sbatch: start 1 on") for text in (before, after)] == [1, 1]  # the log is kept
    assert job.status().state == "finished"
    assert job.losses() == undisturbed.losses()


def test_a_dead_node_is_replaced_by_the_spare_one_within_the_job(cluster, whole, tmp_path, data):
    undisturbed, _ = whole
    job = Submitted(cluster, tmp_path / "job", data, nodes=3, spare=1)
    until(lambda: "saved" in job.log, "a checkpoint")
    cluster.kill_node("n2")
    until(lambda: "goes on from memory" in job.log.partition("start 2 on n1,n3")[2], "another start", 240)
    reached = max(job.losses(), default=0)
    until(lambda: max(job.losses(), default=0) > reached or job.state == "COMPLETED", "a step")
    cluster.start_node("n2")  # Slurm ends no job before it has heard of each node
    assert job.ended() == "COMPLETED", job.log
    assert cluster.job(job.number)["Restarts"] == "0"
    assert job.losses() == undisturbed.losses()


def test_scancel_saves_and_queues_nothing_again(cluster, tmp_path, data):
    until(lambda: cluster.states() == ["idle"] * 3, "idle nodes")
    job = Submitted(cluster, tmp_path / "job", data, nodes=2, spare=0, steps=10**5)
    until(lambda: len(job.losses()) > 2, "training")
    cluster.call("scancel", job.number)
    assert job.ended() == "CANCELLED"
    status = job.status()
    assert (status.state, status.exit_status) == ("preempted", 75)
    saved = [path.name for path in (job.folder / "run/checkpoints").iterdir()]
    assert f"step_{status.update:08d}" in saved
    assert cluster.job(job.number)["Restarts"] == "0"
