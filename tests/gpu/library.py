"""The simulated device's library (device.cpp): built once per source, torch and compiler, loaded before torch."""

import ctypes
import fcntl
import hashlib
import importlib.metadata
import os
import runpy
import shutil
import subprocess
from pathlib import Path

TORCH = Path(str(importlib.metadata.distribution("torch").locate_file("torch")))  # before it is imported
SOURCE = Path(__file__).parent / "device.cpp"
CACHE = Path(__file__).parents[2] / ".simulated_gpu"
FLAGS = ("-std=c++20", "-O1", "-shared", "-fPIC", "-w")


def missing():
    """Return why there can be no simulated device here."""
    built_for = runpy.run_path(str(TORCH / "version.py"))
    if built_for["cuda"] or built_for["hip"] or built_for["xpu"]:
        return "torch is built for real GPUs, and the simulated ones take their place"
    return None if shutil.which("g++") else "no g++ to build the simulated device with"


def build():
    """Return the library, built unless it is there. Raises: subprocess.CalledProcessError."""
    version = subprocess.run(["g++", "-dumpfullversion"], check=True, capture_output=True, text=True).stdout
    key = (SOURCE.read_text(), importlib.metadata.version("torch"), version, FLAGS)
    path = CACHE / f"{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.so"
    CACHE.mkdir(exist_ok=True)
    with (CACHE / "lock").open("w") as lock:  # several pytest processes may want it at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            part = path.with_suffix(".part")
            include = ["-I", TORCH / "include", "-L", TORCH / "lib", "-lc10", "-ltorch_cpu"]
            subprocess.run(["g++", *FLAGS, SOURCE, "-o", part, *include], check=True)
            part.replace(path)
    return path


def load():
    """Put the library in front of torch, which asks only once which devices there are."""
    for name in ("libc10.so", "libtorch_cpu.so", "libtorch.so"):
        ctypes.CDLL(os.fspath(TORCH / "lib" / name), ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(os.fspath(build()))
