"""Count the bytes per parameter that a rank holds, by tensor storages on real ranks, and compare with the formulas.

`python docs/studies/memory.py [--small]`. Gradients and weights are counted, activations kept out of the way: a stack
of linear layers sees one sample. Between steps nothing but the state is alive; the peak is that of a whole step.
"""

from __future__ import annotations

import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import study
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megamix import NAG, AdamW, DynamicLossScale, Precision, ShardedEngine, Sharding
from megamix.base.live_storage import LiveStorage
from megamix.launch.rendezvous import keep_to_loopback
from megamix.tools.ranks import forkserver

WIDTH = 256  # a layer is 256 * 256 elements: rows of 64 for 4 ranks, so nothing is padded


class Case(NamedTuple):
    """One way to train: what it holds per parameter, `whole` on every rank and `sharded` by their number."""

    title: str
    optimizer: AdamW | NAG
    grad_dtype: torch.dtype
    whole: int
    sharded: int


class Held(NamedTuple):
    """On one rank, in bytes. `scratch` is Gloo's receive buffer, as large as the largest bucket, in a step."""

    num_params: int
    between_steps: int
    scratch: int
    peak: int


CASES = (
    Case("AdamW", AdamW(lr=1e-3), torch.float16, 4, 12),
    Case("NAG", NAG(lr=1e-3), torch.float16, 4, 8),
    Case("AdamW, FP32 gradients", AdamW(lr=1e-3), torch.float32, 6, 12),
)
TEXTBOOK = "AdamW by hand"

Findings = dict[tuple[str, int], tuple[float, list[Held]]]  # (title, ranks) -> (formula, by rank)


def make_model(num_layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers)))


def engine_bytes(case: Case, num_layers: int) -> Held:
    """The engine on this rank, in buckets of two layers."""
    with LiveStorage() as storage:
        model = make_model(num_layers)
        precision = Precision(torch.float16, case.grad_dtype, DynamicLossScale(init_scale=2.0**8))
        sharding = Sharding(bucket_size=2 * WIDTH**2)
        engine = ShardedEngine(model, case.optimizer, precision, sharding, compile_update=False)
        for _ in range(2):
            storage.peak_bytes = storage.live_bytes  # the last step's alone
            engine.backward(engine(torch.ones(1, WIDTH, dtype=torch.float16)).float().mean())
            engine.step()
        engine.wait()
        storage._recount()  # what a step has freed is no operation
    scratch = max(bucket.bytes.grads for bucket in engine.buckets) if engine.topology.world.size > 1 else 0
    return Held(num_layers * WIDTH**2, storage.live_bytes, scratch, storage.peak_bytes)


def textbook_bytes(num_layers: int) -> Held:
    """Half weights and gradients, and an FP32 copy of each for torch's AdamW, the gradients' dropped after the step."""
    with LiveStorage() as storage:
        model = make_model(num_layers).half()
        masters = [nn.Parameter(param.detach().float()) for param in model.parameters()]
        optimizer = torch.optim.AdamW(masters, fused=True)
        for _ in range(2):
            storage.peak_bytes = storage.live_bytes  # the last step's alone
            model.zero_grad(set_to_none=False)
            model(torch.ones(1, WIDTH, dtype=torch.float16)).float().mean().backward()
            for master, param in zip(masters, model.parameters(), strict=True):
                master.grad = _grad_of(param).float()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for master, param in zip(masters, model.parameters(), strict=True):
                    param.copy_(master)
    return Held(num_layers * WIDTH**2, storage.live_bytes, 0, storage.peak_bytes)


def _grad_of(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad


def on_rank(rank: int, ranks: int, store: str, num_layers: int) -> list[Held]:
    """Every case on one of the ranks; the process must be new."""
    os.dup2(2, 1)  # Gloo greets on standard output, which is the page's
    torch.set_num_threads(1)
    keep_to_loopback(os.environ)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    held = [engine_bytes(case, num_layers) for case in CASES]
    dist.destroy_process_group()
    return held


def on_ranks(ranks: int, num_layers: int) -> list[list[Held]]:
    """By case, in rank order. Each worker takes one rank, since none ends before all have met."""
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(ranks, mp_context=forkserver()) as pool:
        store = str(Path(folder) / "store")
        tasks = [pool.submit(on_rank, rank, ranks, store, num_layers) for rank in range(ranks)]
        return [list(by_rank) for by_rank in zip(*(task.result() for task in tasks), strict=True)]


def measure(small: bool = False) -> Findings:
    num_layers = 4 if small else 64
    findings: Findings = {(TEXTBOOK, 1): (16.0, [textbook_bytes(num_layers)])}
    for ranks in (1, 2) if small else (1, 2, 4):
        alone = ranks == 1
        held = [[engine_bytes(case, num_layers)] for case in CASES] if alone else on_ranks(ranks, num_layers)
        for case, by_rank in zip(CASES, held, strict=True):
            findings[case.title, ranks] = (case.whole + case.sharded / ranks, by_rank)
    return findings


def beyond_formula(formula: float, held: Held) -> float:
    """Bytes between steps that are not the formula's: counters, tables, scalars."""
    return held.between_steps - formula * held.num_params


def text(findings: Findings) -> str:
    rows = []
    for (title, ranks), (formula, by_rank) in findings.items():
        largest = max(by_rank, key=lambda held: held.between_steps)
        num_params = largest.num_params
        rows.append(
            [
                f"{title}, {ranks} {'rank' if ranks == 1 else 'ranks'}",
                f"{formula:g}",
                f"{largest.between_steps / num_params:.4f}",
                f"{max(beyond_formula(formula, held) for held in by_rank):,.0f}",
                f"{largest.scratch / num_params:.3f}",
                f"{max(held.peak for held in by_rank) / num_params:.3f}",
            ]
        )
    columns = ["bytes per parameter", "formula", "between steps", "beyond it, in all", "scratch", "peak of a step"]
    return f"{num_params:,} parameters.\n\n{study.table(columns, rows)}"


if __name__ == "__main__":
    study.main(__file__, measure, text)
