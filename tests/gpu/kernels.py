"""The kernels of a step as an H100 would get them, from the real functions: `python -m tests.gpu.kernels FOLDER` writes
their sources, and kernels.json.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megamix import NAG, AdamW, tuned
from megamix.comm.collectives import Collectives
from megamix.comm.topology import Axis
from megamix.mixed_precision.fused_update import CompiledUpdate, StepScalars, choose_update
from megamix.mixed_precision.grad_reduce import RowStats
from megamix.mixed_precision.optimizers import Optimizer, UpdateGroup
from megamix.model.cross_entropy import compiled_slopes
from tests.gpu.h100 import H100, machine_codes, traffic

OPTIMIZERS = {"AdamW": AdamW(lr=0.01), "NAG": NAG(lr=0.1)}
DTYPES = {"BF16": torch.bfloat16, "FP16": torch.float16, "FP32": torch.float32}
WEIGHT_DECAY = 0.1
OWNERS = 8  # of `half_fp32_sum`
VOCAB = 50304  # of configs/gpt2-124m.toml
ROWS = 19  # of 64 elements, in the last call: what the interpreter repeats
LENGTHS = [64 * rows for rows in (*(2 + step**3 for step in range(49)), ROWS)]


@dataclass
class Kernel:
    """What became of one function, called for many lengths."""

    name: str
    recompiled: int  # graphs that were made after the first call
    sources: list[str]  # the files of the kernels of one call
    arguments: list[Any]  # of the last one: numbers, and tensors by name and offset
    bytes: dict[str, int]  # moved for an element, a row, and once
    machine: list[dict[str, Any]]  # by the configurations that are tried on the device


def main(folder: Path) -> None:
    h100 = H100(folder)
    with h100.in_place_of_cuda():
        found = [*_updates(h100), *_losses(h100)]
        for kernel in found:
            source = folder / f"{kernel.sources[-1]}.py"
            kernel.bytes = traffic(source.read_text())
            kernel.machine = [code._asdict() for code in machine_codes(source)]
    (folder / "kernels.json").write_text(json.dumps([asdict(kernel) for kernel in found], indent=1))


def _updates(h100: H100) -> Iterator[Kernel]:
    """Update and statistics of each optimizer in each dtype, as an engine chooses them."""
    for (name, optimizer), half_name in itertools.product(OPTIMIZERS.items(), ("BF16", "FP16")):
        half_dtype, sums = DTYPES[half_name], {half_name: DTYPES[half_name], "FP32": torch.float32}
        group = UpdateGroup(1.0, WEIGHT_DECAY, tuple(optimizer.states("weight", (64, 64)).items()))
        halves, shards = [_zeros(64 * OWNERS, half_dtype)] * 2, [_zeros(64, dtype) for dtype in sums.values()]
        update, stats = choose_update(optimizer, [group], halves, halves, shards, Collectives(Axis()), True)
        assert isinstance(update, CompiledUpdate)
        for sum_name, sum_dtype in sums.items():
            once = partial(_update, update, optimizer, group, half_dtype, sum_dtype)
            yield _called(h100, f"update, {name}, {half_name}, sums in {sum_name}", once)
            if name == "AdamW" and (sum_name == half_name or half_name == "BF16"):
                yield _called(h100, f"statistics, sums in {sum_name}", partial(_stats, stats, sum_dtype))
            if name == "AdamW" and sum_name != half_name:
                once = partial(_sum, stats, half_dtype)
                yield _called(h100, f"sum of {OWNERS} ranks' {half_name} and its statistics", once)


def _update(
    update: CompiledUpdate, optimizer: Optimizer, group: UpdateGroup, half: torch.dtype, sums: torch.dtype, numel: int
) -> dict[str, Tensor]:
    coefficients = optimizer.coefficients(_zeros((), torch.float64))
    step = StepScalars(_zeros(()), _zeros((), torch.bool), _zeros(()), _zeros(()), coefficients)
    tensors = {"grad": _zeros(numel, sums), "half": _zeros(numel, half), "master": _zeros(numel)}
    states = group.new_states(numel, step.lr.device)
    update(tensors["grad"], tensors["master"], states, tensors["half"], 0, step)
    tensors |= {"multiplier": step.multiplier, "found_inf": step.found_inf, "weight_decay": update._weight_decays[0]}
    return tensors | states | {f"coefficient{number}": one for number, one in enumerate(coefficients)}


def _stats(stats: RowStats, sums: torch.dtype, numel: int) -> dict[str, Tensor]:
    grad = _zeros(numel, sums)
    return {"grad": grad, "rows": stats.of_shard(grad)}


def _sum(stats: RowStats, half: torch.dtype, numel: int) -> dict[str, Tensor]:
    """As an engine has them: the parts in front of a larger buffer, the sum in a bucket's own."""
    parts, grad = _zeros(2 * OWNERS * numel, half)[: OWNERS * numel], _zeros(OWNERS * numel // 2)[:numel]
    return {"parts": parts, "grad": grad, "rows": stats.of_sum(parts.view(OWNERS, -1), grad)}


def _losses(h100: H100) -> Iterator[Kernel]:
    """The loss's slopes, between the products of head and loss, in chunks of one size, as a step's are."""
    compiled = compiled_slopes()

    rows = tuned.LOSS_PART[1] // VOCAB

    def once(rows: int) -> dict[str, Tensor]:
        logits, slope = _zeros((rows, VOCAB)), _zeros((rows, VOCAB), torch.bfloat16)
        return {"logits": logits, "slope": slope, "likelihood": compiled(logits, _zeros(rows, torch.int64), slope)}

    once(rows)
    yield _called(h100, "loss slopes, BF16", once, [rows] * 2)


def _called(h100: H100, name: str, once: Callable[[int], dict[str, Tensor]], lengths: list[int] = LENGTHS) -> Kernel:
    """Call a function that was compiled before, with tensors of many lengths."""
    before = h100.graphs
    for numel in lengths:
        h100.launches.clear()
        tensors = once(numel)
    names = {tensor.untyped_storage()._cdata: name for name, tensor in tensors.items()}
    # What has no name was computed by the caller of the kernel: the group's learning rate.
    arguments = [
        (names.get(one.untyped_storage()._cdata, "lr"), one.storage_offset()) if isinstance(one, Tensor) else one
        for one in h100.launches[-1].arguments
    ]
    return Kernel(name, h100.graphs - before, [launch.kernel for launch in h100.launches], arguments, {}, [])


def _zeros(shape: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device="cuda")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
