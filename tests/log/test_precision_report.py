"""Shares, histogram, headroom and hidden updates of a layer equal a count over its whole gradient."""

import math

import pytest
import torch
import torch.distributed as dist

from megamix import AdamW, DynamicLossScale, Precision, Sharding
from megamix.log.metrics import FIRST_EXPONENT, LAST_EXPONENT
from megamix.log.outcome import Readout
from megamix.log.readout import gather_precision
from megamix.mixed_precision.examination import layer_of
from tests.builders import loss_of, make_batch, make_engine, make_model

ACCUM, SCALE = 2, 2.0**8


def _examined_step(dtype, grad_dtype, overflow):
    """Examine a step. Return the layout, this rank's shards by kind, bucket by bucket, and its report."""
    engine = make_engine(
        make_model(tied=False),
        AdamW(lr=1e-3),
        Precision(dtype, grad_dtype, DynamicLossScale(SCALE)),
        Sharding(bucket_size=1500),
        grad_accum_steps=ACCUM,
    )
    shards = _copies(engine, "old")
    engine.examine_next_step()
    for micro_batch in range(ACCUM):
        loss = loss_of(engine.module, make_batch(0, dist.get_rank(), micro_batch))
        # The loss is so small that some gradients are below FP16's numbers even with the scale, or far too large for
        # them.
        engine.backward(loss * (2.0**14 if overflow else 2.0**-14))
    result = engine.step()
    readout = Readout(engine.device)
    readout.write(0, result)
    layers = gather_precision(engine, result.examination, readout.read(0))
    engine.wait()
    shards |= _copies(engine, "new") | {"grads": [bucket.grad_sum.clone() for bucket in engine.buckets]}
    return engine.plan.layout, shards, layers


def _copies(engine, when):
    kinds = {"masters": "master", "halves": "param_shard"}
    return {
        f"{when} {kind}": [getattr(bucket, name).clone() for bucket in engine.buckets] for kind, name in kinds.items()
    }


def _whole(ranks, kind):
    """Return each layer's elements from all ranks, without padding, in FP64."""
    found = {}
    for index, bucket in enumerate(ranks[0][0].buckets):
        flat = torch.cat([shards[kind][index] for _, shards, _ in ranks])
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
def test_all_that_is_said_of_a_layer_equals_a_count_over_the_whole_gradient(run_ranks, dtype, grad_dtype):
    ranks = run_ranks(_examined_step, 2, dtype, grad_dtype, False)
    (_, _, layers), (_, _, of_second) = ranks
    assert layers == of_second
    assert [*layers] == ["embedding", "blocks.0", "blocks.1", "blocks.2", "norm", "head"]
    grads = _whole(ranks, "grads")
    masters, halves = ([_whole(ranks, f"{when} {kind}") for when in ("old", "new")] for kind in ("masters", "halves"))
    for layer, said in layers.items():
        scaled = grads[layer].abs()
        unscaled = scaled / SCALE
        assert said.zero_share == _share(scaled == 0)
        for prefix, values in (("", scaled), ("unscaled_", unscaled)):
            for name, limit in (("subnormal", 2.0**-14), ("below", 2.0**-24)):
                assert getattr(said, f"{prefix}{name}_share") == _share((values > 0) & (values < limit))
        assert said.headroom == math.log2(65504 / float(scaled.max()))
        exponents = unscaled[unscaled > 0].log2().floor().clamp(FIRST_EXPONENT, LAST_EXPONENT) - FIRST_EXPONENT
        assert list(said.exponents) == exponents.long().bincount(minlength=LAST_EXPONENT - FIRST_EXPONENT + 1).tolist()
        assert sum(said.exponents) + int((scaled == 0).sum()) == scaled.numel()
        changed, hidden = masters[0][layer] != masters[1][layer], halves[0][layer] == halves[1][layer]
        assert said.hidden_update_share == int((changed & hidden).sum()) / int(changed.sum())
    # Otherwise this step would prove nothing.
    assert any(said.unscaled_below_share > 0 for said in layers.values())
    assert any(said.zero_share > 0 for said in layers.values())
    assert any(0 < said.hidden_update_share < 1 for said in layers.values()) is (dtype is not torch.float32)


def test_an_overflow_has_no_headroom_and_no_update_and_still_counts(run_ranks):
    ranks = run_ranks(_examined_step, 2, torch.float16, torch.float16, True)
    grads = _whole(ranks, "grads")
    overflowed = 0
    for layer, said in ranks[0][2].items():
        assert said.hidden_update_share is None
        finite = grads[layer].isfinite()
        assert sum(said.exponents) == int((finite & (grads[layer] != 0)).sum())
        if not finite.all():
            overflowed += 1
            assert said.headroom == -math.inf or math.isnan(said.headroom)
    assert overflowed > 0
