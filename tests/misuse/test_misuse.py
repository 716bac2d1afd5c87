"""Whoever comes from a plain torch loop: each of 60 ways to misuse the library gives what a plain torch loop gives, or
is refused with words, on one rank and on two, with each `shard`; none silently trains something else.
"""

import logging
import re

import pytest
import torch.distributed as dist

from tests.conftest import FULL
from tests.misuse.cases import CASES
from tests.misuse.training import train, train_plainly

SHARDS = ("states", "gradients", "parameters")


def _differs(got, want):
    """Say which weight is another one.

    Bound: FP32 gradients that are summed over two ranks in another order, 3 steps of a rate of 0.1 and a momentum of
    0.9: some roundings of the largest gradient, whose update is at most 1.
    """
    if got.keys() != want.keys():
        return f"names differ: {sorted(got.keys() ^ want.keys())}"
    off = {name: float((got[name] - want[name]).abs().max()) for name in want}
    worst = max(off, key=lambda name: off[name])
    return f"{worst} is off by {off[worst]:.3g}" if not off[worst] <= 2e-5 else ""


def _judge(case, shard):
    """Return what is wrong with the outcome of a case; "" if nothing is."""
    try:
        weights = train(case, shard)
    except Exception as error:
        text = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
        if case.says is None:
            return f"was refused: {text}"
        says = f"{case.says}|which has no memory" if shard == "parameters" else case.says
        return "" if re.search(says, text) else f"was refused in other words: {text}"
    if case.says is not None:
        return "nothing was said"
    plain = train_plainly(case, dist.get_world_size())
    return _differs(weights, {name.replace("_orig_mod.", ""): weight for name, weight in plain.items()})


def _judge_all(shard, names):
    chosen = [case for case in CASES if case.name in names and shard in case.shards]
    logging.disable(logging.WARNING)  # the ranks go on to other tests
    try:
        return {case.name: _judge(case, shard) for case in chosen}
    finally:
        logging.disable(logging.NOTSET)


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_every_case_is_right_or_refused(run_ranks, world_size, shard):
    in_turn = [case.shards[number % len(case.shards)] for number, case in enumerate(CASES)]
    every = FULL or world_size == 1  # in CI two ranks take each case with one of its settings
    names = [case.name for case, own in zip(CASES, in_turn, strict=True) if every or own == shard]
    for rank, outcomes in enumerate(run_ranks(_judge_all, world_size, shard, names)):
        wrong = {name: outcome for name, outcome in outcomes.items() if outcome}
        assert wrong == {}, f"on rank {rank}"
