"""On CPUs `megamix train` takes its share of the cores and sets malloc to keep the memory that a step frees, before
torch is loaded, unless the user's environment says otherwise.
"""

import gc
import os
import platform
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from megamix.base.machine import cpu_name, keep_freed_memory, many_imports, num_cores, set_torch_environment
from tests.builders import tiny_job, write_data
from tests.sandbox import TORCH

# Stands for a job, and says what it finds.
JOB = """
import os, sys, types
from tests.programs import fresh_pages

def run_job(config, lines):
    print(os.environ["OMP_NUM_THREADS"], threads_at_import, fresh_pages(), fresh_pages())

class Finder:  # of the stand-in for torch: what does it find when it is imported?
    def find_spec(name, path, target=None):
        global threads_at_import
        if name == "torch":
            threads_at_import = os.environ.get("OMP_NUM_THREADS")

sys.meta_path.insert(0, Finder)
sys.modules["megamix.train.job"] = types.SimpleNamespace(Lines=lambda *lines: None)
sys.modules["megamix.train.main"] = types.SimpleNamespace(run_job=run_job)
from megamix.cli.verbs import main
sys.exit(main(["train", sys.argv[1]]))
"""
GLIBC = sys.platform == "linux" and "CS_GNU_LIBC_VERSION" in os.confstr_names and os.confstr("CS_GNU_LIBC_VERSION")


def test_a_machine_without_proc_is_named_too(tmp_path, monkeypatch):
    monkeypatch.setattr(platform, "processor", lambda: "an abacus")
    assert cpu_name(tmp_path / "cpuinfo") == "an abacus"
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Fast CPU\n\nmodel name\t: Fast CPU\n")
    assert cpu_name(tmp_path / "cpuinfo") == "Fast CPU"


@pytest.mark.skipif(not GLIBC, reason="another malloc stays as it is")
@pytest.mark.parametrize(
    ("gpus", "variables", "threads", "keeps"),
    [
        (0, {}, num_cores(), True),
        (1, {"LOCAL_WORLD_SIZE": "2"}, max(1, num_cores() // 2), False),
        (0, {"OMP_NUM_THREADS": "7", "MALLOC_MMAP_THRESHOLD_": "131072"}, 7, False),
    ],
)
def test_a_job_by_hand_has_what_the_launcher_s_ranks_have(tmp_path, gpus, variables, threads, keeps):
    write_data(tmp_path / "data")
    (tmp_path / "job.toml").write_text(tiny_job(tmp_path).text)
    (tmp_path / "torch.py").write_text(TORCH.format(gpus=gpus, halves=False))
    paths = f"{tmp_path}:{Path(__file__).parents[1]}"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", JOB, str(tmp_path / "job.toml")], env=environment | {"PYTHONPATH": paths} | variables,
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told, at_import, first, again = map(int, done.stdout.split())
    assert (told, at_import) == (threads, threads)
    assert first > 48
    assert (again < 16) == keeps, (first, again)


@pytest.mark.parametrize(
    ("tunables", "numbers"),
    [
        ("", [-3, -1, -2]),
        ("glibc.malloc.hugetlb=1", [-3, -1, -2]),
        ("glibc.malloc.hugetlb=1:glibc.malloc.trim_threshold=131072", [-3, -2]),
        ("glibc.malloc.mmap_threshold=131072:glibc.malloc.top_pad=0", [-1]),
    ],
)
def test_what_glibc_tunables_say_is_left_alone(monkeypatch, tunables, numbers):
    libc = Mock()
    monkeypatch.setattr("ctypes.CDLL", lambda name: libc)
    for name in [name for name in os.environ if name.startswith("MALLOC_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GLIBC_TUNABLES", tunables)
    keep_freed_memory()
    assert [call.args[0] for call in libc.mallopt.call_args_list] == numbers


@pytest.mark.parametrize(
    ("given", "allocator", "recorded"),
    [
        ({}, "expandable_segments:True", "2000"),
        ({"PYTORCH_ALLOC_CONF": "backend:native", "TORCH_FR_BUFFER_SIZE": "50"}, "backend:native", "50"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native", "TORCH_NCCL_TRACE_BUFFER_SIZE": "50"}, None, None),
    ],
)
def test_torch_s_variables_are_set_for_a_gpu_unless_the_user_has_set_them(monkeypatch, given, allocator, recorded):
    monkeypatch.setattr(os, "environ", dict(given))
    set_torch_environment(1)
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    set_torch_environment(1, deterministic=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert os.environ["TORCH_NCCL_HIGH_PRIORITY"] == "1"
    assert (os.environ.get("PYTORCH_ALLOC_CONF"), os.environ.get("TORCH_FR_BUFFER_SIZE")) == (allocator, recorded)


def test_garbage_is_collected_again_behind_imports_and_only_a_process_that_begins_keeps_what_is_there():
    before = gc.get_freeze_count()
    with many_imports():
        assert not gc.isenabled()
    assert (gc.isenabled(), gc.get_freeze_count()) == (True, before)
    code = (
        "import gc; from megamix.base import machine\nwith machine.many_imports(): pass\nprint(gc.get_freeze_count())"
    )
    began = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(began.stdout) > 1000
