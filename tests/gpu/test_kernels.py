"""The kernels for an H100 are compiled without a GPU: a run's update is one kernel with the bytes and accesses that the
design says, without spills or FP64, in one graph for all lengths.
"""

import fcntl
import json
import os

import gpu_kernels
import pytest

from megamix.base.machine import torch_version
from tests.gpu import h100, kernels

TRITON = h100.search_path()
pytestmark = [
    pytest.mark.skipif(TRITON is None, reason=f"no Triton here, nor in {h100.FOLDER}: launch/test.sh puts it there"),
]
STATES = {name: [*optimizer.states("", ())] for name, optimizer in kernels.OPTIMIZERS.items()}
UPDATES = [(optimizer, half, sums) for optimizer in STATES for half in ("BF16", "FP16") for sums in (half, "FP32")]
UPDATE = "update, {}, {}, sums in {}"


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """The kernels by name, made once, by the first process that needs them."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "h100"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "kernels.json").exists():
            h100.run("tests.gpu.kernels", folder)
    return {kernel["name"]: kernel for kernel in json.loads((folder / "kernels.json").read_text())}


def test_each_function_is_one_kernel_for_all_lengths_in_registers(made):
    for name, kernel in made.items():
        assert (kernel["kernels"], kernel["recompiled"]) == (1, 0), name
        code = kernel["machine"]
        assert (code["registers"] <= 80, code["spills"], code["doubles"]) == (True, 0, 0), name


def test_an_update_moves_the_least_in_whole_vectors(made):
    assert [name for name in made if name.startswith("update")] == [UPDATE.format(*update) for update in UPDATES]
    for optimizer, half, sums in UPDATES:
        kernel, states = made[UPDATE.format(optimizer, half, sums)], len(STATES[optimizer])
        code = kernel["machine"]
        # Master and states are read and written, the half parameter is written, the gradient read.
        assert kernel["bytes"]["element"] == 8 + 8 * states + 2 + (4 if sums == "FP32" else 2)
        scalars = kernel["tensors"] - 2 * (1 + states) - 2
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
