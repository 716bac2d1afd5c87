"""The kernels for an H100 are compiled without a GPU: a run's update is one kernel with the bytes and accesses that the
design says, without spills or FP64, in one graph for all lengths; in Triton's interpreter the kernels give what the
plain functions give.
"""

import fcntl
import json
import os

import gpu_kernels
import pytest
import torch

from megamix.comm.collectives import sum_in_rank_order
from megamix.machine import torch_version
from megamix.mixed_precision.fused_update import gated_update
from megamix.mixed_precision.group_scalars import GroupScalars
from megamix.mixed_precision.row_stats import row_stats
from megamix.mixed_precision.update_slice import StepScalars, UpdateScalars
from tests.gpu import h100, kernels
from tests.mixed_precision.test_compiled_update import EPS, assert_within_rounding

TRITON = h100.search_path()
pytestmark = [
    pytest.mark.skipif(TRITON is None, reason=f"no Triton here, nor in {h100.FOLDER}: launch/test.sh puts it there"),
]
STATES = {name: [*optimizer.states("", ())] for name, optimizer in kernels.OPTIMIZERS.items()}
UPDATES = [(optimizer, half, sums) for optimizer in STATES for half in ("BF16", "FP16") for sums in (half, "FP32")]
UPDATE = "update, {}, {}, sums in {}"


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
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
def made(folder):
    return {kernel["name"]: kernel for kernel in json.loads((folder / "kernels.json").read_text())}


def test_each_function_is_one_kernel_for_all_lengths_in_registers(made):
    for name, kernel in made.items():
        assert (len(kernel["sources"]), kernel["recompiled"]) == (1, 0), name
        code = kernel["machine"]
        assert (code["registers"] <= 80, code["spills"], code["doubles"]) == (True, 0, 0), name


def test_an_update_moves_the_least_in_whole_vectors(made):
    assert [name for name in made if name.startswith("update")] == [UPDATE.format(*update) for update in UPDATES]
    for optimizer, half, sums in UPDATES:
        kernel, states = made[UPDATE.format(optimizer, half, sums)], len(STATES[optimizer])
        code = kernel["machine"]
        # Master and states are read and written, the half parameter is written, the gradient read.
        assert kernel["bytes"]["element"] == 8 + 8 * states + 2 + (4 if sums == "FP32" else 2)
        scalars = sum(isinstance(one, list) for one in kernel["arguments"]) - 2 * (1 + states) - 2
        by_thread = code["block"] // code["threads"]
        assert code["widths"]["128"] * 16 == kernel["bytes"]["element"] * by_thread
        assert sum(code["widths"].values()) == code["widths"]["128"] + scalars


STATISTICS = {f"statistics, sums in {sums}": size for sums, size in (("BF16", 2), ("FP16", 2), ("FP32", 4))}
SUMS = {
    f"sum of {kernels.OWNERS} ranks' {half} and its statistics": 2 * kernels.OWNERS + 4 for half in ("BF16", "FP16")
}


