"""The kernels of a step as an H100 would get them, from the real functions: `python -m tests.gpu.kernels FOLDER` writes
their sources, and kernels.json.
"""

import itertools
import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from megamix import NAG, AdamW
from megamix.base import constants
from megamix.comm.collectives import Collectives
from megamix.comm.topology import Axis
from megamix.mixed_precision.fused_update import CompiledUpdate, choose_kernels
from megamix.mixed_precision.update_slice import StepScalars, UpdateSlice
from megamix.model.cross_entropy import compiled_slopes
from tests.gpu.h100 import H100, machine_code, traffic

OPTIMIZERS = {"AdamW": AdamW(lr=0.01), "NAG": NAG(lr=0.1)}
DTYPES = {"BF16": torch.bfloat16, "FP16": torch.float16, "FP32": torch.float32}
WEIGHT_DECAY = 0.1
OWNERS = 8  # of `half_fp32_sum`
VOCAB = 50304  # of configs/gpt2-124m.toml
LENGTHS = [64 * rows for rows in (2, 3, 10, 66, 2 + 48**3)]


def compile_all(folder):
    h100 = H100(folder)
    with h100.in_place_of_cuda():
        kernels = [*_updates(h100), *_losses(h100)]
    (folder / "kernels.json").write_text(json.dumps(kernels, indent=1))


def _updates(h100):
    """Update and statistics of each optimizer in each dtype, as an engine chooses them."""
    for (name, optimizer), half_name in itertools.product(OPTIMIZERS.items(), ("BF16", "FP16")):
        half_dtype, sums = DTYPES[half_name], {half_name: DTYPES[half_name], "FP32": torch.float32}
        group = optimizer.group_of("weight", (64, 64))._replace(weight_decay=(WEIGHT_DECAY,))
        buckets = [
            SimpleNamespace(
                params=_zeros(64 * OWNERS, half_dtype), grads=_zeros(64 * OWNERS, half_dtype), master=_zeros(64),
                grad_sum=_zeros(64, dtype), owners=Collectives(Axis(range(OWNERS))), updated_dtype=half_dtype,
            )
            for dtype in sums.values()
        ]  # fmt: skip
        kernels = choose_kernels(optimizer, [group], buckets, Collectives(Axis()), True)
        update, stats = kernels.update, kernels.row_stats
        assert isinstance(update, CompiledUpdate)
        for sum_name, sum_dtype in sums.items():
            once = partial(_update, update, group, half_dtype, sum_dtype)
            yield _called(h100, f"update, {name}, {half_name}, sums in {sum_name}", once)
            if name == "AdamW" and (sum_name == half_name or half_name == "BF16"):
                yield _called(h100, f"statistics, sums in {sum_name}", partial(_stats, stats, sum_dtype))
            if name == "AdamW" and sum_name != half_name:
                once = partial(_sum, stats, half_dtype)
                yield _called(h100, f"sum of {OWNERS} ranks' {half_name} and its statistics", once)


def _update(update, group, half, sums, numel):
    step = StepScalars(_zeros(()), _zeros((), torch.bool), _zeros(()), _zeros(()))
    states = group.new_states(numel, step.lr.device)
    update(UpdateSlice(0, _zeros(numel, sums), _zeros(numel), states, _zeros(numel, half)), step)


def _stats(stats, sums, numel):
    stats.of_shard(_zeros(numel, sums))


def _sum(stats, half, numel):
    """As an engine has them: the parts in front of a larger buffer, the sum in a bucket's own."""
    parts, grad = _zeros(2 * OWNERS * numel, half)[: OWNERS * numel], _zeros(OWNERS * numel // 2)[:numel]
    stats.of_sum(parts.view(OWNERS, -1), grad)


def _losses(h100):
    """The loss's slopes, between the products of head and loss, in chunks of one size, as a step's are."""
    compiled, rows = compiled_slopes(), constants.LOSS_PART[1] // VOCAB

    def once(rows):
        compiled(_zeros((rows, VOCAB)), _zeros(rows, torch.int64), _zeros((rows, VOCAB), torch.bfloat16))

    once(rows)
    yield _called(h100, "loss slopes, BF16", once, [rows] * 2)


def _called(h100, name, once, lengths=LENGTHS):
    """Call a function that was compiled before, with tensors of many lengths. Return

    kernels: those of one call; tensors: that the last one gets; recompiled: graphs that were made after the first call;
    bytes: moved for an element and a row; machine: its code.
    """
    before = h100.graphs
    for numel in lengths:
        h100.launches.clear()
        once(numel)
    file, arguments = h100.launches[-1]
    source = h100.folder / file
    return {
        "name": name,
        "kernels": len(h100.launches),
        "tensors": sum(isinstance(one, Tensor) for one in arguments),
        "recompiled": h100.graphs - before,
        "bytes": traffic(source.read_text()),
        "machine": machine_code(source),
    }


def _zeros(shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype, device="cuda")


if __name__ == "__main__":
    compile_all(Path(sys.argv[1]))
