"""The device of a run of the tests, `pytest --device`.

cpu        No test sees a GPU, nor does a rank or a program that a test starts.
cuda       The tests of ROOMS make their tensors on the GPU, and their ranks share it over Gloo. What the simulated GPU
           cannot run (tests/gpu/cpu_only.txt) is left out, so every failure is one of the real GPU alone. The tests
           marked `real_gpu`, which compare it with the CPU, run too.
simulated  The tests of ROOMS on the simulated GPU. Those of cpu_only.txt must fail, all others pass.
"""

import importlib
import os
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOMS = ("tests/mixed_precision", "tests/model", "tests/distributed")
DEADLINE_S = 30.0  # of a case on ranks that share a GPU
CPU_ONLY = Path(__file__).parent / "gpu/cpu_only.txt"  # written by `python -m tests.gpu.cpu_only`


def prepare(device):
    """Make this process one that sees what it shall see. Call it before torch is imported."""
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return
    if device == "simulated":
        from tests.gpu import library

        if reason := library.missing():
            raise pytest.UsageError(f"--device simulated: {reason}")
        importlib.import_module("tests.gpu.simulated")
    import torch

    if not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: torch sees no GPU here; megamix doctor says why")


def preloaded(device):
    """Return the modules that a rank must import before torch."""
    return ["tests.gpu.simulated"] if device == "simulated" else []


@contextmanager
def default_device(device):
    """Make tensors without a device on this one. What a generator of the host draws is drawn there, and moved."""
    if device == "cpu":
        yield
        return
    import torch
    from torch.overrides import TorchFunctionMode

    gpu = torch.device("cuda", torch.cuda.current_device())
    draws = (torch.rand, torch.randn, torch.randint, torch.randperm)

    class DrawnOnTheHost(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            if func in draws and kwargs.get("generator") is not None and "device" not in kwargs:
                return func(*args, **kwargs, device="cpu").to(gpu)
            return func(*args, **kwargs)

    with gpu, DrawnOnTheHost():
        yield


def moved(device, values):
    """Return the tensors among a module's values, which its import has made on the CPU, on this device."""
    if device == "cpu":
        return {}
    import torch

    return {name: value.to("cuda") for name, value in values.items() if isinstance(value, torch.Tensor)}


def cpu_only():
    """Return the tests that the simulated GPU cannot run, and why: whole ones, or single cases."""
    lines = CPU_ONLY.read_text(encoding="utf-8").splitlines()
    return {name: why for name, _, why in (line.partition("\t") for line in lines)}


def is_of_two(item):
    """Return whether a test compares a real GPU with the CPU, and says itself what lies where."""
    return item.get_closest_marker("real_gpu") is not None


def chosen(device, items):
    """Return the tests of a run on another device than the CPU. What the simulated one cannot run must fail on it."""
    reasons, found = cpu_only(), []
    for item in items:
        reason = reasons.get(item.nodeid) or reasons.get(item.nodeid.partition("[")[0])
        if reason:
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
        if is_of_two(item):
            runs = device == "cuda"
        else:
            runs = item.nodeid.startswith(ROOMS) and not (reason and device == "cuda")
        if runs:
            found.append(item)
    return found
