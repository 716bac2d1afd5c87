"""Measure the error of a 64 x K x 64 product of half matrices, with sums in half, in FP32 and by our CPU path.

`python docs/studies/gemm_accumulation.py [--small]`. The error is that of the whole matrix against FP64,
|C - C64| / |C64| in Frobenius norms. With zero-mean inputs the terms of a sum cancel, with positive ones they pile up.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import study
import torch
from torch import Tensor

from megamix.model.ops import Ops

SIZE = 64  # rows and columns of the product
DTYPES = {"BF16": torch.bfloat16, "FP16": torch.float16}
INPUTS = ("zero mean", "positive")
SHOWN = (128, 1024, 16_384)  # of the sums' lengths, in the table; the figure shows all


class Errors(NamedTuple):
    """Of one product, by how it was summed; `ours` and `best` have half results, as has a sum in half."""

    half_sum: float
    fp32_sum: float
    fp32_sum_rounded: float
    ours: float
    best: float  # the FP64 product, rounded once
    ours_is_best: float  # share of elements


Findings = dict[tuple[str, str], dict[int, Errors]]  # (dtype, inputs) -> K -> errors


def sum_in_order(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b, one term after the other, each sum rounded to `dtype`: a multiply-add with an accumulator of that type.

    Shapes: a half (m, k), b half (k, n) -> FP32 (m, n). The product of two halves is exact in FP32.
    """
    a, b = a.float(), b.float()
    total = torch.zeros(a.shape[0], b.shape[1])
    for k in range(a.shape[1]):
        total = (total + a[:, k : k + 1] * b[k]).to(dtype).float()
    return total


def errors(dtype: torch.dtype, inputs: str, k: int) -> Errors:
    generator = torch.Generator().manual_seed(k)
    draw = torch.randn if inputs == "zero mean" else torch.rand
    a = draw(SIZE, k, generator=generator).to(dtype)
    b = draw(k, SIZE, generator=generator).to(dtype)
    exact = a.double() @ b.double()
    # As our model multiplies on a CPU: BF16 by torch's kernel, FP16 in FP32 with one rounding (megamix/model/wide.py).
    ours = Ops(native=frozenset({torch.bfloat16})).linear(a, b.t().contiguous(), None)
    best = exact.to(dtype)
    fp32_sum = sum_in_order(a, b, torch.float32)

    def error(product: Tensor) -> float:
        return float((product.double() - exact).norm() / exact.norm())

    return Errors(
        half_sum=error(sum_in_order(a, b, dtype)),
        fp32_sum=error(fp32_sum),
        fp32_sum_rounded=error(fp32_sum.to(dtype)),
        ours=error(ours),
        best=error(best),
        ours_is_best=float((ours == best).double().mean()),
    )


def measure(small: bool = False) -> Findings:
    lengths = [2**power for power in range(6, 11 if small else 15)]
    return {
        (name, inputs): {k: errors(dtype, inputs, k) for k in lengths}
        for name, dtype in DTYPES.items()
        for inputs in INPUTS
    }


def growth(by_length: dict[int, Errors], field: str, first: int = 128) -> float:
    """The exponent p of error ~ K**p, by least squares from K = `first` on."""
    lengths = [k for k in by_length if k >= first]
    values = [getattr(by_length[k], field) for k in lengths]
    return float(np.polyfit(np.log2(lengths), np.log2(values), deg=1)[0])


def text(findings: Findings) -> str:
    rows = [
        [f"{dtype}, {inputs}, K = {k:,}", *(f"{value:.2g}" for value in found[:5]), f"{100 * found.ours_is_best:.2f} %"]
        for (dtype, inputs), by_length in findings.items()
        for k, found in by_length.items()
        if k in SHOWN
    ]
    columns = ["relative error", "summed in half", "in FP32", "FP32, rounded", "our CPU path", "FP64, rounded"]
    powers = [
        [f"{dtype}, {inputs}", *(f"K^{growth(by_length, field):.2f}" for field in ("half_sum", "fp32_sum", "ours"))]
        for (dtype, inputs), by_length in findings.items()
    ]
    growths = study.table(["growth of the error, K >= 128", "summed in half", "in FP32", "our CPU path"], powers)
    return f"{study.table([*columns, 'ours = FP64, rounded'], rows)}\n\n{growths}"


def draw(findings: Findings, figure: Any) -> None:
    for axes, inputs in zip(figure.subplots(1, 2, sharey=True), INPUTS, strict=True):
        for color, dtype in zip(("tab:red", "tab:blue"), DTYPES, strict=True):
            by_length = findings[dtype, inputs]
            for field, style, label in (
                ("half_sum", "o-", f"summed in {dtype}"),
                ("fp32_sum", "--", f"{dtype} summed in FP32"),
                ("ours", "s-", f"our path, {dtype}"),
            ):
                values = [getattr(found, field) for found in by_length.values()]
                axes.loglog([*by_length], values, style, color=color, markersize=4, linewidth=1, label=label)
        axes.set_xlabel("K")
        axes.set_title(f"{inputs} inputs", fontsize=10)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("relative error")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)


if __name__ == "__main__":
    study.main(__file__, measure, text, draw)
