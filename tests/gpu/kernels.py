"""The kernels of a step as an H100 would get them, from the real functions: `python -m tests.gpu.kernels FOLDER` writes
their sources, and kernels.json. With TRITON_INTERPRET=1 it then runs each kernel by Triton's interpreter, on each of
its sets of tensors in FOLDER/before.pt, by name, and writes them to FOLDER/after.pt.
"""

import itertools
import json
import os
import re
import runpy
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from megamix import NAG, AdamW, tuned
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
ROWS = 19  # of 64 elements, in the last call: what the interpreter repeats
LENGTHS = [64 * rows for rows in (*(2 + step**3 for step in range(49)), ROWS)]


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
    tensors = {"grad": _zeros(numel, sums), "half": _zeros(numel, half), "master": _zeros(numel)}
    states = group.new_states(numel, step.lr.device)
    update(UpdateSlice(0, tensors["grad"], tensors["master"], states, tensors["half"]), step)
    (at,) = update.scalars.of(step)
    tensors |= {"multiplier": step.multiplier, "found_inf": step.found_inf, "weight_decay": at.weight_decay}
    return tensors | states | {f"coefficient{number}": one for number, one in enumerate(at.coefficients)}


def _stats(stats, sums, numel):
    grad = _zeros(numel, sums)
    return {"grad": grad, "rows": stats.of_shard(grad)}


def _sum(stats, half, numel):
    """As an engine has them: the parts in front of a larger buffer, the sum in a bucket's own."""
    parts, grad = _zeros(2 * OWNERS * numel, half)[: OWNERS * numel], _zeros(OWNERS * numel // 2)[:numel]
    return {"parts": parts, "grad": grad, "rows": stats.of_sum(parts.view(OWNERS, -1), grad)}


def _losses(h100):
    """The loss's slopes, between the products of head and loss, in chunks of one size, as a step's are."""
    compiled, rows = compiled_slopes(), tuned.LOSS_PART[1] // VOCAB

    def once(rows):
        logits, slope = _zeros((rows, VOCAB)), _zeros((rows, VOCAB), torch.bfloat16)
        return {"logits": logits, "slope": slope, "likelihood": compiled(logits, _zeros(rows, torch.int64), slope)}

    once(rows)
    yield _called(h100, "loss slopes, BF16", once, [rows] * 2)


def _called(h100, name, once, lengths=LENGTHS):
    """Call a function that was compiled before, with tensors of many lengths. Return

    sources: the files of the kernels of one call; arguments: of the last one, numbers, and tensors by name and offset;
    recompiled: graphs that were made after the first call; bytes: moved for an element and a row; machine: its code.
    """
    before = h100.graphs
    for numel in lengths:
        h100.launches.clear()
        tensors = once(numel)
    names = {tensor.untyped_storage()._cdata: name for name, tensor in tensors.items()}
    sources, arguments = zip(*h100.launches, strict=True)
    source = h100.folder / sources[-1]
    return {
        "name": name,
        "recompiled": h100.graphs - before,
        "sources": sources,
        # What has no name was computed by the caller of the kernel: the group's learning rate.
        "arguments": [
            (names.get(one.untyped_storage()._cdata, "lr"), one.storage_offset()) if isinstance(one, Tensor) else one
            for one in arguments[-1]
        ],
        "bytes": traffic(source.read_text()),
        "machine": machine_code(source),
    }


def _zeros(shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype, device="cuda")


def interpret_all(folder):
    kernels = {kernel["name"]: kernel for kernel in json.loads((folder / "kernels.json").read_text())}
    sets = torch.load(folder / "before.pt")
    for name, tensors in sets.items():
        for by_name in tensors:
            _interpret(folder / kernels[name]["sources"][0], kernels[name], by_name)
    torch.save(sets, folder / "after.pt")


def _interpret(path, kernel, tensors):
    plain = path.with_name(f"plain_{path.name}")
    # Without Inductor's launcher, which wants a device.
    code = re.sub(r"@triton_heuristics.*?\n\)\n(?=@triton)", "", path.read_text(), flags=re.DOTALL)
    plain.write_text(code.replace("triton_helpers.set_driver_to_gpu()", ""))
    given = [tensors[one[0]].view(-1)[one[1] :] if isinstance(one, list) else one for one in kernel["arguments"]]
    names = re.findall(r"(\w+)(?: : tl.constexpr)?[,)]", re.findall(r"\ndef \w+(\(.*\)):", code)[0])
    block = kernel["machine"]["block"]
    programs = -(-given[names.index("xnumel")] // block)
    runpy.run_path(str(plain))[path.stem][(programs,)](*given, XBLOCK=block)


if __name__ == "__main__":
    (interpret_all if "TRITON_INTERPRET" in os.environ else compile_all)(Path(sys.argv[1]))
