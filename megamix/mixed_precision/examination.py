"""The examination of a step: whose gradient is not finite, how small gradients are, which updates the half copy misses.

Only steps that `engine.examine_next_step()` has asked for pay for these passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from megamix.mixed_precision.bucket import Bucket
from megamix.mixed_precision.flat_layout import GroupSpan
from megamix.mixed_precision.observer import GRADIENT, StepObserver, Used
from megamix.mixed_precision.step import Examination

# Elements of a chunk, on a CPU and on a GPU; a multiple of ROW. The passes allocate only a few chunks, however large a
# shard is.
_CHUNK, _CHUNK_GPU = 1 << 20, 1 << 24

EXPONENT_BIAS = 127  # exponent bias of FP32
_EXPONENTS = 256
_LANES = 1024  # sets of counters on a GPU


class Examiner(StepObserver):
    """Fills the tables of one step. `param_names`: the whole model's parameters, in registration order."""

    def __init__(self, param_names: Sequence[str], micro_batches: int, device: torch.device):
        layers = layers_of(param_names)
        self._place_of = {name: place for place, name in enumerate(param_names)}
        self._layer_of = {name: layers.index(layer_of(name)) for name in param_names}
        self.examination = Examination(
            tuple(param_names),
            layers,
            local=torch.zeros(micro_batches, len(param_names), 3, dtype=torch.float64, device=device),
            exponents=torch.zeros(len(layers), _EXPONENTS, dtype=torch.int64, device=device),
            zeros=torch.zeros(len(layers), dtype=torch.int64, device=device),
            updates=torch.zeros(len(layers), 2, dtype=torch.int64, device=device),
        )

    def on_gradient(self, name: str, micro_batch: int, grad: Tensor) -> None:
        inf, nan, max_abs = self.examination.local[micro_batch, self._place_of[name]]
        for chunk in torch.split(grad.reshape(-1), _chunk(grad)):
            inf += chunk.isinf().sum()
            nan += chunk.isnan().sum()
            torch.maximum(max_abs, chunk.abs().amax(), out=max_abs)

    def on_use(self, what: Used, bucket: Bucket, values: Tensor) -> None:
        if what != GRADIENT:
            return
        for piece in bucket.pieces:
            layer = self._layer_of[piece.spec.name]
            for chunk in torch.split(values[piece.elements], _chunk(values)):
                count_exponents(chunk, self.examination.exponents[layer])
                self.examination.zeros[layer] += chunk.numel() - chunk.count_nonzero()

    def cut(self, bucket: Bucket, spans: Iterable[GroupSpan]) -> Iterator[GroupSpan]:
        """Yield a bucket's spans in chunks, and compare each before and after its update, so that no copy of a whole
        shard is kept.
        """
        size = _chunk(bucket.master)
        for span in spans:
            for piece in (one for one in bucket.pieces if span.start <= one.start < span.end):
                counts = self.examination.updates[self._layer_of[piece.spec.name]]
                for start in range(piece.start, piece.end, size):
                    part = GroupSpan(span.group, start, min(start + size, piece.end))
                    master = bucket.master[part.start : part.end]
                    old_master = master.clone()
                    yield part
                    half = bucket.precision.dtype
                    changed = master != old_master  # never true in padding: zeros stay zeros
                    counts[0] += changed.sum()
                    counts[1] += (changed & (master.to(half) == old_master.to(half))).sum()


def _chunk(tensor: Tensor) -> int:
    return _CHUNK if tensor.is_cpu else _CHUNK_GPU


def count_exponents(values: Tensor, counts: Tensor) -> None:
    """Add to `counts` how many values have each biased exponent of FP32. Shapes: half or FP32 (n,), INT64 (256,).

    bincount would wait for the device, and histc takes five times as long on a CPU.
    """
    exponents = (values.float().view(torch.int32) >> 23) & (_EXPONENTS - 1)
    ones = torch.ones((), dtype=torch.int64, device=values.device).expand(values.numel())
    if values.is_cpu:
        counts.index_add_(0, exponents, ones)
        return
    # A gradient has about ten different exponents, so a GPU's threads would queue for ten counters. Each lane has
    # counters of its own, and neighbouring elements belong to different lanes.
    lanes = torch.arange(values.numel(), dtype=torch.int32, device=values.device) % _LANES
    by_lane = counts.new_zeros(_LANES * _EXPONENTS).index_add_(0, exponents + _EXPONENTS * lanes, ones)
    counts += by_lane.view(_LANES, _EXPONENTS).sum(0)


def layer_of(param_name: str) -> str:
    """Return the layer of a parameter: its name up to the first number, else without its last part.

    `blocks.0.attention.query.weight` -> `blocks.0`, `embedding.weight` -> `embedding`, `gain` -> `gain`.
    """
    parts = param_name.split(".")
    numbered = next((index for index, part in enumerate(parts[:-1]) if part.isdigit()), len(parts) - 2)
    return ".".join(parts[: max(numbered, 0) + 1])


def layers_of(param_names: Sequence[str]) -> tuple[str, ...]:
    """Return the layers of these parameters, each once, in the order of their first parameters."""
    return tuple(dict.fromkeys(map(layer_of, param_names)))
