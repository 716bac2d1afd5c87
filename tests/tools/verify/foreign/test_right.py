"""`verify --trainer` accuses no right training: seeded wrappers, precisions, optimizers, schedules, clipping, tied and
frozen weights, recompute, unequal targets, on 1, 2 and 4 ranks.
"""

from pathlib import Path

import pytest

from megamix.tools.verify.foreign.judge_trainer import judge_trainer
from megamix.tools.verify.foreign.trainer import load_trainer
from megamix.tools.verify.foreign.watch import watch_trainer
from tests.conftest import FULL
from tests.tools.verify.foreign.right import RANKS, SEEDS, settings

FILE = str(Path(__file__).parent / "right.py")
STEPS = 4
AT_ONCE = 25
QUICK = 8


def watch_all(wheres):
    return [watch_trainer(where, STEPS) for where in wheres]


@pytest.mark.uncounted
@pytest.mark.parametrize("ranks", RANKS)
def test_no_right_training_is_accused(run_ranks, ranks):
    seeds = [seed for seed in range(SEEDS if FULL else QUICK) if settings(seed)["ranks"] == ranks]
    wrong, worst = [], {}
    for some in (seeds[first : first + AT_ONCE] for first in range(0, len(seeds), AT_ONCE)):
        wheres = [f"{FILE}:Right{seed}" for seed in some]
        by_rank = run_ranks(watch_all, ranks, wheres, deadline_s=600.0)
        for seed, where, *seen in zip(some, wheres, *by_rank, strict=True):
            verdict = judge_trainer(load_trainer(where, ranks=ranks), seen)
            assert verdict.attempts == STEPS
            wrong += [f"{settings(seed)}: {difference}" for difference in verdict.differences[:1]]
            worst |= {check: max(share, worst.get(check, 0.0)) for check, share in verdict.worst.items()}
    print(f"{ranks} rank(s): {len(seeds)} trainings; {worst}")
    assert wrong == []
    assert 0 < worst["gradient"] < 1  # they were compared, and round


def test_the_quick_ones_are_on_every_number_of_ranks_and_in_every_precision():
    quick = [settings(seed) for seed in range(QUICK)]
    assert {one["ranks"] for one in quick} == set(RANKS)
    assert {"fp32", "bf16", "fp16"} <= {str(one["precision"]) for one in quick}
