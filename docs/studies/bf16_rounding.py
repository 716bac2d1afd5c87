"""Round FP32 to half by integer arithmetic on the bits, and compare with the casts that training uses.

`python docs/studies/bf16_rounding.py [--small]`. Every one of the 65,536 half values is tried as it is, and so is the
midpoint between it and the next larger magnitude, and the FP32 numbers just below and above that midpoint: all places
where rounding to nearest even changes its mind.
"""

from __future__ import annotations

from collections.abc import Callable

import study
import torch
from torch import Tensor

from megamix import AdamW, Precision, ShardedEngine, StaticLossScale

SIGN, INF = 0x8000_0000, 0x7F80_0000  # of FP32's bits

Rounding = Callable[[Tensor], Tensor]  # INT64 bits of FP32 -> INT64 bits of half, both (n,)
Findings = dict[tuple[str, str], dict[str, tuple[int, int]]]  # (dtype, rounding) -> class -> (different, compared)


def to_bf16(bits: Tensor) -> Tensor:
    """BF16 is the upper half of FP32: add just less than half of its last place, or just half if that place is odd,
    and cut. The carry does the rest: into the next power of two, from the subnormals up, from the largest to inf.
    """
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return torch.where((bits & ~SIGN) > INF, 0x7FC0, rounded)


def to_fp16(bits: Tensor) -> Tensor:
    """FP16 has another exponent: its subnormals begin at 2**-14, where each octave further down loses one more bit."""
    sign, magnitude = bits >> 16 & 0x8000, bits & ~SIGN
    exponent = magnitude >> 23
    octaves_down = (113 - exponent).clamp(min=0, max=12)  # below 2**-14, whose biased FP32 exponent is 113
    significand = torch.where(octaves_down > 0, magnitude & 0x7F_FFFF | 0x80_0000, magnitude - (112 << 23))
    cut = 13 + octaves_down
    rounded = significand + (1 << (cut - 1)) - 1 + (significand >> cut & 1) >> cut
    rounded = rounded.clamp(max=0x7C00)  # beyond the largest: inf
    return torch.where(magnitude > INF, 0x7E00, sign | rounded)


def cut_off(bits: Tensor) -> Tensor:
    """Not a rounding to nearest: what the comparison must be able to tell apart."""
    return bits >> 16


def boundary_cases(dtype: torch.dtype) -> Tensor:
    """INT64 (n,): FP32 bits of each half value, of its midpoint to the next, and one FP32 place to either side."""
    half = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    magnitudes = half[: 2**15][half[: 2**15].isfinite()].double()
    beyond = 2 * magnitudes[-1] - magnitudes[-2]  # the next, if the exponent went on: halfway there inf begins
    midpoints = ((magnitudes + torch.cat([magnitudes[1:], beyond.view(1)])) / 2).float()
    around = _bits(midpoints)[:, None] + torch.tensor([-1, 0, 1])
    return torch.cat([_bits(half.float()), around.flatten(), around.flatten() | SIGN])


def _bits(values: Tensor) -> Tensor:
    """INT64 bits of FP32 or half values, unsigned."""
    signed = torch.int32 if values.dtype == torch.float32 else torch.int16
    return values.view(signed).long().bitwise_and(2 ** (8 * values.element_size()) - 1)


def _as_fp32(bits: Tensor) -> Tensor:
    return torch.where(bits < SIGN, bits, bits - 2**32).to(torch.int32).view(torch.float32)


def torch_cast(dtype: torch.dtype) -> Rounding:
    return lambda bits: _bits(_as_fp32(bits).to(dtype))


def torch_cast_strided(dtype: torch.dtype) -> Rounding:
    """Every second element of a tensor: torch then converts one by one instead of by vectors."""
    return lambda bits: _bits(_as_fp32(bits).repeat_interleave(2)[::2].to(dtype))


def engine_cast(dtype: torch.dtype, compile_update: bool) -> Rounding:
    """The cast inside the engine's update: in a step that overflows it writes the masters' halves out once more."""

    def cast(bits: Tensor) -> Tensor:
        model = torch.nn.Linear(len(bits), 1, bias=False)
        precision = Precision(dtype, loss_scale=StaticLossScale())
        engine = ShardedEngine(model, AdamW(lr=0.0), precision, compile_update=compile_update)
        (bucket,) = engine.buckets
        bucket.master[: len(bits)].copy_(_as_fp32(bits))  # NaN too, which load_weights() refuses
        bucket.params.zero_()  # so that all that is found there afterwards is the update's
        engine.backward(torch.inf * engine(torch.ones(1, len(bits), dtype=dtype)).float().sum())
        engine.step()
        return _bits(model.weight.detach()[0])

    return cast


def measure(small: bool = False) -> Findings:
    """How often each rounding differs from the integer arithmetic, by class of the result; any NaN equals any."""
    findings = {}
    for name, dtype, reference in (("BF16", torch.bfloat16, to_bf16), ("FP16", torch.float16, to_fp16)):
        cases = boundary_cases(dtype)
        roundings = {
            "torch's cast": torch_cast(dtype),
            "torch's cast, one by one": torch_cast_strided(dtype),
            "the update without a compiler": engine_cast(dtype, compile_update=False),
        }
        if not small:
            roundings["the compiled update"] = engine_cast(dtype, compile_update=True)
        if dtype == torch.bfloat16:
            roundings["cutting off (for comparison)"] = cut_off
        want = reference(cases)
        for title, rounding in roundings.items():
            findings[name, title] = _compare(cases, want, rounding(cases), dtype)
    return findings


def _compare(cases: Tensor, want: Tensor, got: Tensor, dtype: torch.dtype) -> dict[str, tuple[int, int]]:
    inf = int(_bits(torch.tensor([torch.inf], dtype=dtype)))
    smallest_normal = int(_bits(torch.tensor([torch.finfo(dtype).tiny], dtype=dtype)))
    magnitude, is_nan = want & 0x7FFF, (want & 0x7FFF) > inf
    different = torch.where(is_nan, (got & 0x7FFF) <= inf, got != want)
    classes = {
        "normal": (magnitude >= smallest_normal) & (magnitude < inf),
        "subnormal": (magnitude > 0) & (magnitude < smallest_normal),
        "zero": magnitude == 0,
        "inf": magnitude == inf,
        "NaN": is_nan,
    }
    return {name: (int(different[members].sum()), int(members.sum())) for name, members in classes.items()}


def text(findings: Findings) -> str:
    classes = [*next(iter(findings.values()))]
    rows = [
        [f"{dtype}, {rounding}", *(f"{different:,} of {compared:,}" for different, compared in counts.values())]
        for (dtype, rounding), counts in findings.items()
    ]
    return study.table(["different bits where the result is", *classes], rows)


if __name__ == "__main__":
    study.main(__file__, measure, text)
