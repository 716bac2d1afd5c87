"""Moments in BF16 are right on average with stochastic rounding, where rounding to nearest would never move them; no
bit depends on ranks, buckets or chunks; `megamix verify` passes with them, compiled.
"""

import itertools
import math
from functools import partial
from operator import itemgetter
from unittest import mock

import pytest
import torch
from torch import nn

from megamix import NAG, AdamW, ParamGroup, Precision, Sharding
from megamix.base import constants
from megamix.mixed_precision.optim.half_states import by_chance, needs_chance
from tests.builders import loss_of, make_batch, make_engine, make_model

BF16 = torch.bfloat16


def _rounded(moment, update, seed=0):
    master = torch.randn(moment.shape, generator=torch.Generator().manual_seed(seed))
    return by_chance(moment, master, torch.tensor(float(update)))


def test_the_average_of_what_chance_gives_is_the_moment():
    moment = torch.rand(1000, generator=torch.Generator().manual_seed(1)) * torch.logspace(-20, 3, 1000)
    rounds = 4000
    total = sum((_rounded(moment, update, update).double() for update in range(rounds)), torch.zeros(1000).double())
    low = moment.to(BF16).float()
    unit = torch.maximum(low * 2.0**-7, torch.tensor(2.0**-133)).double()
    # The mean of n throws of a coin has standard deviation sqrt(p (1 - p) / n) <= 1 / (2 sqrt(n)). The bound is five of
    # these, for the worst of a thousand.
    assert ((total / rounds - moment.double()).abs() <= 5 * unit / (2 * math.sqrt(rounds))).all()


def test_only_the_two_neighbours_are_given_and_what_bf16_has_stays():
    moment = torch.randn(10_000, generator=torch.Generator().manual_seed(2))
    given = _rounded(moment, 7)
    assert torch.equal(given, given.to(BF16).float())
    assert ((given - moment).abs() < moment.abs() * 2.0**-7).all()
    assert (given != moment.to(BF16).float()).any()  # not always to the nearer one
    kept = torch.tensor([0.0, -0.0, 1.0, -2.5, 2.0**-126, math.inf, -math.inf])
    assert torch.equal(_rounded(kept, 3), kept)
    assert _rounded(torch.tensor([math.nan]), 3).isnan().all()
    assert torch.equal(_rounded(torch.zeros(64), 3).view(torch.int32), torch.zeros(64, dtype=torch.int32))  # padding


def _decayed(steps):
    """Return second moments that start at 1, after `steps` updates without a gradient."""
    model = nn.Linear(64, 64, bias=False)
    engine = make_engine(model, AdamW(lr=0.0, betas=(0.9, 0.999), state_dtype=BF16))
    moments = engine.buckets[0].states[0]["exp_avg_sq"].fill_(1.0)
    for _ in range(steps):
        engine.backward((model.weight * 0.0).sum())
        engine.step()
    return moments.double()


def test_a_second_moment_decays_as_beta2_says():
    # Each update changes an element by at most a coin's unit, 2^-7 of it: a random walk of 200 steps, over 4096
    # elements.
    bound = 5 * 2.0**-7 * math.sqrt(200) / math.sqrt(4096)
    assert abs(float(_decayed(200).mean()) / 0.999**200 - 1) < bound
    with mock.patch("megamix.mixed_precision.optim.adamw.needs_chance", lambda beta: False):
        assert (_decayed(10) == 1).all()  # rounded to nearest it stays
    assert [needs_chance(beta) for beta in (0.9, 0.95, 0.98, 0.99, 0.999)] == [False, False, False, True, True]


def _trained(optimizer, **sharding):
    model = make_model(tied=False)
    engine = make_engine(model, optimizer, Precision(BF16), Sharding([*model.blocks], **sharding))
    for step in range(4):
        engine.backward(loss_of(model, make_batch(step, 0, 0)))  # the same on every rank: a mean of equals is exact
        engine.step()
    return [
        ((one.spec.name, state), one.start, tensor.clone())
        for one in engine.owned_ranges()
        for state, tensor in one.tensors.items()
    ]


OPTIMIZERS = {
    "nearest": AdamW(lr=0.01, state_dtype=BF16),
    "chance": AdamW(lr=0.01, betas=(0.99, 0.999), state_dtype=BF16),
    "nag": NAG(lr=0.1, state_dtype=BF16),
}


def _joined(*ranks):
    parts = {}
    for key, _, values in sorted(itertools.chain(*ranks), key=itemgetter(0, 1)):
        parts.setdefault(key, []).append(values)
    return {key: torch.cat(found) for key, found in parts.items()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_bit_depends_on_ranks_buckets_or_pieces(run_ranks, optimizer):
    train = partial(_trained, OPTIMIZERS[optimizer])
    want = _joined(train())
    assert {tensor.dtype for (_, state), tensor in want.items() if state != "master"} == {BF16}
    with mock.patch.multiple(constants, UPDATE_CHUNK=128, EQUATION_CHUNK=64):
        runs = [_joined(train(bucket_size=700))]
    runs.append(_joined(*run_ranks(train, 2)))
    runs.append(_joined(*run_ranks(partial(train, shard="parameters", bucket_size=1111), 4)))
    for found in runs:
        assert found.keys() == want.keys()
        assert [key for key in want if not torch.equal(found[key], want[key])] == []


def test_wrong_dtypes_are_refused():
    with pytest.raises(ValueError, match="state_dtype of AdamW must be torch.float32 or torch.bfloat16, got torch.fl"):
        AdamW(lr=0.1, state_dtype=torch.float16)
    with pytest.raises(ValueError, match=r"momentum 0\.99 is lost in a BF16 state; take state_dtype=torch\.float32"):
        NAG(lr=0.1, momentum=0.99, state_dtype=BF16)


def test_any_beta_of_a_group_or_of_a_schedule_decides_by_what_its_moment_is_rounded():
    group = ParamGroup(pattern="table", betas=(0.9, 0.999))
    assert AdamW(lr=0.1, state_dtype=BF16).chances == (False, False)
    assert AdamW(lr=0.1, groups=(group,), state_dtype=BF16).chances == (False, True)
    assert AdamW(lr=0.1, betas=([0.9, 0.99], 0.95), state_dtype=BF16).chances == (True, False)
    assert AdamW(lr=0.1, betas=([0.9, 0.99], 0.95)).chances == (False, False)
