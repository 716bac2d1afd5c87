"""To import this before torch makes the process one of a machine with GPUs: cuda:0 to cuda:7, and NCCL between ranks.

Tensors lie in host memory and the CPU's kernels compute at once (device.cpp). What a kernel costs, and that it runs
beside the host, is not simulated; what the host may rely on is. Whatever makes it wait for the device is counted, by
what it is and by place, and may be refused.
"""

import ctypes
import sys
import time
from collections import Counter
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

assert "torch" not in sys.modules, "import tests.gpu.simulated before torch, which asks once what devices there are"

from tests.gpu import library

_library = library.load()

import torch

ops = torch.ops.simulated
NAME = "NVIDIA H100 80GB HBM3"
ROOT = Path(__file__).parents[2]
TESTS = f"{ROOT}/tests/"

waits = Counter()  # what made the host wait for the device, and where
_refusing = 0  # blocks under way in which nothing may
_mode = "default"  # torch's own way to say so: "error" where nothing may


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p)
def _told(kind, what):
    """Count a wait; 1 refuses it. The library's thread may be autograd's own, without a frame of Python."""
    return note_wait(f"{kind.decode()}: {what.decode()}")


def note_wait(what):
    frame = sys._getframe(1)
    while frame is not None and not _is_ours(frame):
        frame = frame.f_back
    file = frame.f_code.co_filename if frame is not None else "backward"
    place = file if frame is None else f"{file.removeprefix(f'{ROOT}/')}:{frame.f_lineno} {frame.f_code.co_name}"
    waits[what, place] += 1
    # What a test of the CPU's looks at in a hook is its own affair.
    return int((_refusing > 0 or _mode == "error") and (not file.startswith(TESTS) or file.startswith(f"{TESTS}gpu/")))


def _is_ours(frame):
    file = frame.f_code.co_filename
    return file.startswith(f"{ROOT}/") and "site-packages" not in file and file != __file__


_library.on_told(_told)


@contextmanager
def host_may_not_wait():
    """Refuse all that makes the host wait for the device until the end of the block, in any thread."""
    global _refusing
    _refusing += 1
    try:
        yield
    finally:
        _refusing -= 1


class Event:
    """Complete once the host has waited for it, or for something behind it: not before, however long ago it was."""

    def __init__(self, enable_timing=False, **_):
        self._timed, self._until, self._s = enable_timing, 0, 0.0

    def record(self, stream=None):
        ops.enter()
        self._until, self._s = ops.issued(), time.perf_counter()

    def query(self):
        return bool(ops.landed() >= self._until)

    def synchronize(self):
        assert self._s, "synchronize() of an event that was not recorded"
        ops.enter()
        note_wait("synchronize of an event")
        ops.land(self._until)

    def elapsed_time(self, end):
        assert all(event._timed for event in (self, end)), "both events must have been made with enable_timing=True"
        assert all(event.query() for event in (self, end)), "CUDA error: device not ready"
        return 1e3 * (end._s - self._s)


class Stream:
    """Do at once what is put on one."""

    def __init__(self, device=None):
        pass

    def wait_stream(self, other):
        pass

    def synchronize(self):
        ops.enter()
        note_wait("synchronize of a stream")
        ops.land(ops.issued())


def synchronize(device=None):
    note_wait("synchronize of a device")
    ops.land(ops.issued())


def _set_sync_debug_mode(mode):
    global _mode
    _mode = mode


def _exchange_device(to):
    before = ops.current_device()
    if to >= 0:
        ops.set_device(to)
    return int(before)


def _index(device=None):
    index = device if isinstance(device, int) else getattr(torch.device(device or "cuda"), "index", None)
    return int(ops.current_device()) if index is None else index


_resize_on_cpu = torch.UntypedStorage.resize_


def _resize(storage, size):
    """Functions for a GPU's memory that torch's CPU build lacks."""
    if storage.device.type == "cpu":
        return _resize_on_cpu(storage, size)
    ops.resize(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (0,), (1,)), size)
    return storage


torch.UntypedStorage.resize_ = _resize

# Queries of programs to `torch.cuda`.
_properties = SimpleNamespace(name=NAME, major=9, minor=0, multi_processor_count=132, total_memory=80 << 30)
vars(torch.cuda).update(
    is_available=lambda: True,
    is_initialized=lambda: True,
    _is_compiled=lambda: True,
    _lazy_init=lambda: None,
    device_count=lambda: int(ops.device_count()),
    current_device=lambda: int(ops.current_device()),
    set_sync_debug_mode=_set_sync_debug_mode,
    set_device=lambda device: ops.set_device(_index(device)),
    _exchange_device=_exchange_device,
    _maybe_exchange_device=_exchange_device,
    get_device_name=lambda device=None: NAME,
    get_device_properties=lambda device=None: _properties,
    get_device_capability=lambda device=None: (9, 0),
    is_bf16_supported=lambda including_emulation=True: True,
    memory_allocated=lambda device=None: ops.live(_index(device)),
    max_memory_allocated=lambda device=None: ops.peak(_index(device)),
    reset_peak_memory_stats=lambda device=None: ops.reset_peak(_index(device)),
    synchronize=synchronize,
    empty_cache=lambda: None,
    is_current_stream_capturing=lambda: False,
    manual_seed_all=lambda seed: None,  # the generator is the CPU's
    get_rng_state=lambda device=None: torch.get_rng_state(),
    set_rng_state=lambda state, device=None: torch.set_rng_state(state),
    Event=Event,
    Stream=Stream,
    stream=lambda stream: nullcontext(),
    current_stream=lambda device=None: Stream(),
    cudart=lambda: SimpleNamespace(cudaHostRegister=lambda place, size, flags: ops.pin(place, size)),
)
torch._C._cuda_getCurrentRawStream = lambda index: 0  # Dynamo imports it
torch.cuda.nccl.version = lambda: (2, 28, 9)

from tests.gpu import gloo, nccl

nccl.answer()
gloo.answer()
