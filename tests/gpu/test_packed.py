"""Half-precision jobs on packed documents make no mask on GPUs: on data-parallel, tensor-parallel and pipelined ranks
attention takes the documents' borders, the host waits only in the readout, and the losses are those with a mask. The
kernels of a real GPU are tested likewise, if there is one.
"""

from pathlib import Path
from unittest import mock

import pytest
import torch

from megamix.model import context, decoder, ops
from megamix.model.context import find_borders, find_documents
from megamix.model.ops import takes_borders
from tests.builders import run_on_ranks, tiny_job, write_data
from tests.gpu.test_jobs import READOUT, noting
from tests.model.flash import stand_in
from tests.model.rounding import UNIT
from tests.train.outcome import metrics_of
from tests.train.recorded import Record, attempts_recorded

STEPS = 3

TWO = {"size": 2}


def _by_borders(config):
    """Train without a mask: what made the host wait from the second attempt on, and how often kernels were called."""
    seen = []
    ops._flash_takes_borders.cache_clear()  # an earlier job asked before the kernels were there
    with (
        mock.patch.object(context, "TOKENS_A_BORDER", 16),
        mock.patch.object(torch.backends.cuda, "is_flash_attention_available", lambda: True),
        mock.patch.object(decoder, "find_documents", side_effect=AssertionError("a mask")),
        attempts_recorded(Record(), noting(seen, range(100))),
        stand_in() as calls,
    ):
        run_on_ranks(config)
    return seen[-1] - seen[1], calls.copy()


def _first_row(config):
    return next(row for row in metrics_of(Path(config.checkpoint.folder).parent) if "train/loss" in row)


def test_jobs_make_no_mask_and_no_wait_and_have_the_losses_of_the_mask(gpu_ranks, tmp_path):
    write_data(tmp_path / "data")
    masked, *jobs = (
        tiny_job(
            tmp_path, parallelism=layout, checkpoint={"folder": str(tmp_path / name / "run")},
            packing="documents", valid=None, steps=STEPS, eval_interval=0,
            loss_scale={"rule": "static", "init_scale": 2.0**8}, log_interval=1,
        )
        for name, layout in (("mask", {}), ("dp", {}), ("tp", {"tensor": TWO}), ("pp", {"pipeline": TWO}))
    )  # fmt: skip
    gpu_ranks(run_on_ranks, 2, masked)
    want = _first_row(masked)
    for job in jobs:
        for waits, calls in gpu_ranks(_by_borders, 2, job):
            assert [wait for wait in waits if not wait.startswith(READOUT)] == []
            assert calls["forward"] == calls["backward"] > 0
        # Until the first update weights are the same: about 30 roundings to half lie between loss and gradient.
        for name, units in (("train/loss", 2), ("optim/grad_norm", 30)):
            assert _first_row(job)[name] == pytest.approx(want[name], rel=units * UNIT[torch.float16])


@pytest.mark.real_gpu
@pytest.mark.skipif(not torch.version.cuda or not torch.cuda.is_available(), reason="there is no real GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_real_gpus_kernels_give_what_the_mask_gives(dtype):
    from tests.model.test_borders import bounded_by_the_mask

    positions = torch.cat([torch.arange(n) for n in (1, 700, 323, 1024)]).view(2, 1024).cuda()
    shapes = [(2, 1024, heads, 64) for heads in (8, 2, 2, 8)]
    *inputs, upstream = (torch.randn(shape, device="cuda", dtype=dtype).transpose(1, 2) for shape in shapes)
    assert takes_borders(inputs[0], 64)
    borders, mask = find_borders(positions), find_documents(positions, as_mask=True)
    assert mask is not None
    bounded_by_the_mask(inputs, upstream, borders, mask, on_a_card=True)
