"""`verify --trainer` accuses none of 100 right trainings of five loops (DDP, FSDP2, by hand with autocast, a wrapper as
Fabric's, our engine) with buffers of every kind, on 1 and 2 ranks; of 20 bugs in these loops that are not in the
catalogue it finds each, and names the kind that was written down before.
"""

import random
from collections import Counter
from pathlib import Path

import pytest

from megamix.tools.verify.foreign.judge_trainer import judge_trainer
from megamix.tools.verify.foreign.trainer import check_trainer, load_trainer
from megamix.tools.verify.foreign.watch import watch_trainer
from tests.conftest import FULL
from tests.tools.verify.catalogue.bugs import BUGS
from tests.tools.verify.foreign.loop_bugs import LOOP_BUGS
from tests.tools.verify.foreign.right_loops import LOOPS, SEEDS, settings

HERE = Path(__file__).parent
QUICK = 5  # right trainings in CI: one of each loop
RIGHT_STEPS = 3
BUG_STEPS = 2  # each of the bugs shows in its second step at the latest; one ends its epoch there


def watch_all(wheres, steps):
    return [watch_trainer(where, steps) for where in wheres]


def _verdicts(run_ranks, ranks, file, names, steps):
    wheres = [f"{HERE / file}:{name}" for name in names]
    by_rank = run_ranks(watch_all, ranks, wheres, steps, deadline_s=600.0)
    found = {}
    for name, where, *seen in zip(names, wheres, *by_rank, strict=True):
        check_trainer(trainer := load_trainer(where, ranks=ranks))
        found[name] = judge_trainer(trainer, seen)
    return found


@pytest.mark.uncounted
@pytest.mark.parametrize("ranks", [1, 2])
def test_no_right_loop_is_accused(run_ranks, ranks):
    seeds = [seed for seed in range(SEEDS if FULL else QUICK) if settings(seed)["ranks"] == ranks]
    found = _verdicts(run_ranks, ranks, "right_loops.py", [f"Loop{seed}" for seed in seeds], RIGHT_STEPS)
    wrong = [f"{settings(seed)}: {one}" for seed in seeds for one in found[f"Loop{seed}"].differences[:1]]
    worst = {}
    for verdict in found.values():
        worst |= {check: max(share, worst.get(check, 0.0)) for check, share in verdict.worst.items()}
    print(f"{ranks} rank(s): {len(seeds)} trainings; {worst}")
    assert wrong == []
    assert 0 < worst["gradient"] < 1  # they were compared, and round


def test_the_quick_ones_are_of_every_loop_and_on_1_and_2_ranks():
    quick = [settings(seed) for seed in range(QUICK)]
    assert {one["loop"] for one in quick} == {*LOOPS}
    assert {one["ranks"] for one in quick} == {1, 2}


@pytest.mark.uncounted
def test_bugs_that_are_not_in_the_catalogue_are_named(run_ranks):
    names = [*LOOP_BUGS] if FULL else random.Random(0).sample([*LOOP_BUGS], len(LOOP_BUGS) // 3)
    told = {}
    for ranks in (1, 2):
        some = [name for name in names if LOOP_BUGS[name].ranks == ranks]
        found = _verdicts(run_ranks, ranks, "loop_bugs.py", some, BUG_STEPS)
        told |= {name: found[name].differences[:1] for name in some}
    wrong = {
        name: [*map(str, first)] for name, first in told.items()
        if not first or LOOP_BUGS[name].place not in f"{first[0].check} of {first[0].where}"
        or LOOP_BUGS[name].kind not in first[0].looks_like
    }  # fmt: skip
    assert wrong == {}


def test_the_bugs_are_new_and_of_every_loop():
    assert len(LOOP_BUGS) == 20
    assert not LOOP_BUGS.keys() & BUGS.keys()
    sorts = Counter(bug.sort for bug in LOOP_BUGS.values())
    assert all(sorts[sort] == 3 for sort in ("buffers", "clipping", "averaging", "names"))
