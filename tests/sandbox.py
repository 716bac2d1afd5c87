"""A folder in which the scripts of launch/ run against stand-ins, so that no real Python, torch or GPU decides."""

import shutil
import subprocess
import sys
from pathlib import Path

from megamix.base.machine import half_units

ROOT = Path(__file__).parents[1]
SYSTEM = (
    *("bash", "cat", "cksum", "cp", "date", "dirname", "grep", "mkdir", "mktemp", "mv", "rm", "sed", "sleep", "sort"),
    *("tail", "timeout"),
)

# A stand-in for python: it records what it is asked to do. $BASE is the folder of the test. Programs from stdin or -c
# are run for real, by the Python that runs this test, unless the name ends in "old": that fails every such check.
PYTHON = """#!/bin/bash
name="${0##*/}"
echo "$1 $2 $3" >>"$BASE/started"
case "$1 $2" in
  "-m venv")
    echo "$name -m venv" >>"$BASE/log"
    mkdir -p "$3/bin"
    cp "$0" "$3/bin/python"
    ;;
  "-m pip")
    [[ "$3" != --version ]] || { [[ ! -e "$BASE/no-pip" ]]; exit; }
    shift 2
    echo "pip $*" >>"$BASE/log"
    [[ ! -e "$BASE/killed-install" ]] || { rm "$BASE/killed-install"; kill -9 $PPID; }
    ;;
  "-m ruff" | "-m mypy" | "-m pytest" | "-m coverage")
    echo "$name $*" >>"$BASE/log"
    echo "FULL=${MEGAMIX_FULL-}" >>"$BASE/full"
    [[ ! -e "$BASE/$2-fails" ]] || { echo "$2: planted"; exit 1; }
    ;;
  "-m megamix")
    [[ "$3" != prepare && "$3" != report ]] || { echo "$name $*" >>"$BASE/log"; exit 0; }
    exec "$REAL_PYTHON" "$@"
    ;;
  "-m tests.changed") cat "$BASE/reached" ;;
  "-m megamix.cli.pretrain")
    shift 2
    exec "$REAL_PYTHON" "$BASE/pretrain.py" "$name" "$@"
    ;;
  "--version ") echo "Python 3.x stand-in" ;;
  *)
    [[ "$name" != *old ]] || exit 1
    exec "$REAL_PYTHON" "$@"
    ;;
esac
"""

# The process of pretrain.sh: it judges the configuration and counts GPUs for real, as if the files were there, and
# records the ranks that it would start.
PRETRAIN = """
import os, sys
from pathlib import Path
from megamix.cli import pretrain, train

def record(name, line):
    with Path(os.environ["BASE"], name).open("a") as file:
        print(line, file=file)

def outlook_of(arguments, config, tell):
    assert "torch.distributed" not in sys.modules
    record("checked", f"WORLD_SIZE={os.environ['WORLD_SIZE']}")
    record("asked", f"{arguments.config} {arguments.check} {arguments.memory}")
    return "no problems"

def start_ranks(config, machines, job, request, began_s):
    record("log", " ".join([sys.argv[1], "ranks", str(machines.ranks), *job]))
    record("machines", f"{machines.number} {machines.this} {machines.address} {machines.port}")
    record("left", " ".join(name for name in os.environ if name.startswith("PET_")))
    settings = [os.environ.get(name, "") for name in ("OMP_NUM_THREADS", "MALLOC_TRIM_THRESHOLD_")]
    record("environment", "OMP_NUM_THREADS={} MALLOC={}".format(*settings))
    return 75 if Path(os.environ["BASE"], "interrupted").exists() else 0

train.outlook_of, pretrain.start_ranks = outlook_of, start_ranks
sys.exit(pretrain.main(sys.argv[2:]))
"""

TORCH = """
import types
__version__ = "9.9+fake"
float16, bfloat16 = "FP16", "BF16"
cpu = types.SimpleNamespace(get_capabilities=lambda: {{"avx512_bf16": {halves}}})
cuda = types.SimpleNamespace(is_available=lambda: {gpus} > 0, device_count=lambda: {gpus})
"""


class Sandbox:
    """A copy of the repository's scripts, beside a PATH of stand-ins."""

    def __init__(self, base):
        self.base = base
        self.repo = base / "repo"
        self.bin = base / "bin"
        self.modules = base / "modules"
        for folder in (self.repo, self.bin, self.modules):
            folder.mkdir()
        shutil.copytree(ROOT / "launch", self.repo / "launch")
        shutil.copytree(ROOT / "configs", self.repo / "configs")
        for name in ("pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, self.repo / name)
        for name in SYSTEM:
            program = shutil.which(name)
            assert program, name
            (self.bin / name).symlink_to(program)
        (self.base / "pretrain.py").write_text(PRETRAIN)
        self.gpus(0)

    def gpus(self, count):
        (self.modules / "torch.py").write_text(TORCH.format(gpus=count, halves=bool(half_units())))

    def hide(self, *names):
        """Let these modules not be there."""
        (self.modules / "sitecustomize.py").write_text(f"import sys; sys.modules.update(dict.fromkeys({names}))\n")

    def program(self, name, text=PYTHON):
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def run(self, script, *arguments, **variables):
        environment = {
            "PATH": str(self.bin),
            "HOME": str(self.base),
            "BASE": str(self.base),
            "REAL_PYTHON": sys.executable,
            # Two stand-ins for torch written within a second have the same age and size: the cache would mix them up.
            "PYTHONDONTWRITEBYTECODE": "1",
            # torch is the stand-in, megamix the real one.
            "PYTHONPATH": f"{self.modules}:{ROOT}",
            **variables,
        }
        command = ["bash", str(self.repo / "launch" / script), *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=self.base, check=False)

    def lines(self, name="log"):
        """Records of the stand-ins since the last call."""
        path = self.base / name
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines
