"""launch/slurm.sbatch, on a Slurm of stand-ins: starts ranks again on the nodes that live, queues the job again after a
signal, and ends with the run's status. tests/end_to_end/test_slurm.py has a real one.
"""

import os
import re
import signal

import pytest

from megamix.base.signals import NOTED
from tests.sandbox import ROOT, Sandbox

SCONTROL = """#!/bin/bash
case "$1 $2" in
  "show hostnames") printf '%s\\n' node7 node8 node9 ;;
  "show job" | requeue*) [[ ! -s "$BASE/away" ]] || { sed -i 1d "$BASE/away"; exit 1; } ;;&
  "show job") echo "JobId=1230042 Requeue=1 JobState=$(cat "$BASE/state")" ;;
  requeue*) echo requeue >>"$BASE/log" ;;
esac
"""
# Starts the tasks one after the other: SLURM_NODEID counts the nodes of a step. A step that asks for names is answered
# by those nodes that live.
SRUN = """#!/bin/bash
while [[ "$1" == --* ]]; do
  [[ "$1" != --nodelist=* ]] || nodes="${1#*=}"
  shift
done
[[ "$*" != *SLURMD_NODENAME* ]] || { echo "asks $nodes" >>"$BASE/log"; exec cat "$BASE/live"; }
echo "starts $nodes" >>"$BASE/log"
export SRUN=$$ SCRIPT=$PPID START="$(grep -c starts "$BASE/all" 2>/dev/null)"
echo starts >>"$BASE/all"
status=0
for ((SLURM_NODEID = 0; SLURM_NODEID < NNODES; SLURM_NODEID++)); do
  export SLURM_NODEID
  "$@" || status=$?
done
exit "$status"
"""
# The nodes' launchers end in each start with the statuses of the case.
PRETRAIN = """#!/bin/bash
echo "$NNODES $NODE_RANK $MASTER_ADDR:$MASTER_PORT $TORCHINDUCTOR_CACHE_DIR $*" >>"$BASE/launchers"
does=(_ $DOES)
case "${does[START + 1]}" in
  asked:*) kill -USR1 "$SCRIPT" ;;
  dead)
    while ((NODE_RANK == 1)) && kill -0 "$SRUN" 2>/dev/null; do sleep 1; done
    exit 1
    ;;
esac
exit "${does[START + 1]#asked:}"
"""


@pytest.fixture
def slurm(tmp_path):
    sandbox = Sandbox(tmp_path)
    sandbox.program("scontrol", SCONTROL)
    sandbox.program("srun", SRUN)
    sandbox.program("sinfo", '#!/bin/bash\ncat "$BASE/nodes"\n')
    sandbox.program("squeue", "#!/bin/bash\necho 1230042.0\necho 1230042.batch\n")
    sandbox.program("scancel", '#!/bin/bash\necho "$*" >>"$BASE/signals"\n')
    (sandbox.bin / "sleep").unlink()
    sandbox.program("sleep", '#!/bin/bash\nread -r -t "$SECOND" <>"$BASE/never"\nexit 0\n')
    os.mkfifo(tmp_path / "never")
    (sandbox.repo / "launch/pretrain.sh").write_text(PRETRAIN)
    (tmp_path / "state").write_text("RUNNING")
    (tmp_path / "live").write_text("node7\nnode9\n")
    (tmp_path / "nodes").write_text("node7 alloc\nnode8 alloc\nnode9 mix\n")
    return sandbox


def _run(slurm, does, *, spare="1", second="0.15", cache=""):
    job = {"SLURM_JOB_NODELIST": "node[7-9]", "SLURM_JOB_ID": "1230042", "SLURM_SUBMIT_DIR": str(slurm.repo)}
    job["TORCHINDUCTOR_CACHE_DIR"] = cache
    return slurm.run("slurm.sbatch", "my.toml", "data.train=a b", DOES=does, SPARE_NODES=spare, SECOND=second, **job)


FIRST, AGAIN = "starts node7,node8", ["asks node7,node8,node9", "starts node7,node9"]


