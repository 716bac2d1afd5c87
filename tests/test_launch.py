"""The scripts start the right number of ranks with the right settings, move aside earlier results, and refuse a cache
of compiled code of another user.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megamix.base.machine import half_units
from megamix.launch.exit_status import EXIT_STATUS
from tests.sandbox import ROOT, Sandbox


@pytest.fixture
def sandbox(tmp_path):
    return Sandbox(tmp_path)


def pretrain(sandbox, *arguments, **variables):
    """Run pretrain.sh with the sandbox's quickstart as "{config}", and return it with the options of started ranks."""
    config = sandbox.repo / "configs" / "quickstart.toml"
    filled = [text.format(config=config) for text in arguments]
    done = sandbox.run("pretrain.sh", *filled, MEGAMIX_PYTHON=str(sandbox.program("p")), **variables)
    started = [line for line in sandbox.lines() if " ranks " in line]
    return done, [line.replace(str(config), "{config}").split(" ", 2)[2] for line in started]


@pytest.mark.parametrize(
    ("script", "asked"), [("quickstart.sh", "--help"), ("pretrain.sh", "-h"), ("test.sh", "--help")]
)
def test_asked_for_help_a_script_prints_its_usage_and_does_nothing(sandbox, script, asked):
    done = sandbox.run(script, asked)
    assert done.returncode == 0, done.stderr
    assert f"\n  launch/{script} " in done.stdout
    assert sandbox.lines() == []  # no program was called


NODES = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node0"}
KUBEFLOW = {f"PET_{name}": value for name, value in NODES.items()} | {
    "PET_MASTER_PORT": "4711", "PET_NPROC_PER_NODE": "auto", "NODE_RANK": "0",
    "PET_RDZV_BACKEND": "c10d", "PET_MAX_RESTARTS": "3",  # torchrun would take them by itself
}  # fmt: skip


@pytest.mark.parametrize(
    ("gpus", "variables", "meet", "ranks", "world"),
    [
        (4, {}, "1 0  29500", 4, 4),
        (4, {"NPROC_PER_NODE": "2"}, "1 0  29500", 2, 2),
        (0, NODES, "2 1 node0 29500", 1, 2),
        (4, KUBEFLOW, "2 0 node0 4711", 4, 8),
    ],
)
def test_pretrain_starts_a_rank_per_gpu_or_as_told_by_names_of_ours_or_kubeflows(
    sandbox, gpus, variables, meet, ranks, world
):
    sandbox.gpus(gpus)
    done, started = pretrain(sandbox, "{config}", "training.steps=90", **variables)
    assert done.returncode == 0, done.stderr
    assert started == [f"{ranks} {{config}} training.steps=90"]
    assert sandbox.lines("machines") == [meet]
    # One interpreter that imports anything, the launcher: the other looks for modules, and ends.
    assert sandbox.lines("started") == [
        "- torch numpy",
        f"-m megamix.cli.pretrain {sandbox.repo}/configs/quickstart.toml",
    ]
    assert sandbox.lines("checked") == [f"WORLD_SIZE={world}"]
    # Each rank has its own: tests/base/test_machine.py.
    assert sandbox.lines("environment") == ["OMP_NUM_THREADS= MALLOC="]
    assert sandbox.lines("left") == [""]


def test_pretrains_check_takes_what_a_rank_may_hold_and_starts_none(sandbox):
    done, started = pretrain(sandbox, "--check", "--memory=3GiB", "{config}", NPROC_PER_NODE="3")
    assert (done.returncode, started) == (0, []), done.stderr
    assert sandbox.lines("checked") == ["WORLD_SIZE=3"]
    assert sandbox.lines("asked") == [f"{sandbox.repo}/configs/quickstart.toml True {3 * 2**30}"]


@pytest.mark.parametrize(
    ("nproc", "overrides", "told"),
    [
        ("", ["optimizer.lr=-1", "training.steps=0"], ["5 problems", "optimizer.lr: got -1", "training.steps: got 0"]),
        ("2", ["training.global_batch_size=8"], ["4 problems", "data.train", "data.valid", "global_batch_size"]),
    ],
)
def test_pretrain_tells_all_mistakes_before_it_imports_torch(tmp_path, nproc, overrides, told):
    """Tell of the configuration at once; of files and ranks too, where GPUs need not be counted."""
    job = [str(ROOT / "configs/quickstart.toml"), *overrides]
    code = f"import sys; from megamix.cli.pretrain import main; print(main({job}), 'torch' in sys.modules)"
    environment = os.environ | {"NPROC_PER_NODE": nproc}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=True)
    assert done.stdout == "2 False\n"
    assert [part for part in told if part not in done.stderr] == [], done.stderr


