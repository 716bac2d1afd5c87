"""Every command of README.md's jobs, and every command, file and line of Python of docs/start_to_end.md, runs in order
in a copy of the repository with only Python on PATH: texts, training, resume, evaluation, export, import.

--full installs into the copy, runs the quickstart as it is, and each command as the program that a user starts.
"""

import contextlib
import io
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import webbrowser
from pathlib import Path

import pytest

from megamix.cli.verbs import main
from megamix.config import load_config
from tests.builders import run_on_ranks
from tests.conftest import FULL

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/start_to_end.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
# What CI does less of. Each stands on the page exactly once; all else is run as it is written.
SMALLER = {
    "steps = 200": "steps = 6",
    "training.steps=100": "training.steps=3",
    "warmup_steps = 20": "warmup_steps = 2",
    "steps = 20\n": "steps = 2\n",
    "num_layers = 4": "num_layers = 1",
    "--vocab-size 1024": "--vocab-size 400",
    "vocab_size = 1024": "vocab_size = 400",
}


def _blocks(page):
    """Language, content, and for a file the name that the sentence before it gives."""
    found = re.findall(r"^```(\w+)\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    names = iter(re.findall(r"Write\s+this to `([^`]+)`", page))
    return [(language, content, next(names) if language == "toml" else "") for language, content in found]


def _small(page, smaller):
    for whole, part in smaller.items():
        assert page.count(whole) == 1, whole
        page = page.replace(whole, part)
    return page


class Clone:
    """A folder with the repository's files as they are now, and a shell that finds Python in it and nothing of ours."""

    def __init__(self, folder, run_ranks):
        self.root, self.run_ranks, programs = folder / "megamix", run_ranks, folder / "bin"
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():  # a file may be deleted and not yet committed
                copy = self.root / name
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, copy)
        programs.mkdir()
        python = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        (programs / "python3").symlink_to(Path(sys.base_prefix) / "bin" / python)
        of_ours = ("MEGAMIX_", "VIRTUAL_", "PYTHON")
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith(of_ours)}
        self.environment["PATH"] = f"{programs}:/usr/bin:/bin"
        if FULL:
            said = self.bash("./launch/quickstart.sh")
            told = re.search(r"^reached: validation ([\d.]+) nats a token; expect ([\d.]+) to ([\d.]+)$", said, re.M)
            reached, least, most = map(float, told.groups())
            assert least <= reached <= most, said
        else:
            self.environment |= {"MEGAMIX_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}

    def bash(self, command):
        """Run a line of the shell in the copy and return what it prints."""
        where = {"cwd": self.root, "env": self.environment}
        done = subprocess.run(["bash", "-c", command], **where, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def run(self, command, capsys):
        """Run a line of a page and return what it prints; unless --full a verb of megamix, and a job on two ranks, in
        processes that are there: every new one imports torch anew.
        """
        if FULL:
            return self.bash(f". .venv/bin/activate\n{command}")
        words = shlex.split(command, comments=True)
        if words[0] == "NPROC_PER_NODE=2" and words[1].endswith("launch/pretrain.sh"):
            return self.run_ranks(_train, 2, self.root, *words[2:])[0]
        if words[0] == "./launch/pretrain.sh" and words[-1] == "--check":
            words = ["megamix", "train", *words[1:]]
        if words[0] != "megamix":
            return self.bash(command)
        assert main(words[1:]) == 0, command
        return capsys.readouterr().out


def _train(root, config, *overrides):
    """Train on this rank by a file of the copy. Return what is said."""
    with contextlib.chdir(root), contextlib.redirect_stdout(io.StringIO()) as said:
        run_on_ranks(load_config(Path(config), overrides))
    return said.getvalue()


@pytest.fixture(scope="module")
def clone(tmp_path_factory, run_ranks):
    return Clone(tmp_path_factory.mktemp("clone"), run_ranks)


def test_every_command_of_the_page_runs(clone, monkeypatch, capsys):
    monkeypatch.chdir(clone.root)
    said = {}
    for language, content, name in _blocks(_small(PAGE, {} if FULL else SMALLER)):
        if language == "toml":
            Path(name).write_text(content, encoding="utf-8")
        elif language == "python":
            exec(content, {})  # the promise is that a reader can paste it
            said["transformers"] = capsys.readouterr().out
        else:
            assert language == "sh"
            for line in content.splitlines():
                said[line] = clone.run(line, capsys)
    assert len(said) == PAGE.count("\nmegamix ") + PAGE.count("\nNPROC") + 3

    middle, end = (100, 200) if FULL else (3, 6)
    assert "2 rank(s)" in next(text for line, text in said.items() if "pretrain.sh" in line)
    assert (
        f"goes on from runs/start/run/checkpoints/step_{middle:08d} after update {middle}"
        in said["megamix train runs/start/job.toml"]
    )
    assert f"step_{middle:08d}" in said["megamix checkpoint ls runs/start/run"]
    assert f"step_{end:08d}: good" in said["megamix checkpoint verify runs/start/run"]
    # The run in BF16, and what it became in FP32, there and back.
    (run, imported) = (
        float(re.search(r"perplexity ([\d.]+), [\d.]+ bits a byte", text)[1])
        for line, text in said.items() if line.startswith("megamix evaluate")
    )  # fmt: skip
    assert imported == pytest.approx(run, rel=0.02)
    assert imported < 400
    (own,) = (text for line, text in said.items() if line.endswith("--dtype fp32") and "generate" in line)
    assert own == said["transformers"]
    assert own.startswith("A checkpoint")
    next_run = said["megamix train runs/start/next.toml"]
    assert "begins with the weights of runs/start/imported/checkpoints/step_00000000" in next_run
    first_loss = float(re.search(r"loss ([\d.]+)", next_run)[1])
    assert first_loss < math.log(imported) + 0.5, "it begins where the imported model stood"


# CI takes fewer steps than the README's job and commands.
JOB_SMALLER = {
    "configs/base.toml": "small.toml",
    "vocab_size = 4096": "vocab_size = 400",
    "steps = 300": "steps = 40" if FULL else "steps = 4",
}
README_SMALLER = {"--vocab-size 4096": "--vocab-size 400"}
# The configuration on which the job stands: a smaller model.
CONFIG_SMALLER = {
    "seq_len = 256": "seq_len = 32",
    "hidden_size = 192": "hidden_size = 48",
    "num_layers = 4": "num_layers = 2",
    "num_heads = 6": "num_heads = 2",
    "steps = 1000": "steps = 2",
    "warmup_steps = 30": "warmup_steps = 1",
    "micro_batch_size = 8": "micro_batch_size = 1",
    "global_batch_size = 16": "global_batch_size = 4",
    'dtype = "fp16"': 'dtype = "fp16"\nloss_scale.init_scale = 1024',
    'name = "muon"': 'name = "muon"\ncompile = false',
}
STAND_INS = {  # tests/test_slurm_script.py and tests/test_kubernetes.py test what these files say
    "sbatch": 'test -f "$2" && bash -n "$2" && test -f "$3"',
    "kubectl": '[[ "$1 $2" == "apply -f" ]] && test -f "$3"',
}


def _commands(section):
    """Return the commands of a section's first block without a language, without their comments."""
    text = README.partition(f"\n## {section}\n")[2]
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    first = next(block for language, block in blocks if not language)
    return [line.partition("  #")[0].strip() for line in first.splitlines()]


def test_every_command_of_the_readme_runs(clone, monkeypatch, capsys):
    monkeypatch.chdir(clone.root)
    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    clone.environment["BROWSER"] = "true"
    config = _small(Path("configs/base.toml").read_text(encoding="utf-8"), CONFIG_SMALLER)
    Path("small.toml").write_text(config, encoding="utf-8")
    Path("my_texts").mkdir()
    for page in Path("docs").glob("*.md"):
        Path("my_texts", page.name).symlink_to(page.resolve())
    job = re.findall(r"^```toml\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)[0]
    assert len(job.splitlines()) <= 12
    Path("job.toml").write_text(_small(job, JOB_SMALLER), encoding="utf-8")
    said = {}
    activate, *commands = _commands("Your own text")
    assert activate == ". .venv/bin/activate"
    half = " training.steps=20" if FULL else " training.steps=2"  # in place of Ctrl-C
    for command in _small("\n".join(commands), README_SMALLER).splitlines():
        is_first = command.startswith("NPROC_PER_NODE=2")
        said[command] = clone.run(command + half * is_first, capsys)

    assert "no problems; 1 rank" in said["./launch/pretrain.sh job.toml --check"]
    assert "2 rank(s)" in said["NPROC_PER_NODE=2 ./launch/pretrain.sh job.toml"]
    assert "goes on from runs/mine/checkpoints" in said["./launch/pretrain.sh job.toml"]
    assert "perplexity" in said["megamix evaluate runs/mine"]
    assert said['megamix generate runs/mine --prompt "Once upon"'].startswith("Once upon")
    assert {path.name for path in Path("OUT").iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert FULL or [Path(address).name for address in opened] == ["page.html"]
    _scales(clone, capsys)


def _scales(clone, capsys):
    """Run the commands that scale the job. Few ranks stand for eight, and programs of one line for a cluster's."""
    torchrun = {"torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"'}
    for name, body in (STAND_INS | torchrun).items():
        program = clone.root.parent / "bin" / name
        program.write_text(f"#!/bin/bash\n{body}\n")
        program.chmod(0o755)
    script, torchrun, *others, plan = _commands("Scale")
    assert plan.startswith("megamix plan")  # tests/test_readme.py
    alone = torchrun.replace("tensor.size=2", "tensor.size=1")
    for ranks, command in ((2, script), (1, f"export PYTHONPATH=.; {alone}")):
        small = f"{command.replace('8', str(ranks))} checkpoint.folder=runs/scale{ranks}"
        assert f"{ranks} rank(s)" in clone.run(small, capsys)
    for command in others:
        assert command.split()[0] in STAND_INS
        clone.bash(command)
