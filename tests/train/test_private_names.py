"""A job uses no private modules of torch except those listed here; if the planner cannot be imported, the log says so;
a job that compiles nothing never imports the compiler.
"""

import subprocess
import sys

from tests.builders import tiny_job, write_data

# torch has no public name for these, or no import of its own.
ALLOWED = {
    "torch.utils._pytree": "names the place of a tensor in nested arguments",
    "torch.utils._device": "torch imports it in the name of who enters a torch.device, which is public",
}

SCRIPT = f"""
import builtins, sys
from megamix.cli.verbs import main

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
statuses = [main(["train", sys.argv[1]])]
builtins.__import__ = real
print("refused:", sorted(refused))
print("symbolic shapes:", "torch.fx.experimental.symbolic_shapes" in sys.modules)
statuses.append(main(["train", sys.argv[2]]))
print("compiler:", "torch._dynamo" in sys.modules)
sys.exit(any(statuses))
"""


def test_a_job_on_one_rank_starts_without_torchs_private_modules_and_without_the_compiler(tmp_path):
    write_data(tmp_path / "data")
    jobs = [tmp_path / "refused.toml", tmp_path / "real.toml"]
    for path in jobs:
        job = tiny_job(tmp_path, checkpoint={"folder": str(tmp_path / path.stem)}, steps=3, eval_interval=0)
        path.write_text(job.text)
    run = subprocess.run([sys.executable, "-c", SCRIPT, *jobs], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    refused, real = (line for line in run.stdout.splitlines() if line.startswith("memory | "))
    assert refused.startswith("memory | NOT compared with what was planned: No module named 'torch.")
    assert "_python_dispatch" in next(line for line in run.stdout.splitlines() if line.startswith("refused: "))
    assert real.startswith("memory | held between steps: planned")
    assert run.stdout.count("step 3/3 | loss") == 2
    assert "symbolic shapes: False" in run.stdout.splitlines()  # a part of the compiler that takes 0.6 s by itself
    assert run.stdout.splitlines()[-1] == "compiler: False"
