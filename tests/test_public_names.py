"""Public names are listed once, in a stub, and each is imported on its first use; a wheel has the stub, and the names
are found when the wheel is imported as a zip. Who imports a module by a name of before is told the present one.
"""

import ast
import importlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import megamix

ROOT = Path(__file__).parents[1]
# Asserts nothing itself: -OO takes asserts out. A module that is imported stands for itself, without torch.
PROGRAM = """
import importlib, sys, types
import megamix
print(megamix.__file__)
print(*megamix.__all__)
importlib.import_module = lambda home: types.SimpleNamespace(AdamW=home)
print(megamix.AdamW)
print("torch" in sys.modules)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    shutil.copytree(ROOT / "megamix", folder / "megamix", ignore=shutil.ignore_patterns("__pycache__"))
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(folder)], cwd=folder, capture_output=True, check=True)
    (built,) = folder.glob("*.whl")
    return built


def test_a_wheel_has_every_data_file(wheel):
    paths = [path for kind in ("toml", "html", "pyi", "typed") for path in ROOT.glob(f"megamix/**/*.{kind}")]
    files = {path.relative_to(ROOT).as_posix() for path in paths}
    assert "megamix/config/other_trainers.toml" in files
    assert files <= {*zipfile.ZipFile(wheel).namelist()}


def test_names_are_found_in_a_zip(wheel):
    command = [sys.executable, "-OO", "-P", "-c", PROGRAM]
    env = os.environ | {"PYTHONPATH": str(wheel)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    where, names, *rest = done.stdout.splitlines()
    assert where.startswith(str(wheel))
    assert names.split() == megamix.__all__
    assert rest == ["megamix.mixed_precision.optim.adamw", "False"]


def test_the_stub_has_a_line_for_each_public_name_and_no_other_line():
    stub = ast.parse((ROOT / "megamix/__init__.pyi").read_text(encoding="utf-8"))
    lines = [line for line in stub.body if isinstance(line, ast.ImportFrom)]
    assert len(lines) == len(stub.body)
    names = [name for line in lines for name in line.names]
    assert all(name.asname == name.name for name in names)
    assert sorted(name.name for name in names) == megamix.__all__
    for line in lines:
        for name in line.names:
            assert getattr(megamix, name.name) is getattr(sys.modules[str(line.module)], name.name)


def test_an_unknown_name_is_no_attribute():
    with pytest.raises(AttributeError, match="module 'megamix' has no attribute 'Nothing'"):
        megamix.Nothing  # noqa: B018  # to read it raises


MOVED = {
    "tuned": "base.constants",
    "hub": "hf",
    "mixed_precision.optimizers": "mixed_precision.optim.optimizer",
    "mixed_precision.nag": "mixed_precision.optim.nag",
    "mixed_precision.links": "mixed_precision.census",
    "report.page": "log.report.page",
    "supervise.launch": "launch.torchrun",
    "builders.data": "train.corpus",
}


@pytest.mark.parametrize("old", MOVED)
def test_an_import_by_a_name_of_before_is_told_the_present_one(old, tmp_path, monkeypatch):
    # A folder that only holds compiled files of before is a package without code.
    monkeypatch.setattr(megamix, "__path__", [*megamix.__path__, str(tmp_path)])
    if "." in old:
        (tmp_path / old.partition(".")[0] / "__pycache__").mkdir(parents=True)
    with pytest.raises(ModuleNotFoundError) as raised:
        importlib.import_module(f"megamix.{old}")
    assert str(raised.value) == f"megamix.{old} has moved to megamix.{MOVED[old]}; CHANGELOG.md has all moves"


@pytest.mark.parametrize("name", ["megamix.unheard", "megamix.checkpoint.settings", "durable"])
def test_a_module_that_never_was_has_not_moved(name):
    with pytest.raises(ModuleNotFoundError, match=f"No module named '{name}'"):
        importlib.import_module(name)
