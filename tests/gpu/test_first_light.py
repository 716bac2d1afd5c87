"""The first light's smoke runs on two simulated GPUs: both halves fall as by hand, each shard has the bits of one
process, and a planted fault of NCCL is told. Its update and its profile: test_bench, test_jobs.
"""

from dataclasses import replace
from functools import partial
from unittest import mock

import pytest

from megamix.tools.doctor import first_parts
from tests.gpu.test_doctor import nccl_loses_a_rank
from tests.tools.bench.tiny import WORK

SMALL = replace(WORK, lr=3e-3)
SHARDS = ("states", "gradients", "parameters")


def _trained(loses, shard):
    work = replace(SMALL, device="cuda")
    if not loses:
        return first_parts.trained(work, shard=shard)
    with nccl_loses_a_rank():
        return first_parts.trained(work, shard=shard)


def _smoke(by_shard):
    """Return the verdicts of a smoke whose two cards have trained already, to these bits."""

    def on_cards(work):
        assert (work.func, work.args) == (first_parts.trained, (replace(SMALL, device="cuda", compile_update=True),))
        return by_shard[work.keywords["shard"]]

    pools = mock.MagicMock()
    pools.return_value.__enter__.return_value.call = on_cards
    with mock.patch.multiple(first_parts, SIZES={"3M": SMALL}, RankPool=pools, num_cards=lambda: 2):
        verdicts = {finding.check: finding.verdict for finding in first_parts.smoke()}
    pools.assert_called_once_with(2, "cuda")
    return verdicts


@pytest.mark.parametrize("loses", [False, True])
def test_the_smoke_of_two_cards(gpu_ranks, loses):
    by_shard = {shard: gpu_ranks(partial(_trained, loses, shard), 2) for shard in SHARDS}
    shards = dict.fromkeys((f"shards {shard}" for shard in SHARDS), "broken" if loses else "ok")
    assert gpu_ranks(_smoke, 1, by_shard) == [{"smoke bfloat16": "ok", "smoke float16": "ok", **shards}]
