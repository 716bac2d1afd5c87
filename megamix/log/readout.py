"""Reads single steps on the host: recorded values and counts, FP16's range by layer of an examined step, and the
device's peaks.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import cached_property

import torch
from torch import Tensor

from megamix.base.machine import peak_resident
from megamix.comm.collectives import Collectives, gather_json
from megamix.comm.host import host_collectives
from megamix.comm.topology import Topology
from megamix.log.culprits import headroom, peaks_by_param
from megamix.log.metrics import FIRST_EXPONENT, LAST_EXPONENT, LayerPrecision, recorded_tags
from megamix.log.outcome import Outcome
from megamix.log.recorded import gather_recorded
from megamix.mixed_precision.engine import ShardedEngine
from megamix.mixed_precision.examination import EXPONENT_BIAS, layer_of
from megamix.mixed_precision.step import Examination
from megamix.model.sizes import dense_peak


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak of this rank's memory: allocated on its GPU, or resident on the host if it computes there."""
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_resident()
    return peak / 2**30


class RecordedRows:
    """Values recorded and places counted by the ranks, for the rows that are written. Every rank has one; its calls are
    collective.
    """

    def __init__(self, topology: Topology, timeout_s: float):
        self._topology, self._timeout_s = topology, timeout_s
        self._other_stages_count = topology.pp.size > 1  # known after the first row

    def row(self, outcome: Outcome) -> dict[str, float]:
        """Return an attempt's recorded values by tag.

        If any rank has recorded a value, this takes one small gather on the host. It waits for the ranks, not for a
        device.
        Raises: ValueError on every rank alike.
        """
        if not outcome.recorded.num_values:
            return {}
        values = gather_recorded(outcome.recorded, self._topology, self.side)
        return recorded_tags(values, overflowed=outcome.found_inf)

    def counts(self, outcome: Outcome) -> dict[str, list[float]]:
        """Return the counts of all stages by layer, or by name where a layer counts several times.

        In a pipeline this takes one small gather on the host, as `row` does; where no stage counts, only the first call
        does.
        """
        told = {name: counts.tolist() for name, counts in outcome.tallied.items()}
        if self._other_stages_count:
            mine = told if self._topology.stage.rank == 0 else {}
            by_rank = gather_json(self.side, mine, torch.device("cpu"))
            told = {name: counts for of_rank in by_rank for name, counts in of_rank.items()}
            self._other_stages_count = bool(told)
        layers = Counter(map(layer_of, told))
        # A rank may hold several stages: numbers, here by their length first, bring the model's order back.
        names = sorted(told, key=lambda name: [(len(part), part) for part in name.split(".")])
        return {layer_of(name) if layers[layer_of(name)] == 1 else name: told[name] for name in names}

    @cached_property  # from the first log line on
    def side(self) -> Collectives:
        """Return collectives on the host that no step uses. Every rank must ask for them."""
        # The limit is a moment longer than the watchdog's, so that the watchdog names a missing rank first.
        return host_collectives(self._topology.world, self._timeout_s + 1.0)


def mfu_per_token_rate(flops_per_token: int, engine: ShardedEngine) -> float | None:
    """Return the share of all devices' peak that one token per second takes; None if no peak is known."""
    device = engine.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    peak = dense_peak(name, engine.plan.precision.dtype)
    return None if peak is None else flops_per_token / (peak * engine.topology.world.size)


_LIMITS = (-14, -24)  # exponents of FP16's smallest normal number and of its smallest number


def gather_precision(engine: ShardedEngine, examination: Examination, outcome: Outcome) -> dict[str, LayerPrecision]:
    """Return the numbers of an examined step by layer. Every rank must call it, between steps: one small collective.
    Waits for the device.
    """
    peaks = peaks_by_param(outcome.by_piece, engine.plan.pieces, engine.plan.param_names)
    mine = count_layers(examination, peaks[:, 1], outcome.loss_scale)
    table = engine.world.table(mine.flatten().to(examination.zeros.device))
    return merge_layers(table.cpu().view(-1, *mine.shape), examination.layers)


def count_layers(examination: Examination, max_abs: Tensor, loss_scale: float) -> Tensor:
    """Return one rank's counts: FP64 (layers, 8 counts + histogram + max abs), see `merge_layers`.

    The scale is a power of two. So removing it from an element shifts the exponent, and every threshold is a border of
    two bins.
    Shapes: max_abs FP64 (params,), of the gradient with the scale in it.
    """
    counted, zeros, updates = examination.exponents.cpu(), examination.zeros.cpu(), examination.updates.cpu()
    nonzero = counted[:, :-1].clone()  # without the bin of inf and NaN
    nonzero[:, 0] -= zeros
    scaled = torch.arange(nonzero.shape[1]) - EXPONENT_BIAS
    unscaled = scaled - int(math.log2(loss_scale))
    small = [nonzero[:, exponents < limit].sum(1) for exponents in (scaled, unscaled) for limit in _LIMITS]
    histogram = torch.zeros(len(zeros), LAST_EXPONENT - FIRST_EXPONENT + 1, dtype=torch.int64)
    histogram.index_add_(1, unscaled.clamp(FIRST_EXPONENT, LAST_EXPONENT) - FIRST_EXPONENT, nonzero)
    layers = torch.tensor([examination.layers.index(layer_of(name)) for name in examination.param_names])
    peaks = torch.zeros(len(zeros), dtype=torch.float64).scatter_reduce_(0, layers, max_abs, "amax")  # which keeps NaN
    counts = torch.stack([counted.sum(1), zeros, *small, *updates.T], dim=1)
    return torch.cat([counts.double(), histogram.double(), peaks[:, None]], dim=1)


def merge_layers(by_rank: Tensor, layers: tuple[str, ...]) -> dict[str, LayerPrecision]:
    """Return the numbers of the whole model from all ranks' `count_layers`. Shapes: FP64 (ranks, layers, columns)."""
    totals, peaks = by_rank[..., :-1].sum(0).tolist(), by_rank[..., -1].amax(0).tolist()
    return {layer: _layer(total, peak) for layer, total, peak in zip(layers, totals, peaks, strict=True)}


def _layer(counts: list[float], max_abs: float) -> LayerPrecision:
    elements, zeros, subnormal, below, unscaled_subnormal, unscaled_below, updated, hidden, *histogram = counts
    return LayerPrecision(
        zero_share=zeros / elements,
        subnormal_share=subnormal / elements,
        below_share=below / elements,
        unscaled_subnormal_share=unscaled_subnormal / elements,
        unscaled_below_share=unscaled_below / elements,
        headroom=headroom(max_abs),
        hidden_update_share=hidden / updated if updated else None,
        exponents=tuple(map(int, histogram)),
    )
