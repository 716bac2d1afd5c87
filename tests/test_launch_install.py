"""The scripts choose the right Python, install only when needed, and leave everything else alone."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.sandbox import ROOT, Sandbox


@pytest.fixture
def sandbox(tmp_path):
    return Sandbox(tmp_path)


REFUSED = "optimizer.lr=-1"  # the quickstart's end, behind its install


def install(sandbox):
    return sandbox.run("test.sh", "--install-only")


def first_words(sandbox):
    return [line.split()[0] for line in sandbox.lines()]


def test_first_new_enough_python_is_taken(sandbox):
    sandbox.program("python3", "#!/bin/bash\nexit 1\n")  # too old, as far as the check can see
    sandbox.program("python3.12")
    done = install(sandbox)
    assert done.returncode == 0, done.stderr
    assert sandbox.lines()[0] == "python3.12 -m venv"


def test_no_python_is_a_message(sandbox):
    done = sandbox.run("quickstart.sh")
    assert done.returncode == 2
    assert "no Python >= 3.11 with the venv module on PATH" in done.stderr
    assert "MEGAMIX_PYTHON" in done.stderr
    assert not (sandbox.repo / ".venv").exists()


def test_torch_is_installed_first_at_its_pin_then_the_extras_and_triton_apart(sandbox):
    sandbox.program("python3")
    done = install(sandbox)
    _, torch, extras, triton = sandbox.lines()
    (pin,) = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")]
    assert torch.endswith(f"-c {sandbox.repo}/constraints.txt {pin}")
    assert extras.endswith(f"-c {sandbox.repo}/constraints.txt -e .[all,dev]")
    assert f"--target {sandbox.repo}/.venv/triton triton==" in triton
    assert "installed in " in done.stderr


def test_the_oldest_torch_gets_an_environment_and_a_python_of_its_own(sandbox):
    sandbox.program("python3")
    done = sandbox.run("test.sh", "--oldest")
    assert done.returncode == 2
    assert "(tried python3.12); install one (Debian and Ubuntu: apt install python3.12 python3.12-venv)" in done.stderr
    python = sandbox.program("python3.12")
    noted = 'echo "pip $*" >>"$BASE/log"'
    python.write_text(python.read_text().replace(noted, f'{noted}; [[ "$5" != -c ]] || cat "$6" >"$BASE/pins"'))
    assert sandbox.run("test.sh", "--oldest").returncode == 0
    venv, torch, extras, _, tests = sandbox.lines()
    (oldest,) = re.findall(r'"torch>=([0-9.]+)"', (ROOT / "pyproject.toml").read_text())
    assert venv == "python3.12 -m venv"
    assert torch.endswith(f" torch=={oldest}.0")
    assert extras.endswith("-e .[all,dev]")
    assert (sandbox.repo / ".venv-oldest").is_dir()
    assert not (sandbox.repo / ".venv").exists()
    pins = (sandbox.base / "pins").read_text().splitlines()
    assert [pin for pin in pins if pin.startswith(("torch==", "setuptools=="))] == [f"torch=={oldest}.0"]
    assert [pin for pin in pins if pin.startswith("numpy==")] != []
    assert not Path(torch.split(" -c ")[1].split()[0]).exists()
    handful = tests.removeprefix("python -m pytest -n 2 --dist worksteal ").split()
    assert len(handful) > 10
    assert [name for name in handful if not (ROOT / name).exists()] == []


def test_an_install_that_takes_long_says_every_four_seconds_that_it_is_at_work(sandbox):
    """Seconds pass at once here: the stand-in for sleep takes none, and pip waits for 22 of them."""
    python = sandbox.program("python3")
    (sandbox.bin / "sleep").unlink()
    sandbox.program("sleep", '#!/bin/bash\necho >>"$BASE/slept"\n[[ ! -e "$BASE/waited" ]]\n')
    slept = '[[ -e "$BASE/slept" && $(grep -c "" "$BASE/slept") -gt 22 ]]'
    wait = f'rm -f "$BASE/slept"; until {slept}; do :; done; touch "$BASE/waited"'
    text = python.read_text().replace('echo "pip $*" >>"$BASE/log"', f'[[ "$*" != *torch==* ]] || {{ {wait}; }}')
    sandbox.program("python3", text)
    (sandbox.bin / "touch").symlink_to(shutil.which("touch") or "")
    done = sandbox.run("quickstart.sh", REFUSED)
    assert re.findall(r"^installing torch==\S+: (\d+) s$", done.stderr, flags=re.MULTILINE)[:3] == ["4", "8", "12"]


def test_second_call_installs_nothing_until_a_pin_changes(sandbox):
    sandbox.program("python3")
    install(sandbox)
    sandbox.lines()
    assert install(sandbox).returncode == 0
    assert sandbox.lines() == []
    with (sandbox.repo / "constraints.txt").open("a") as pins:
        pins.write("# changed\n")
    install(sandbox)
    assert first_words(sandbox) == ["pip", "pip", "pip"]


def test_quickstart_reuses_what_the_tests_installed_but_not_the_reverse(sandbox):
    sandbox.program("python3")
    sandbox.run("quickstart.sh", REFUSED)
    assert any(line.endswith("-e .[all]") for line in sandbox.lines())
    install(sandbox)
    assert any(line.endswith("-e .[all,dev]") for line in sandbox.lines())
    sandbox.run("quickstart.sh", REFUSED)
    assert not any(line.startswith("pip") for line in sandbox.lines())


def test_a_user_installs_without_what_only_tests_need_and_an_extra_by_its_name(sandbox):
    sandbox.program("python3")
    done = sandbox.run("install.sh", "transformers", "wandb")
    assert done.returncode == 0, done.stderr
    installs = [line.rpartition(" -e ")[2] for line in sandbox.lines() if " -e " in line]
    assert installs == [".[all]", ".[transformers]", ".[wandb]"]
    assert ". .venv/bin/activate` puts megamix on PATH" in done.stderr
    assert sandbox.run("install.sh").returncode == 0
    assert sandbox.lines() == []
    done = sandbox.run("install.sh", "transformer")
    assert done.returncode == 2
    assert "transformer: is no extra of pyproject.toml; write launch/install.sh transformers" in done.stderr
    done = sandbox.run("install.sh", "wandb", MEGAMIX_PYTHON=str(sandbox.program("chosen")))
    assert done.returncode == 2
    assert "wandb: nothing is installed for MEGAMIX_PYTHON" in done.stderr


def test_killed_install_is_made_anew(sandbox):
    sandbox.program("python3")
    (sandbox.base / "killed-install").touch()
    assert install(sandbox).returncode != 0
    half = sandbox.repo / ".venv" / "half-a-package"
    half.touch()
    sandbox.lines()
    done = install(sandbox)
    assert done.returncode == 0
    assert "is unfinished; installing it again" in done.stderr
    assert not half.exists()
    assert first_words(sandbox) == ["python3", "pip", "pip", "pip"]
    assert install(sandbox).returncode == 0
    assert sandbox.lines() == []


def test_environment_that_broke_is_made_anew(sandbox):
    sandbox.program("python3")
    install(sandbox)
    (sandbox.repo / ".venv" / "bin" / "python").unlink()
    sandbox.lines()
    done = install(sandbox)
    assert "no longer works; installing it again" in done.stderr
    assert first_words(sandbox) == ["python3", "pip", "pip", "pip"]


def test_environment_of_someone_else_is_used_or_refused_but_not_deleted(sandbox):
    python = sandbox.program("python3")
    mine = sandbox.repo / ".venv" / "bin"
    mine.mkdir(parents=True)
    shutil.copy(python, mine / "python")
    (sandbox.base / "no-pip").touch()
    done = install(sandbox)
    assert done.returncode == 2
    assert "was not made by this script" in done.stderr
    assert (mine / "python").exists()
    (sandbox.base / "no-pip").unlink()
    assert install(sandbox).returncode == 0
    assert first_words(sandbox) == ["pip", "pip", "pip"]


@pytest.mark.parametrize("name", ["bin/chosen", "chosen"])
def test_megamix_python_is_used_as_it_is(sandbox, name):
    sandbox.program("python3")
    sandbox.program("chosen")
    done = sandbox.run("quickstart.sh", MEGAMIX_PYTHON=name)
    assert done.returncode == 0, done.stderr
    assert {*first_words(sandbox)} == {"chosen"}
    assert not (sandbox.repo / ".venv").exists()


@pytest.mark.parametrize(
    ("script", "name", "want"),
    [
        ("quickstart.sh", "nowhere", "got nowhere, there is no such program; name an interpreter or unset it"),
        ("test.sh", "old", "it is no Python >= 3.11"),
        ("pretrain.sh", "silent", "it is no Python >= 3.11"),
        *((f"{script}.sh", "broken", "it cannot import: torch") for script in ("quickstart", "test", "pretrain")),
    ],
)
def test_megamix_python_that_cannot_work_is_a_message(sandbox, script, name, want):
    sandbox.program("old")
    sandbox.program("silent", "#!/bin/bash\n")  # ends with 0 whatever it is asked, as /bin/true
    if name == "broken":
        sandbox.program("broken")
        (sandbox.modules / "torch.py").write_text("raise ImportError('planted')\n")
    config = [str(sandbox.repo / "configs/quickstart.toml")] if script == "pretrain.sh" else []
    done = sandbox.run(script, *config, MEGAMIX_PYTHON=name)
    assert done.returncode == 2
    assert "MEGAMIX_PYTHON: got " in done.stderr
    assert name in done.stderr
    assert want in done.stderr
    assert sandbox.lines() == []


def test_a_script_beside_the_clone_imports_the_package_and_not_the_clone_s_folder(tmp_path):
    """By the hook that pip calls for an editable install; -S and -I leave out this environment's own."""
    clone = tmp_path / "megamix"
    (clone / "megamix").mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE", "megamix/__init__.py"):
        shutil.copy(ROOT / name, clone / name)
    build = "import sys; from setuptools.build_meta import build_editable; print(build_editable(sys.argv[1]))"
    built = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)], cwd=clone, capture_output=True, text=True, check=True
    )
    zipfile.ZipFile(tmp_path / built.stdout.splitlines()[-1]).extractall(tmp_path / "installed")
    find = "import sys, site, importlib.util as u; sys.path.insert(0, '.'); site.addsitedir('installed')"
    found = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"{find}; print(u.find_spec('megamix').origin)"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert found.stdout.strip() == str(clone / "megamix/__init__.py")