@pytest.mark.parametrize(("name", "size"), (STATISTICS | SUMS).items())
def test_statistics_and_sums_read_each_part_once_in_whole_vectors_and_one_order(made, name, size):
    kernel, code = made[name], made[name]["machine"]
    assert kernel["bytes"] == {"element": size, "row": 8}
    assert code["widths"] == {"128": code["block"] * 64 * size // 16 // code["threads"], "32": 2}  # a row's results


def test_the_slopes_of_the_loss_take_no_scalar_accesses_to_logits(made):
    kernel = made["loss slopes, BF16"]
    assert kernel["bytes"]["element"] == 10  # logits twice, for the sum and for each share, and the slope
    widths = kernel["machine"]["widths"]
    assert widths["128"] == 2
    assert widths["32"] <= 2  # a row's likelihood, and its target's logit


@pytest.mark.skipif(torch_version() < (2, 13), reason="the page has the kernels of torch 2.13")
def test_the_page_has_the_table_of_these_kernels(made):
    page = gpu_kernels.PAGE.read_text(encoding="utf-8")
    assert page == gpu_kernels.with_table(page, [*made.values()]), "write it: python docs/gpu_kernels.py"


def test_the_interpreter_gets_from_the_kernels_what_the_plain_functions_give(folder, made):
    before = {UPDATE.format(*update): [_tensors(*update, gated) for gated in (False, True)] for update in UPDATES}
    before |= {name: [_parts(name)] for name in ("statistics, sums in BF16", *SUMS)}
    torch.save(before, folder / "before.pt")
    h100.run("tests.gpu.kernels", folder, TRITON_INTERPRET="1")
    after = torch.load(folder / "after.pt")
    for update in UPDATES:
        name = UPDATE.format(*update)
        (old, kept), (new, gated) = before[name], after[name]
        for one in (*STATES[update[0]], "master", "half"):
            assert torch.equal(kept[one], gated[one]), name
        _assert_updated(update[0], old, new)
    for name in before.keys() - {UPDATE.format(*update) for update in UPDATES}:
        ((old,), (new,)) = before[name], after[name]
        if "parts" in old:
            sum_in_rank_order(old["parts"].view(kernels.OWNERS, -1), old["grad"])
            assert torch.equal(new["grad"], old["grad"]), name
        sums, peaks = new["rows"].view(2, -1)
        exact = row_stats(old["grad"])
        assert torch.equal(peaks, exact[1])
        assert ((sums - exact[0]).abs() <= 64 * EPS * exact[0]).all()


def _random(dtype, rows=kernels.ROWS):
    values = torch.randn(64 * rows, generator=torch.Generator().manual_seed(0)) * 100
    return values.to(kernels.DTYPES[dtype])


def _parts(name):
    nothing = torch.full((66 * kernels.ROWS,), float("nan"))
    grad, rows = nothing.split([64 * kernels.ROWS, 2 * kernels.ROWS])
    if name in STATISTICS:
        return {"grad": _random(name.split()[-1]), "rows": rows}
    return {"parts": _random(name.split()[4], kernels.ROWS * kernels.OWNERS), "grad": grad, "rows": rows}


def _tensors(name, half, sums, gated):
    """By the names of the kernel's arguments."""
    generator, grad, half_dtype = torch.Generator().manual_seed(1), _random(sums), kernels.DTYPES[half]
    master = torch.randn(len(grad), generator=generator)
    states = {state: torch.rand(len(grad), generator=generator) for state in STATES[name]}
    optimizer, one = kernels.OPTIMIZERS[name], torch.ones(())
    scalars = GroupScalars(optimizer, [optimizer.group_of("weight", (64, 64))], torch.device("cpu"))
    (at,) = scalars.of(StepScalars(one, one.bool(), one, torch.tensor(5.0)))
    if gated:
        grad[::7], grad[3::11] = float("inf"), float("nan")
        master = master.to(half_dtype).float()  # where the interpreter's cast to BF16 has nothing to cut off
    return {
        "grad": grad, "master": master, **states, "half": master.to(half_dtype),
        "multiplier": torch.tensor(float("nan") if gated else 2.0**-7 / 3), "found_inf": torch.tensor(gated),
        "lr": torch.tensor(0.01), "weight_decay": torch.tensor(kernels.WEIGHT_DECAY),
        **{f"coefficient{k}": coefficient for k, coefficient in enumerate(at.coefficients)},
    }  # fmt: skip


def _assert_updated(name, old, new):
    optimizer, plain = kernels.OPTIMIZERS[name], {name: tensor.clone() for name, tensor in old.items()}
    before, after, want = (
        (each["master"], {state: each[state] for state in STATES[name]}) for each in (old, new, plain)
    )
    at = UpdateScalars(old["lr"], old["weight_decay"], tuple(old[k] for k in old if k.startswith("coefficient")))
    gated_update(optimizer)(plain["grad"], *want, plain["half"], old["multiplier"], old["found_inf"], at)
    assert_within_rounding(optimizer, old["grad"].float().abs() * old["multiplier"], before, after, want)
    half, rounded = new["half"], new["master"].to(new["half"].dtype)
    if half.dtype == torch.float16:
        assert torch.equal(half, rounded)
    else:  # the interpreter cuts off where a GPU rounds
        assert ((half.view(torch.int16) - rounded.view(torch.int16)).abs() <= 1).all()
