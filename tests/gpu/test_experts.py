"""On simulated GPUs a step with experts in BF16 reads nothing on the host; where ranks exchange tokens it reads the
numbers of rows once for each layer and micro-batch, and not again where backward repeats a forward. In FP16 a layer
reads them once for its three products.
"""

from collections import Counter
from itertools import pairwise

import pytest

from tests.builders import run_on_ranks, tiny_job
from tests.gpu.test_jobs import READOUT
from tests.model.grouped import grouped_products
from tests.train.recorded import Record, attempts_recorded

FIRST, STEADY = 4, 4
EXPERTS = {
    "num_experts": 8, "top_k": 2, "ffn_hidden_size": 24, "shared_ffn_hidden_size": 16, "balance_loss": 0.01,
    "z_loss": 0.001,
}  # fmt: skip


def _waits(config):
    """Return what has made the host wait for the device in STEADY attempts of a job, and where."""
    from tests.gpu import simulated

    seen = []

    def note(plan):
        if plan.launched in (FIRST, FIRST + STEADY):
            seen.append(Counter({f"{what} at {place}": count for (what, place), count in simulated.waits.items()}))

    with grouped_products(), attempts_recorded(Record(), note):
        run_on_ranks(config)
    ((before, behind),) = pairwise(seen)
    return behind - before


@pytest.mark.parametrize(
    ("dtype", "place", "recompute", "reads"),
    [
        ("bf16", {}, "full", 0),
        ("bf16", {"ep_size": 2}, "full", 1),
        ("bf16", {"ep_size": 2, "ep_method": "gather"}, "full", 0),
        ("fp16", {}, "none", 1),
    ],
)
def test_a_step_reads_the_numbers_of_rows_where_ranks_exchange_them_and_nothing_else(
    gpu_ranks, data, tmp_path, dtype, place, recompute, reads
):
    rule = {"bf16": {"rule": "off"}, "fp16": {"rule": "static", "init_scale": 1024.0}}[dtype]
    config = tiny_job(
        tmp_path,
        tokens=data,
        experts=EXPERTS,
        recompute=recompute,
        valid=None,
        dtype=dtype,
        loss_scale=rule,
        steps=FIRST + STEADY + 1,
        eval_interval=0,
        parallelism=place,
        log_interval=1000,
    )
    layers, micro_batches = 2, 2
    reader = "parallel/expert_parallel" if place else "model/ops"
    for waits in gpu_ranks(_waits, 2, config):
        others = {
            wait: count for wait, count in waits.items() if not wait.startswith(READOUT) and " tests/" not in wait
        }
        assert sum(others.values()) == reads * layers * micro_batches * STEADY, others
        assert all(f"copy_ to the host at megamix/{reader}.py" in wait for wait in others), others
