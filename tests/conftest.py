"""Fixtures for all tests.

torch and what imports it are imported below: the process that hands tests out to others does without.
"""

import gc
import math
import os
import signal
import sys
import time

import pytest

from megamix.base import progress
from tests import devices
from tests.programs import counting, map_programs, mapped

# The counts that an issue names are run by `./launch/test.sh --full`; otherwise seeded samples of each sweep.
FULL = os.environ.get("MEGAMIX_FULL") == "1"

# For a few small kernels: a pool of compiler processes is another import of torch in every process that compiles, and
# to try each instruction set is a compilation.
os.environ |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "1"}
# The idle threads of a program that a test starts sleep. Spinning, they would take what other processes compute with.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

# The stderr that a test reads must not depend on how long something takes.
progress.SILENT_S = math.inf

if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # under nohup, which the programs that tests start would inherit
    signal.signal(signal.SIGHUP, lambda number, frame: None)
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # behind a shell's &, likewise
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    told = "device of the tests of engine and model (tests/devices.py); on another than the CPU no others run"
    parser.addoption("--device", choices=("cpu", "cuda", "simulated"), default="cpu", help=told)
    parser.addoption("--seconds", type=float, default=math.inf, help="begin no test after that many seconds")


def pytest_configure(config):
    devices.prepare(config.getoption("device"))


def pytest_runtest_setup(item):
    if time.monotonic() - item.config.began_s > item.config.getoption("seconds"):
        pytest.skip("the time of --seconds is over")


def also_wide(values, *chosen):
    """Return the values of a parametrised test, of which the chosen ones run once more with halves computed wide."""

    def marked(value):
        return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.also_wide)

    return [marked(value) if value in chosen else value for value in values]


def pytest_collection_modifyitems(config, items):
    config.began_s = time.monotonic()
    if (device := config.getoption("device")) != "cpu":
        chosen = devices.chosen(device, items)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen


def _on_rank(test, device, case, *args):
    import torch.distributed as dist

    with mapped(test, dist.get_rank() == 0), devices.default_device(device):
        return case(*args)


@pytest.fixture(scope="session", autouse=True)
def processes(pytestconfig):
    """This one has one thread, and ranks inherit what tests import."""
    import torch

    from megamix.tools import ranks

    torch.set_num_threads(1)
    ranks.PRELOADED.append("tests.train.fresh_ranks")  # and what that imports: pytest, a job's command line
    ranks.PRELOADED[:0] = devices.preloaded(pytestconfig.getoption("device"))
    map_programs()


def pytest_sessionfinish():
    """Save what one of several pytest processes has counted: who takes ten seconds to end is killed, and it is lost."""
    if "PYTEST_XDIST_WORKER" in os.environ and (coverage := counting()) is not None:
        coverage.stop()
        coverage.save()


@pytest.fixture(autouse=True)
def default_device(request, monkeypatch):
    """Put what a test makes without a word about the device on the run's, unless the test is about two devices."""
    device = "cpu" if devices.is_of_two(request.node) else request.config.getoption("device")
    for name, tensor in devices.moved(device, vars(request.module)).items():
        monkeypatch.setattr(request.module, name, tensor)
    with devices.default_device(device):
        yield


@pytest.fixture(autouse=True)
def machine_is_shared(monkeypatch):
    """A job that a test runs in its own process leaves that one's threads and malloc alone."""
    monkeypatch.setattr("megamix.cli.train.set_torch_environment", lambda ranks, deterministic: None)
    monkeypatch.setattr("megamix.cli.train.keep_freed_memory", lambda: None)


@pytest.fixture(autouse=True)
def process_is_shared():
    """A launcher that a test runs in its own process leaves signals ignored, which ends with the test. Nothing leaves
    garbage collection off.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    yield
    assert gc.isenabled()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Token files for `tiny_job`. Nobody changes them."""
    from tests.builders import write_data

    folder = tmp_path_factory.mktemp("data") / "data"
    write_data(folder)
    return folder


@pytest.fixture
def doors(tmp_path):
    """Forget the registrations of a test's plugins after it, so that they are imported anew."""
    from megamix import plugins
    from megamix.base import axes

    registries = [value for value in vars(plugins).values() if isinstance(value, plugins.Registry)]
    before = [(registry, dict(registry.sections), dict(registry.registered)) for registry in registries]
    path, known_axes = list(sys.path), dict(axes.AXES)
    yield
    axes.AXES.clear()
    axes.AXES.update(known_axes)
    sys.path[:] = path
    for registry, sections, registered in before:
        registry.sections, registry.registered = sections, registered
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


class RankPools:
    """Real Gloo ranks that wait for work: a pool per world size (megamix/tools/ranks.py), started at first use. On
    another device than the CPU they share it.
    """

    def __init__(self, device="cpu"):
        self._device = device
        self._pools = {}

    def __call__(self, case, world_size, *args, deadline_s=None):
        """Run a top-level function on ranks. A case that fails in a rank fails the test by the rank's name."""
        from megamix.tools.ranks import RankPool

        on_gpu = self._device != "cpu"
        if world_size not in self._pools:
            self._pools[world_size] = RankPool(world_size, "cuda:0" if on_gpu else "cpu")
        if on_gpu:  # its minutes are few, and nothing there is compiled
            deadline_s = min(deadline_s or devices.DEADLINE_S, devices.DEADLINE_S)
        test = os.environ.get("PYTEST_CURRENT_TEST", "")
        return self._pools[world_size].call(_on_rank, test, self._device, case, *args, deadline_s=deadline_s)

    def close(self):
        """End the ranks, and with them what plugins registered there. The next case starts new ones."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


@pytest.fixture(scope="session")
def run_ranks(pytestconfig):
    """`run_ranks(case, world_size, *args)` runs a top-level function on real Gloo ranks."""
    pools = RankPools(pytestconfig.getoption("device"))
    yield pools
    pools.close()
