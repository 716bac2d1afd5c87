"""Train a linear regression with half weights: with masters in FP32, as the engine keeps them, and in half.

`python docs/studies/regression.py [--small]`. 1,024 samples, 16 features, full batches, targets without noise, so that
the right weights are known. Everything is equal in a pair of runs but the dtype of the masters.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import study
import torch
from torch import Tensor

from megamix import NAG, DynamicLossScale, Precision, ShardedEngine

SAMPLES, FEATURES = 1024, 16
LR, MOMENTUM = 1e-3, 0.9
DTYPES = {"FP32": torch.float32, "BF16": torch.bfloat16, "FP16": torch.float16}


class Run(NamedTuple):
    """`master_error`, `copy_error`: max |weight - right weight| after each step, of the masters and of what forward
    reads.
    """

    master_error: list[float]
    copy_error: list[float]
    skipped: int
    loss_scale: float


Findings = dict[tuple[str, str], Run]  # (dtype of weights and gradients, dtype of the masters)


def problem(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(features half (samples, 16), targets FP32 (samples,), right weights FP32 (16,))."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(SAMPLES, FEATURES, generator=generator).to(dtype)
    right = torch.randn(FEATURES, generator=generator)
    return features, features.float() @ right, right


def fp32_master(dtype: torch.dtype, steps: int) -> Run:
    """The engine: half copies, FP32 masters, dynamic scaling from 128, doubled every 50 clean steps."""
    features, targets, right = problem(dtype)
    model = torch.nn.Linear(FEATURES, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    loss_scale = DynamicLossScale(init_scale=128.0, growth_interval=50)
    optimizer = NAG(lr=LR, momentum=MOMENTUM)
    engine = ShardedEngine(model, optimizer, Precision(dtype, loss_scale=loss_scale), compile_update=False)
    run = Run([], [], 0, 0.0)
    for _ in range(steps):
        engine.backward((engine(features)[:, 0].float() - targets).square().mean())
        engine.step()
        run.master_error.append(_worst(engine.full_weights()["weight"][0], right))
        run.copy_error.append(_worst(model.weight[0], right))
    return run._replace(skipped=int(engine.skipped_steps), loss_scale=float(loss_scale.loss_scale))


def half_master(dtype: torch.dtype, steps: int) -> Run:
    """The same by hand, with the masters in half. Momentum stays FP32, and the scale at 128, which never overflows."""
    features, targets, right = problem(dtype)
    weights = torch.zeros(FEATURES, dtype=dtype, requires_grad=True)
    momentum_buffer = torch.zeros(FEATURES)
    run = Run([], [], 0, 128.0)
    for _ in range(steps):
        loss = ((features @ weights).float() - targets).square().mean()
        (grad,) = torch.autograd.grad(128.0 * loss, weights)
        grad = grad.float() / 128.0
        momentum_buffer = MOMENTUM * momentum_buffer + grad
        with torch.no_grad():
            weights.copy_(weights.float() - LR * (grad + MOMENTUM * momentum_buffer))  # rounded to half: the point
        run.master_error.append(_worst(weights, right))
    return run._replace(copy_error=run.master_error)


def _worst(weights: Tensor, right: Tensor) -> float:
    return float((weights.detach().float() - right).abs().max())


def measure(small: bool = False) -> Findings:
    steps = 600 if small else 1500
    findings = {(name, "FP32"): fp32_master(dtype, steps) for name, dtype in DTYPES.items()}
    return findings | {(name, name): half_master(DTYPES[name], steps) for name in ("BF16", "FP16")}


def last_change(run: Run) -> int:
    """The last step after which the masters' error was another than before."""
    errors = run.master_error
    return max(step for step in range(1, len(errors)) if errors[step] != errors[step - 1])


def text(findings: Findings) -> str:
    steps = len(next(iter(findings.values())).master_error)
    rows = [
        [
            f"{half} weights, {master} masters",
            f"{max(run.master_error[-100:]):.2g}",
            f"{max(run.copy_error[-100:]):.2g}",
            f"{last_change(run) + 1:,}",
            f"{run.skipped}",
            f"2^{math.log2(run.loss_scale):.0f}",
        ]
        for (half, master), run in findings.items()
    ]
    columns = ["largest error", "of the masters", "of the copies", "last moved at step", "skipped", "last scale"]
    return f"{steps:,} steps.\n\n{study.table(columns, rows)}"


def draw(findings: Findings, figure: Any) -> None:
    axes = figure.subplots()
    for (half, master), run in findings.items():
        color = {"FP32": "black", "BF16": "tab:red", "FP16": "tab:blue"}[half]
        style = "-" if master == "FP32" else "--"
        axes.semilogy(run.master_error, style, color=color, linewidth=1, label=f"{half} weights, {master} masters")
    axes.set_xlabel("step")
    axes.set_ylabel("max error of the masters")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)


if __name__ == "__main__":
    study.main(__file__, measure, text, draw)
