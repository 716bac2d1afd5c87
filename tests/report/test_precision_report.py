"""Shares, histogram, headroom and hidden updates of a layer equal a count over its whole gradient."""

import math
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megamix import AdamW, DynamicLossScale, Precision, ShardedEngine, Sharding
from megamix.mixed_precision.examination import layer_of
from megamix.mixed_precision.flat_layout import FlatLayout
from megamix.report.interval_report import gather_precision
from megamix.report.metrics import FIRST_EXPONENT, LAST_EXPONENT, LayerPrecision
from tests.builders import loss_of, make_batch, make_model

ACCUM, SCALE = 2, 2.0**8


class Seen(NamedTuple):
    """One rank's shards, bucket by bucket, and its report."""

    layout: FlatLayout
    grads: list[Tensor]
    old_masters: list[Tensor]
    old_halves: list[Tensor]
    new_masters: list[Tensor]
    new_halves: list[Tensor]
    layers: dict[str, LayerPrecision]


def _examined_step(dtype, grad_dtype, overflow):
    model = make_model(tied=False)
    engine = ShardedEngine(
        model,
        AdamW(lr=1e-3),
        Precision(dtype, grad_dtype, DynamicLossScale(SCALE)),
        Sharding(bucket_size=1500),
        grad_accum_steps=ACCUM,
        compile_update=False,
    )
    old = _masters_and_halves(engine)
    engine.examine_next_step()
    for micro_batch in range(ACCUM):
        loss = loss_of(model, make_batch(0, dist.get_rank(), micro_batch))
        # The loss is so small that some gradients are below FP16's numbers even with the scale, or far too large for
        # them.
        engine.backward(loss * (2.0**14 if overflow else 2.0**-14))
    result = engine.step()
    layers = gather_precision(engine, result.examination, result.by_piece, float(result.loss_scale))
    engine.wait()
    sums = [bucket.grad_sum.clone() for bucket in engine.buckets]
    return Seen(engine.plan.layout, sums, *old, *_masters_and_halves(engine), layers)


def _masters_and_halves(engine):
    masters = [bucket.master.clone() for bucket in engine.buckets]
    return masters, [bucket.param_shard.clone() for bucket in engine.buckets]


def _whole(ranks, kind):
    """Return each layer's elements from all ranks, without padding, in FP64."""
    found = {}
    for index, bucket in enumerate(ranks[0].layout.buckets):
        flat = torch.cat([getattr(rank, kind)[index] for rank in ranks])
        for slot in bucket.slots:
            found.setdefault(layer_of(slot.spec.name), []).append(flat[slot.start : slot.end].double())
    return {layer: torch.cat(parts) for layer, parts in found.items()}


def _share(mask):
    return int(mask.sum()) / mask.numel()


@pytest.mark.parametrize(
    ("dtype", "grad_dtype"),
    [
        (torch.float16, torch.float16),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32),
    ],
)
def test_shares_headroom_and_histogram_equal_a_count_over_the_whole_gradient(run_ranks, dtype, grad_dtype):
    ranks = run_ranks(_examined_step, 2, dtype, grad_dtype, False)
    grads = _whole(ranks, "grads")
    assert ranks[0].layers == ranks[1].layers
    assert [*ranks[0].layers] == ["embedding", "blocks.0", "blocks.1", "blocks.2", "norm", "head"]
    seen_below = seen_zero = 0.0
    for layer, said in ranks[0].layers.items():
        scaled = grads[layer].abs()
        unscaled = scaled / SCALE
        assert said.zero_share == _share(scaled == 0)
        assert said.subnormal_share == _share((scaled > 0) & (scaled < 2.0**-14))
        assert said.below_share == _share((scaled > 0) & (scaled < 2.0**-24))
        assert said.unscaled_subnormal_share == _share((unscaled > 0) & (unscaled < 2.0**-14))
        assert said.unscaled_below_share == _share((unscaled > 0) & (unscaled < 2.0**-24))
        assert said.headroom == math.log2(65504 / float(scaled.max()))
        exponents = unscaled[unscaled > 0].log2().floor().clamp(FIRST_EXPONENT, LAST_EXPONENT) - FIRST_EXPONENT
        assert list(said.exponents) == exponents.long().bincount(minlength=LAST_EXPONENT - FIRST_EXPONENT + 1).tolist()
        assert sum(said.exponents) + int((scaled == 0).sum()) == scaled.numel()
        seen_below, seen_zero = seen_below + said.unscaled_below_share, seen_zero + said.zero_share
    assert seen_below > 0  # otherwise this step would prove nothing
    assert seen_zero > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_hidden_updates_equal_a_comparison_of_whole_copies(run_ranks, dtype):
    ranks = run_ranks(_examined_step, 2, dtype, dtype, False)
    old_masters, old_halves = _whole(ranks, "old_masters"), _whole(ranks, "old_halves")
    new_masters, new_halves = _whole(ranks, "new_masters"), _whole(ranks, "new_halves")
    shares = []
    for layer, said in ranks[0].layers.items():
        changed = old_masters[layer] != new_masters[layer]
        hidden = changed & (old_halves[layer] == new_halves[layer])
        assert said.hidden_update_share == int(hidden.sum()) / int(changed.sum())
        shares.append(said.hidden_update_share)
    assert 0 < max(shares) < 1


def test_an_overflow_has_no_headroom_and_no_update_and_still_counts(run_ranks):
    ranks = run_ranks(_examined_step, 2, torch.float16, torch.float16, True)
    grads = _whole(ranks, "grads")
    overflowed = 0
    for layer, said in ranks[0].layers.items():
        assert said.hidden_update_share is None
        finite = grads[layer].isfinite()
        assert sum(said.exponents) == int((finite & (grads[layer] != 0)).sum())
        if not finite.all():
            overflowed += 1
            assert said.headroom == -math.inf or math.isnan(said.headroom)
    assert overflowed > 0
