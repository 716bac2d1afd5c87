"""A job needs no private module of torch but those named here; where the planner cannot be imported, the log says so;
a job that compiles nothing never imports the compiler.
"""

import subprocess
import sys
from pathlib import Path

from megamix.config import config_to_toml
from tests.train.jobs import tiny_job, write_data

# Where torch has no public name.
ALLOWED = {
    "torch.utils._pytree": "names the place of a tensor in nested arguments",
}

SCRIPT = f"""
import builtins, sys
from megamix.cli import main

real = builtins.__import__
refused = set()

def private(module):
    return module.startswith("torch") and any(part.startswith("_") for part in module.split("."))

def watched(name, globals=None, locals=None, fromlist=(), level=0):
    if (globals or {{}}).get("__name__", "").startswith("megamix") and level == 0:
        for module in (name, *(f"{{name}}.{{part}}" for part in fromlist or ())):
            if private(module) and not any(module.startswith(allowed) for allowed in {sorted(ALLOWED)}):
                refused.add(module)
                raise ModuleNotFoundError(f"No module named {{module!r}}")
    return real(name, globals, locals, fromlist, level)

builtins.__import__ = watched
status = main(["train", sys.argv[1]])
print("compiler:", "torch._dynamo" in sys.modules)
print("refused:", sorted(refused))
sys.exit(status)
"""


def test_a_job_on_one_rank_starts_without_torchs_private_modules(tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    (tmp_path / "job.toml").write_text(config_to_toml(tiny_job(tmp_path, training={"steps": 3, "eval_interval": 0})))
    run = subprocess.run([sys.executable, "-c", SCRIPT, tmp_path / "job.toml"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    (memory,) = [line for line in run.stdout.splitlines() if line.startswith("memory | ")]
    assert memory.startswith("memory | NOT compared with what was planned: No module named 'torch.")
    assert "step 3/3 | loss" in run.stdout
    compiler, refused = run.stdout.splitlines()[-2:]
    assert "_python_dispatch" in refused
    assert compiler == "compiler: False"


def test_nor_does_its_planner_import_the_compiler(tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    (tmp_path / "job.toml").write_text(config_to_toml(tiny_job(tmp_path, training={"steps": 3, "eval_interval": 0})))
    script = SCRIPT.replace("builtins.__import__ = watched", "")
    run = subprocess.run([sys.executable, "-c", script, tmp_path / "job.toml"], capture_output=True, text=True)
    assert "\nmemory | held between steps: planned" in run.stdout, run.stdout + run.stderr
    assert "\ncompiler: False\n" in run.stdout
