"""The operations that a step launches on a GPU, counted on fake tensors at 1.24e9 parameters, are a few hundred,
compiled or not, and no more for more elements.
"""

import contextlib
from collections import Counter
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from megamix import AdamW, Precision, ShardedEngine, Sharding
from megamix.checkpoint.snapshot import buffer_parts, owned_parts
from megamix.config import load_config
from megamix.mixed_precision import census, fused_update, module_state
from megamix.mixed_precision import engine as engine_module
from megamix.mixed_precision.guards import unseen_writes
from megamix.model.transformer import Transformer
from tests.gpu.h100 import fake_tensors

CONFIG = Path(__file__).parents[2] / "configs/llama3.2-1b.toml"
BUCKETS, LAYERS = 22, 16
# Operations that only make a view, or allocate memory.
FREE = {"empty", "new_empty", "empty_strided", "empty_like", "detach", "device", "split", "split_with_sizes"}


class Operations(TorchDispatchMode):
    """Counts by name; a compiled function is one."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()
        self._inside = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.split("::")[1]
        is_view = any(out.alias_info and not out.alias_info.is_write for out in function._schema.returns)
        if not self._inside and not is_view and name not in FREE:
            self.counts[name] += 1
        # A fused kernel that writes in place has no form for fake tensors.
        return None if name.startswith("_fused_") else function(*args, **(kwargs or {}))

    def compiled(self, function):
        def once(*args):
            self.counts["compiled"] += not self._inside
            self._inside += 1
            try:
                return function(*args)
            finally:
                self._inside -= 1

        return once


@contextlib.contextmanager
def _an_engine(operations, scale, compiled, num_layers):
    model_config = load_config(CONFIG, []).model
    sizes = {
        "num_layers": num_layers,
        "hidden_size": scale * model_config.hidden_size,
        "ffn_hidden_size": scale * model_config.ffn_hidden_size,
    }
    data_ptr = Tensor.data_ptr

    def place(tensor):
        fake = isinstance(tensor.data, FakeTensor)
        return tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.itemsize if fake else data_ptr(tensor)

    with (
        fake_tensors(),
        mock.patch.object(Tensor, "data_ptr", place),
        mock.patch.object(engine_module.refusals, "check_arguments"),  # refuses tensors that are not plain
        mock.patch.object(engine_module, "refuse_shared_elements"),  # asks where tensors lie
        mock.patch.object(engine_module.refusals, "require_equal"),  # reads the device
        mock.patch.object(census, "require_equal"),
        mock.patch.object(module_state, "require_equal"),
        mock.patch.object(torch, "equal", return_value=True),  # likewise: nothing moves a buffer
        mock.patch.object(census, "gather_json", lambda collectives, value, device: [value]),
        mock.patch.object(Transformer, "reset_parameters", Transformer.tie),
        mock.patch.object(fused_update, "_compile", operations.compiled),
        mock.patch.object(unseen_writes, "HostNumbers", lambda *_: mock.Mock(read=lambda: np.zeros(2))),  # no pinning
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),  # there is no stream
    ):
        with torch.device("cuda"):
            model = Transformer(model_config.model_copy(update={**sizes, "compile": False}))
        sharding = Sharding(units=[*model.blocks], bucket_size=40_000_000 * scale**2)
        engine = ShardedEngine(
            model, AdamW(lr=0.01), Precision(torch.bfloat16), sharding, clip_grad=1.0, compile_update=compiled,
        )  # fmt: skip
        assert len(engine.plan.layout.buckets) == BUCKETS or num_layers < LAYERS
        yield engine


def _count(scale, compiled, *, examined=False, num_layers=LAYERS):
    """Operations of the first step, which is checked for writes past the engine, and of one that is not, each in the
    ready hooks of backward, without the model's own, and in `step()`.
    """
    operations, found = Operations(), []
    with _an_engine(operations, scale, compiled, num_layers) as engine, operations:
        grads = [torch.zeros_like(param) for param in engine.module.parameters()]
        for number in range(unseen_writes._FIRST + 1):
            if examined and number == unseen_writes._FIRST:
                engine.examine_next_step()
            operations.counts.clear()
            _backward(engine, grads)
            hooks = operations.counts.total()
            engine.step()
            found.append((hooks - len(engine.plan.entries.params), operations.counts.total() - hooks))
    return found[0], found[-1]


def _backward(engine, grads):
    """Let these gradients come, without a model that computes them."""
    with engine.micro_batches(1), engine.backward_pass(0, engine.plan.param_names):
        engine.progress.scaled(torch.zeros((), device="cuda"), 1.0, counts=True)
        for param, grad in zip(engine.module.parameters(), grads, strict=True):
            param.grad = grad
        engine.collect(engine.plan.param_names)


def test_a_step_is_some_hundred_operations_however_many_elements():
    _, (hooks, step) = _count(1, compiled=True)
    assert (hooks <= 10, step <= 180) == (True, True), (hooks, step)
    (_, checked), (hooks, step) = _count(1, compiled=False)
    assert (hooks <= 10, step <= 500) == (True, True), (hooks, step)
    assert 0 < checked - step <= 600  # five for each 16 Mi elements, seven for each bucket
    (_, small), (_, large) = (_count(scale, compiled=False, num_layers=1)[1] for scale in (1, 2))
    assert small == large > 0


def test_a_mirror_is_a_copy_for_each_parameter_and_state():
    with _an_engine(Operations(), 1, True, LAYERS) as engine:
        copies = len([*owned_parts(engine), *buffer_parts(engine)])
    assert copies == 3 * 146  # master and two moments


def test_an_examined_step_is_some_thousand_operations_more():
    """Count those of one block of 16, in a few seconds; all have 1,459 and 5,338."""
    (plain_hooks, plain), _ = _count(1, compiled=True, num_layers=1)
    _, (hooks, step) = _count(1, compiled=True, examined=True, num_layers=1)
    assert (plain_hooks + 50 < hooks <= 300, plain + 50 < step <= 1000) == (True, True), (hooks, step)