@pytest.mark.parametrize(
    ("does", "status", "log"),
    [
        ("0", 0, [FIRST]),
        *((status, int(status), [FIRST]) for status in ("2", "3", "4")),  # would end the same way again
        ("asked:75", 75, [FIRST, "requeue"]),
        ("asked:138", 75, [FIRST, "requeue"]),  # before a launcher took signals
        ("asked:0", 0, [FIRST]),  # had finished
        ("1 0", 0, [FIRST, *AGAIN]),
        ("137 asked:75", 75, [FIRST, *AGAIN, "requeue"]),
        ("75 0", 0, [FIRST, *AGAIN]),  # nobody asked this script: the folder was held, or a rank was signalled
        ("dead 0", 0, [FIRST, *AGAIN]),
    ],
)
def test_how_the_launchers_end_is_what_the_job_does(slurm, does, status, log):
    done = _run(slurm, does)
    assert done.returncode == status, done.stderr
    assert slurm.lines() == log
    assert not list(slurm.repo.glob(".megamix-*"))
    assert (slurm.lines("signals") == ["--signal=KILL 1230042.0"]) == ("dead" in does)
    assert ("has not ended 5 s after the first" in done.stderr) == ("dead" in does)


def test_each_node_starts_one_launcher_and_each_start_has_a_port_of_its_own(slurm):
    assert _run(slurm, "1 0", cache="/kept").returncode == 0
    assert slurm.lines("launchers") == [
        f"2 {rank} node7:{port} /kept/{rank} my.toml data.train=a b" for port in (20042, 21042) for rank in (0, 1)
    ]


def test_nodes_that_slurm_does_not_take_for_sound_are_not_asked(slurm):
    (slurm.base / "nodes").write_text("node7 alloc$\nnode7 alloc$\nnode8 drng\nnode9 alloc*\n")
    _run(slurm, "1 0")
    assert slurm.lines()[1] == "asks node7"


def test_without_enough_nodes_the_job_is_queued_again(slurm):
    (slurm.base / "live").write_text("node9\n")
    done = _run(slurm, "1")
    assert (done.returncode, slurm.lines()[-1]) == (75, "requeue")
    assert "1 of 3 nodes answer, 2 are needed" in done.stderr


@pytest.mark.parametrize(("failures", "log"), [(3, [FIRST, "requeue"]), (99, [FIRST])])
def test_a_controller_that_is_away_for_a_moment_loses_no_job(slurm, failures, log):
    (slurm.base / "away").write_text("away\n" * failures)
    done = _run(slurm, "asked:75", second="0.001")
    assert (done.returncode, slurm.lines()) == (75, log)
    assert ("it cannot be queued again: submit it once more" in done.stderr) == (failures == 99)


def test_a_job_that_was_cancelled_is_not_queued_again(slurm):
    (slurm.base / "state").write_text("COMPLETING")
    assert _run(slurm, "asked:75").returncode == 75
    assert slurm.lines() == [FIRST]


def test_restarts_that_end_at_once_come_to_an_end(slurm):
    done = _run(slurm, "1 1 1 1 1 1 1 1", second="0.001")
    assert done.returncode == 1
    assert slurm.lines().count("starts node7,node9") == 5
    assert "five restarts in a row have ended within ten minutes" in done.stderr


@pytest.mark.parametrize(
    ("spare", "words"),
    [("3", " of 3 nodes, must leave one to train on"), *((odd, ", must be a") for odd in ("-1", "no"))],
)
def test_spares_that_leave_no_node_or_are_no_number_are_refused(slurm, spare, words):
    done = _run(slurm, "0", spare=spare)
    assert done.returncode == 2
    assert f"SPARE_NODES: got {spare}{words}" in done.stderr
    assert slurm.lines() == []


def test_the_job_asks_for_a_signal_that_ranks_know_and_keeps_its_log():
    options = re.findall(r"^#SBATCH (\S+)$", (ROOT / "launch/slurm.sbatch").read_text(), re.MULTILINE)
    assert {"--requeue", "--open-mode=append", "--no-kill"} <= {*options}
    (line,) = [option for option in options if option.startswith("--signal=")]
    name, _, seconds = line.removeprefix("--signal=B:").partition("@")
    assert signal.Signals[f"SIG{name}"] in NOTED
    assert int(seconds) > 60
