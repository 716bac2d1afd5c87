"""`verify --trainer` accuses no right training: five loops (DDP, with sharded states, FSDP2, by hand with
autocast, a wrapper as Fabric's) with buffers of every kind; seeded precisions, optimizers, schedules, clipping, tied
and frozen weights, recompute, unequal targets, on 1, 2 and 4 ranks.
"""

from pathlib import Path

import pytest

from tests.conftest import FULL
from tests.tools.verify.catalogue.run import judged
from tests.tools.verify.foreign.right import RANKS, SEEDS, settings

FILE = Path(__file__).parent / "right.py"
STEPS = 3
QUICK = 13  # every loop, number of ranks and dtype


@pytest.mark.parametrize("ranks", RANKS)
def test_no_right_training_is_accused(run_ranks, ranks):
    seeds = [seed for seed in range(SEEDS if FULL else QUICK) if settings(seed)["ranks"] == ranks]
    wrong, worst = [], {}
    found = judged(run_ranks, ranks, [f"{FILE}:Right{seed}" for seed in seeds], STEPS)
    for seed, verdict in zip(seeds, found, strict=True):
        assert verdict.attempts == STEPS
        wrong += [f"{settings(seed)}: {difference}" for difference in verdict.differences[:1]]
        worst |= {check: max(share, worst.get(check, 0.0)) for check, share in verdict.worst.items()}
    print(f"{ranks} rank(s): {len(seeds)} trainings; {worst}")
    assert wrong == []
    assert 0 < worst["gradient"] < 1  # they were compared, and round
