"""The kernels that an H100 would run, compiled where none is: one for a run's update, of the bytes and accesses that
the design says, without spills or FP64, one graph for all lengths; and Triton's interpreter gets from them what the
plain functions give.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import gpu_kernels
import pytest
import torch
from torch import Tensor

from megamix.comm.collectives import sum_in_rank_order
from megamix.mixed_precision.fused_update import gated_update
from megamix.mixed_precision.grad_stats import row_stats
from megamix.mixed_precision.optimizers import Optimizer, UpdateScalars
from tests.gpu import h100, kernels
from tests.mixed_precision.test_compiled_update import EPS, assert_within_rounding

TRITON = h100.search_path()
pytestmark = [
    pytest.mark.uncounted,
    pytest.mark.skipif(TRITON is None, reason=f"no Triton here, nor in {h100.FOLDER}: launch/test.sh puts it there"),
]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made once, by the first process that needs it."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "h100"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "kernels.json").exists():
            h100.run("tests.gpu.kernels", folder)
    return folder


@pytest.fixture(scope="session")
def made(folder: Path) -> dict[str, dict]:
    return {kernel["name"]: kernel for kernel in json.loads((folder / "kernels.json").read_text())}


NAMES = [
    f"update, {optimizer}, {half}, sums in {sums}"
    for optimizer in kernels.OPTIMIZERS for half in ("BF16", "FP16") for sums in (half, "FP32")
]  # fmt: skip


def test_an_update_is_one_kernel_that_moves_the_least_in_whole_vectors(made: dict[str, dict]) -> None:
    assert [name for name in made if name.startswith("update")] == NAMES
    for name in NAMES:
        kernel = made[name]
        sum_bytes = 4 if name.endswith("FP32") else 2
        assert len(kernel["sources"]) == 1, name
        assert kernel["recompiled"] == 0, name
        # Master and states are read and written, the half parameter is written, the gradient read.
        states = 2 if "AdamW" in name else 1
        assert kernel["bytes"]["element"] == 8 + 8 * states + 2 + sum_bytes, name
        (code,) = kernel["machine"]  # nothing is chosen by timing
        scalars = sum(isinstance(one, list) for one in kernel["arguments"]) - 2 * (1 + states) - 2
        by_thread = code["block"] // code["threads"]
        assert code["widths"].pop("128") * 16 == kernel["bytes"]["element"] * by_thread, name
        assert sum(code["widths"].values()) == scalars, name
        _assert_lean(code)


def test_statistics_are_one_kernel_that_reads_whole_vectors_in_one_order(made: dict[str, dict]) -> None:
    for sums, size in (("BF16", 2), ("FP16", 2), ("FP32", 4)):
        kernel = made[f"statistics, sums in {sums}"]
        assert len(kernel["sources"]) == 1
        assert kernel["recompiled"] == 0
        assert kernel["bytes"] == {"element": size, "row": 8}
        (code,) = kernel["machine"]
        assert code["widths"] == {"128": code["block"] * 64 * size // 16 // code["threads"], "32": 2}  # a row's results
        _assert_lean(code)


@pytest.mark.parametrize("half", ["BF16", "FP16"])
def test_a_sum_over_ranks_is_one_kernel_that_reads_each_part_once_and_takes_the_statistics(made, half: str) -> None:
    kernel = made[_sum_of(half)]
    assert len(kernel["sources"]) == 1
    assert kernel["recompiled"] == 0
    assert kernel["bytes"] == {"element": 2 * kernels.OWNERS + 4, "row": 8}
    (code,) = kernel["machine"]
    assert code["widths"] == {
        "128": code["block"] * 64 * kernel["bytes"]["element"] // 16 // code["threads"], "32": 2,
    }  # fmt: skip
    _assert_lean(code)


def _sum_of(half: str) -> str:
    return f"sum of {kernels.OWNERS} ranks' {half} and its statistics"


def test_the_slopes_of_the_loss_are_one_kernel_without_scalar_accesses_to_logits(made: dict[str, dict]) -> None:
    kernel = made["loss slopes, BF16"]
    assert len(kernel["sources"]) == 1
    assert kernel["recompiled"] == 0
    assert kernel["bytes"]["element"] == 10  # logits twice, for the sum and for each share, and the slope
    (code,) = kernel["machine"]
    assert code["widths"]["128"] == 2
    assert code["widths"]["32"] <= 2  # a row's likelihood, and its target's logit
    _assert_lean(code)


def test_the_page_has_the_table_of_these_kernels(made: dict[str, dict]) -> None:
    page = gpu_kernels.PAGE.read_text(encoding="utf-8")
    assert page == gpu_kernels.with_table(page, [*made.values()]), "write it: python docs/gpu_kernels.py"


def _assert_lean(code: dict) -> None:
    assert code["registers"] <= 80
    assert code["spills"] == code["doubles"] == 0


def test_the_interpreter_gets_from_the_kernels_what_the_plain_functions_give(folder: Path, made: dict) -> None:
    before = {name: [_tensors(name, gated) for gated in (False, True)] for name in NAMES}
    before["statistics, sums in BF16"] = [_gradient("statistics, sums in BF16")]
    before |= {_sum_of(half): [_parts(half)] for half in ("BF16", "FP16")}
    torch.save(before, folder / "before.pt")
    h100.run("tests.gpu.interpret", folder, TRITON_INTERPRET="1")
    after = torch.load(folder / "after.pt")
    for name in NAMES:
        (old, new), (kept, gated) = zip(before[name], after[name], strict=True)
        for one in (*_optimizer(name).states("", ()), "master", "half"):
            assert torch.equal(kept[one], gated[one]), name
        _assert_updated(_optimizer(name), old, new)
    for name in before.keys() - {*NAMES}:
        ((old,), (new,)) = before[name], after[name]
        if "parts" in old:
            sum_in_rank_order(old["parts"].view(kernels.OWNERS, -1), old["grad"])
            assert torch.equal(new["grad"], old["grad"]), name
        sums, peaks = new["rows"].view(2, -1)
        exact = row_stats(old["grad"])
        assert torch.equal(peaks, exact[1])
        assert ((sums - exact[0]).abs() <= 64 * EPS * exact[0]).all()


def _optimizer(name: str) -> Optimizer:
    return kernels.OPTIMIZERS[name.split(", ")[1]]


def _gradient(name: str) -> dict[str, Tensor]:
    grad = torch.randn(64 * kernels.ROWS, generator=torch.Generator().manual_seed(0)) * 100
    return {"grad": grad.to(kernels.DTYPES[name.split()[-1]]), "rows": torch.full((2 * kernels.ROWS,), float("nan"))}


def _parts(half: str) -> dict[str, Tensor]:
    parts = torch.randn(64 * kernels.ROWS * kernels.OWNERS, generator=torch.Generator().manual_seed(0)) * 100
    empty = torch.full((64 * kernels.ROWS,), float("nan"))
    return {"parts": parts.to(kernels.DTYPES[half]), "grad": empty, "rows": empty[: 2 * kernels.ROWS].clone()}


def _tensors(name: str, gated: bool) -> dict[str, Tensor]:
    """By the names of the kernel's arguments."""
    generator = torch.Generator().manual_seed(1)
    grad, optimizer, half_dtype = _gradient(name)["grad"], _optimizer(name), kernels.DTYPES[name.split(", ")[2]]
    master = torch.randn(len(grad), generator=generator)
    states = {state: torch.rand(len(grad), generator=generator) for state in optimizer.states("", ())}
    coefficients = optimizer.coefficients(torch.tensor(5.0, dtype=torch.float64))
    if gated:
        grad[::7], grad[3::11] = float("inf"), float("nan")
        master = master.to(half_dtype).float()  # where the interpreter's cast to BF16 has nothing to cut off
    return {
        "grad": grad, "master": master, **states, "half": master.to(half_dtype),
        "multiplier": torch.tensor(float("nan") if gated else 2.0**-7 / 3), "found_inf": torch.tensor(gated),
        "lr": torch.tensor(0.01), "weight_decay": torch.tensor(kernels.WEIGHT_DECAY),
        **{f"coefficient{k}": coefficient for k, coefficient in enumerate(coefficients)},
    }  # fmt: skip


def _assert_updated(optimizer: Optimizer, old: dict[str, Tensor], new: dict[str, Tensor]) -> None:
    names = [*optimizer.states("", ())]
    plain = {name: tensor.clone() for name, tensor in old.items()}
    states = {name: plain[name] for name in names}
    at = UpdateScalars(old["lr"], old["weight_decay"], tuple(old[k] for k in old if k.startswith("coefficient")))
    gated_update(optimizer)(
        plain["grad"], plain["master"], states, plain["half"], old["multiplier"], old["found_inf"], at
    )
    unscaled = old["grad"].float().abs() * old["multiplier"]
    both = [[tensors["master"], {name: tensors[name] for name in names}] for tensors in (old, new, plain)]
    assert_within_rounding(optimizer, unscaled, *both)
    half, rounded = new["half"], new["master"].to(new["half"].dtype)
    if half.dtype == torch.float16:
        assert torch.equal(half, rounded)
    else:  # the interpreter cuts off where a GPU rounds
        assert ((half.view(torch.int16) - rounded.view(torch.int16)).abs() <= 1).all()