def test_a_signal_while_files_are_looked_at_ends_pretrain_as_a_run_that_was_asked_to_leave():
    job = [str(ROOT / "configs/quickstart.toml")]
    look = "lambda *_: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(60))"
    code = "import os, signal, time; from megamix.cli import pretrain, train; "
    code += f"train.outlook_of = {look}; pretrain.main({job})"
    environment = os.environ | {"NPROC_PER_NODE": "2"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == EXIT_STATUS["preempted"], done.stderr


@pytest.mark.parametrize(("variables", "settings"), [({}, ""), (NODES, "NNODES=2 NODE_RANK=1 MASTER_ADDR=node0 ")])
def test_the_command_that_goes_on_starts_as_many_ranks_and_the_users_threads_and_malloc_are_left_alone(
    sandbox, variables, settings
):
    (sandbox.base / "interrupted").touch()
    done, _ = pretrain(sandbox, "{config}", OMP_NUM_THREADS="7", MALLOC_TRIM_THRESHOLD_="9", **variables)
    assert sandbox.lines("environment") == ["OMP_NUM_THREADS=7 MALLOC=9"]
    command = f"{settings}./launch/pretrain.sh {sandbox.repo}/configs/quickstart.toml"
    assert done.stderr.endswith(f"to go on, repeat the command: {command}\n"), done.stderr


@pytest.mark.parametrize("name", ["TERM", "USR1"])
def test_a_signal_while_the_script_still_looks_ends_it_as_a_run_that_was_asked_to_leave(sandbox, name):
    sends = f"#!/bin/bash\nread -r _ _ _ script _ </proc/$PPID/stat\nkill -{name} $script $PPID $$\n"
    done = sandbox.run("pretrain.sh", "x.toml", MEGAMIX_PYTHON=str(sandbox.program("p", sends)))
    assert done.returncode == EXIT_STATUS["preempted"]
    assert done.stderr == "interrupted before any rank had started; the same command starts again\n"


@pytest.mark.parametrize(
    ("module", "number", "status"),
    [
        ("megamix.cli.pretrain", signal.SIGTERM, EXIT_STATUS["preempted"]),
        ("megamix.cli.pretrain", signal.SIGUSR1, EXIT_STATUS["preempted"]),
        ("megamix train", signal.SIGINT, -signal.SIGINT),
    ],
)
def test_a_signal_while_modules_are_loaded_leaves_no_traceback(tmp_path, module, number, status):
    (tmp_path / "pydantic.py").write_text(f"import os\nos.kill(os.getpid(), {int(number)})\n")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-m", *module.split(), str(ROOT / "configs/base.toml")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (status, "")


@pytest.mark.parametrize(
    ("arguments", "variables", "want"),
    [
        ("", {}, "CONFIG is missing"),
        ("{config}", {"SLURM_STEP_NUM_TASKS": "4"}, "SLURM_STEP_NUM_TASKS: is 4, so many times was this"),
        ("{config}", {"OMPI_COMM_WORLD_SIZE": "2"}, "srun or mpirun python -m megamix train"),
        ("{config}", {"PET_NNODES": "2:4"}, "NNODES: got 2:4, must be 1 or more; write NNODES=2"),
        ("{config}", {"NNODES": "2", "MASTER_ADDR": "a"}, "NODE_RANK: missing with NNODES=2; number the machines"),
        ("{config}", {"NNODES": "2", "NODE_RANK": "1"}, "MASTER_ADDR: missing with NNODES=2; set it to the name"),
        ("{config}", NODES | {"NODE_RANK": "2"}, "NODE_RANK: got 2, must be 0 to 1 with NNODES=2"),
        ("{config}", NODES | {"MASTER_PORT": "70000"}, "MASTER_PORT: got 70000, must be 1 to 65535"),
        ("{config}", NODES | {"RDZV_ENDPOINT": "a:1"}, "RDZV_ENDPOINT: got a:1, is not read"),
        ("{config}", {"RDZV_ID": "mine"}, "its NODE_RANK; unset it, write MASTER_ADDR=node0 MASTER_PORT=29500"),
        ("{config}", {"NPROC_PER_NODE": "two"}, "NPROC_PER_NODE: got two, must be 1 or more"),
        ("nowhere.toml", {}, "got nowhere.toml, there is no such file"),
        ("{config} --memory 3GiB", {}, "--memory=3GiB: is read with --check; write --check --memory=3GiB"),
    ],
)
def test_pretrain_refuses_before_any_rank_starts(sandbox, arguments, variables, want):
    done, started = pretrain(sandbox, *arguments.split(), **variables)
    assert (done.returncode, started) == (2, [])
    assert want in done.stderr


def test_pretrain_runs_no_code_that_another_user_may_have_compiled(sandbox):
    cache = sandbox.base / "cache"
    cache.mkdir()
    if os.geteuid() == 0:
        os.chown(cache, 65534, 65534)
    else:
        cache = Path("/")
    done, started = pretrain(sandbox, "{config}", TORCHINDUCTOR_CACHE_DIR=str(cache))
    assert (done.returncode, started) == (2, [])
    assert f"TORCHINDUCTOR_CACHE_DIR: got {cache}, must be a folder of yours" in done.stderr


def test_pretrain_without_an_install_says_what_to_run(sandbox):
    done = sandbox.run("pretrain.sh", "x.toml")
    assert done.returncode == 2
    assert "run ./launch/install.sh first" in done.stderr


@pytest.mark.parametrize(
    ("gpus", "variables", "ranks", "override"),
    [
        (8, {}, 8, ["training.global_batch_size=64"]),
        (0, {"NPROC_PER_NODE": "3"}, 3, ["training.global_batch_size=24"]),
    ],
)
def test_quickstart_prepares_and_trains_on_what_is_there(sandbox, gpus, variables, ranks, override):
    sandbox.gpus(gpus)
    sandbox.program("python3")
    done = sandbox.run("quickstart.sh", "optimizer.lr=1e-3", **variables)
    assert done.returncode == 0, done.stderr
    stages = re.findall(r"^(\d/3 \w+): .*(?:minute|second)", done.stderr, flags=re.MULTILINE)
    assert stages == ["1/3 install", "2/3 text", "3/3 training"]  # nobody waits without a word
    lines = [line for line in sandbox.lines() if not line.startswith(("pip", "python3"))]
    assert lines[0].startswith("python -m megamix prepare --corpus stdlib --output runs/data/stdlib ")
    assert lines[1].split()[2:] == [str(ranks), "configs/quickstart.toml", *override, "optimizer.lr=1e-3"]


def test_quickstart_ends_with_what_was_reached_the_pictures_and_the_next_commands(sandbox):
    sandbox.program("python3")
    other, earlier = sandbox.repo / "runs/other", sandbox.repo / "runs/quickstart"
    other.mkdir(parents=True)
    earlier.mkdir()
    rows = '{"step": 130, "valid/loss": 4.02}\n{"step": 260, "train/loss": 3.3}\n{"step": 260, "valid/loss": 3.496}\n'
    (other / "metrics.jsonl").write_text(rows)
    done = sandbox.run("quickstart.sh", "checkpoint.folder=runs/other", LC_ALL="de_DE.UTF-8")
    assert done.returncode == 0, done.stderr
    reached, following, *commands = done.stdout.splitlines()
    assert re.fullmatch(r"reached: validation 3\.50 nats a token; expect 3\.\d to 3\.\d without your settings", reached)
    assert following == "next:"
    assert len(commands) == 3
    assert sandbox.lines()[-1] == "python -m megamix report runs/other"
    assert {*(sandbox.repo / "runs").iterdir()} == {other, earlier}  # which is not in the way


def test_quickstart_that_was_interrupted_says_last_that_it_starts_anew(sandbox):
    sandbox.program("python3")
    (sandbox.base / "interrupted").touch()
    done = sandbox.run("quickstart.sh")
    assert done.returncode == 130
    *_, goes_on, last = done.stderr.splitlines()
    command = "NPROC_PER_NODE=2 ./launch/pretrain.sh configs/quickstart.toml"  # two ranks, as this start had
    assert goes_on == f"megamix: interrupted; to go on, repeat the command: {command}"
    assert last == "interrupted; ./launch/quickstart.sh would start anew"


def test_quickstart_says_when_torch_cannot_use_a_gpu_that_is_there(sandbox):
    sandbox.program("python3")
    sandbox.program("nvidia-smi", "#!/bin/bash\necho 'GPU 0: Big (UUID: 1)'\necho 'GPU 1: Big (UUID: 2)'\n")
    refused = "quickstart.sh", "optimizer.lr=-1"  # it is told before anything is trained
    assert "nvidia-smi shows 2 GPU(s), but torch 9.9+fake cannot use any" in sandbox.run(*refused).stderr
    sandbox.gpus(2)
    assert "nvidia-smi" not in sandbox.run(*refused).stderr
    sandbox.gpus(0)
    sandbox.program("nvidia-smi", "#!/bin/bash\necho 'No devices were found'\nexit 6\n")
    assert "nvidia-smi" not in sandbox.run(*refused).stderr


def test_quickstart_moves_an_earlier_run_aside(sandbox):
    sandbox.program("python3")
    runs = sandbox.repo / "runs"
    for name in ("quickstart", "quickstart.1"):
        (runs / name).mkdir(parents=True)
        (runs / name / "which").write_text(name)
    assert "is now runs/quickstart.2" in sandbox.run("quickstart.sh").stderr
    assert [(runs / f"quickstart.{number}/which").read_text() for number in (1, 2)] == ["quickstart.1", "quickstart"]


def test_quickstart_leaves_an_earlier_run_where_it_is_if_its_settings_are_refused(sandbox):
    sandbox.program("python3")
    (sandbox.repo / "runs/quickstart").mkdir(parents=True)
    assert sandbox.run("quickstart.sh", "optimizer.lr=-1").returncode == 2
    assert [path.name for path in (sandbox.repo / "runs").iterdir()] == ["quickstart"]


@pytest.mark.parametrize("counts", [False, True])
def test_checks_run_in_order_and_judge_coverage_if_asked(sandbox, counts):
    sandbox.program("python3")
    done = sandbox.run("test.sh", "--full", *(["--coverage"] if counts else []))
    assert done.returncode == 0, done.stderr
    lines = [line.removeprefix("python -m ") for line in sandbox.lines() if line.startswith("python -m ")]
    lines.remove("mypy")  # at its own pace
    counted = [
        "coverage erase",
        "coverage run -m pytest -n 2 --dist worksteal --durations=10",
        "coverage combine --quiet",
        "coverage report --fail-under=95",
    ]
    assert lines == [
        "ruff check .",
        "ruff format --check .",
        *(["pytest -n 2 --dist worksteal -m also_wide"] if half_units() else []),  # and the files that have some
        *(counted if counts else ["pytest -n 2 --dist worksteal --durations=10"]),
    ]
    assert re.search(r"^install \d+ s, ruff \d+ s, tests \d+ s$", done.stderr, flags=re.MULTILINE)
    assert set(sandbox.lines("full")) == {"FULL=1"}


@pytest.mark.parametrize("fails", ["ruff", "mypy", "pytest", "coverage"])
def test_whichever_check_fails_fails_the_run_and_says_why(sandbox, fails):
    (sandbox.base / f"{fails}-fails").touch()
    counts = [] if fails == "pytest" else ["--coverage"]
    done = sandbox.run("test.sh", *counts, MEGAMIX_PYTHON=str(sandbox.program("chosen")))
    assert done.returncode == 1
    assert f"{fails}: planted" in done.stdout
    assert ("chosen -m coverage report --fail-under=95" in sandbox.lines()) == (fails == "mypy")  # told behind them


@pytest.mark.parametrize("reached", ["", "tests/near.py\ntests/far away.py\n"])
def test_a_change_runs_what_it_reaches_in_that_order(sandbox, reached):
    sandbox.program("python3")
    (sandbox.base / "reached").write_text(reached)
    assert sandbox.run("test.sh", "--changed", "-x").returncode == 0
    runs = [line.partition("--seconds ")[2] for line in sandbox.lines() if "-m pytest" in line]
    assert runs == (["140 tests/near.py tests/far away.py -x"] if reached else [])


def test_chosen_tests_are_passed_on_and_coverage_is_not_judged(sandbox):
    sandbox.program("python3")
    sandbox.run("test.sh", "--coverage", "-k", "two words")
    lines = [line for line in sandbox.lines() if line != "python -m mypy"]  # at its own pace
    assert "python -m coverage run -m pytest -n 2 --dist worksteal --durations=10 -k two words" in lines
    assert lines[-1] == "python -m coverage report"
    assert set(sandbox.lines("full")) == {"FULL="}


def test_megamix_python_without_tools_says_what_is_left_out(sandbox):
    sandbox.hide("ruff", "mypy", "xdist", "coverage")
    chosen = sandbox.program("chosen")
    done = sandbox.run("test.sh", "--coverage", MEGAMIX_PYTHON=str(chosen))
    assert done.returncode == 0, done.stderr
    wide = ["chosen -m pytest -m also_wide"] if half_units() else []
    assert sandbox.lines() == [*wide, "chosen -m pytest --durations=10"]
    for name in ("ruff", "mypy", "xdist", "coverage"):
        assert f"{name} is left out: {chosen} has none" in done.stderr


def test_ci_runs_the_test_script_and_nothing_else():
    run = ROOT / ".ci" / "run"
    commands = [line for line in run.read_text().splitlines() if line and not line.startswith("#")]
    assert commands[-1].startswith("exec ")
    assert commands[-1].endswith('/launch/test.sh"')
    for script in (run, *(ROOT / "launch").glob("*.sh")):
        assert os.access(script, os.X_OK) == (script.name != "common.sh"), script
