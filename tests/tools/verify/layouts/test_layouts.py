"""Every layout passes `verify` with every family, dtype, tying, accumulation and `shard`, with AdamW and Muon, overflow
included; the covering set has every pair.
"""

import random
from collections import Counter
from functools import cache
from typing import get_args

import pytest
import torch

from megamix.mixed_precision.settings import Shard
from megamix.tools.verify.core.layout import parse_layout
from megamix.tools.verify.layouts.judge_steps import judge
from tests.conftest import FULL, also_wide
from tests.distributed.pipelines import SCHEDULES
from tests.tools.verify.jobs import OVERFLOW_AT, UPDATES, make_config, observe_case
from tests.tools.verify.layouts.covering import covering_runs, whole_matrix

MOST_RUNS = 20
AT_ONCE = 6  # with more runs, observed steps would fill the memory, and groups the limit on threads
LAYOUTS = ("dp2", "dp4", "tp2", "tp4", "pp2", "pp4", "dp2tp2", "dp2pp2", "tp2pp2", "dp2tp2pp2")
OPTIMIZERS = ("adamw", "muon")
AXES = {
    "layout": LAYOUTS,
    "shard": get_args(Shard),
    "family": ("gpt", "llama"),
    "dtype": ("fp16", "bf16", "fp32"),
    "tied": (True, False),
    "accumulation": (1, 4),
    "sequence_parallel": (False, True),
    "schedule": SCHEDULES,
    "name": OPTIMIZERS,
}


def _allowed(run):
    """Return whether a run is possible: sequence parallel needs tp, and a schedule needs stages."""
    layout = parse_layout(str(run["layout"]))
    has_sequence = layout.size("tp") > 1 or not run["sequence_parallel"]
    if run["shard"] == "parameters" and layout.size("pp") > 1:
        return False
    return has_sequence and (layout.size("pp") > 1 or run["schedule"] == SCHEDULES[0])


def _observe_all(configs):
    return [observe_case(config) for config in configs]


@cache
def _runs():
    if not FULL:
        return covering_runs(AXES, _allowed, MOST_RUNS)
    # Six times as many runs show no more.
    runs, drawn = whole_matrix(AXES | {"shard": ("states",), "name": ("adamw",)}, _allowed), random.Random(0)
    turned = [run | {"shard": drawn.choice(get_args(Shard)), "name": drawn.choice(OPTIMIZERS)} for run in runs]
    return [run if _allowed(run) else run | {"shard": "gradients"} for run in turned]


WORLD_SIZES = sorted({parse_layout(name).world_size for name in LAYOUTS})


@pytest.mark.uncounted
@pytest.mark.parametrize("world_size", also_wide(WORLD_SIZES, 2))
def test_every_layout_passes(run_ranks, world_size):
    runs = [run for run in _runs() if parse_layout(str(run["layout"])).world_size == world_size]
    wrong, shares = [], {}
    for some in (runs[first : first + AT_ONCE] for first in range(0, len(runs), AT_ONCE)):
        configs = [make_config(**run) for run in some]
        by_rank = run_ranks(_observe_all, world_size, configs, deadline_s=900.0)
        for run, config, *ranks in zip(some, configs, *by_rank, strict=True):
            verdict = judge(config, ranks, torch.device("cpu"), UPDATES, OVERFLOW_AT)
            assert verdict.skipped == 1
            wrong += [f"{run}: {difference}" for difference in verdict.differences[:1]]
            for check, worst in verdict.worst.items():
                shares.setdefault((run["layout"], check), []).append(worst)
    for (layout, check), worst in sorted(shares.items()):
        print(f"{layout} {check}: {len(worst)} runs, largest share of the bound {max(worst):.3f}")
    assert wrong == []


@pytest.mark.uncounted
def test_the_covering_set_shows_every_value_at_least_twice():
    runs = covering_runs(AXES, _allowed, MOST_RUNS)
    assert len(runs) <= MOST_RUNS
    assert runs == covering_runs(AXES, _allowed, MOST_RUNS)
    counts = Counter(item for run in runs for item in run.items())
    assert all(counts[axis, value] >= 2 for axis, values in AXES.items() for value in values)


@pytest.mark.parametrize(
    ("name", "sizes", "world_size"), [("dp2", {"dp": 2}, 2), ("dp1", {"dp": 1}, 1), ("dp4", {"dp": 4}, 4)]
)
def test_names_of_layouts(name, sizes, world_size):
    layout = parse_layout(name)
    assert (dict(layout.sizes), layout.world_size, layout.sequence_parallel) == (sizes, world_size, False)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hsdp2", r"must name axes \(pp, replicas, dp, cp, tp, ep\) and their ranks"),
        ("dp2dp2", "names an axis twice"),
        ("dp2sp", "sequence parallel needs tp; write dp2tp2sp"),
        ("dp0", "must name axes"),
        ("dp2-zero3", "dp2-zero3, must end in what ranks keep a share of; write dp2, dp2-gradients or dp2-parameters"),
        ("dp2-", "dp2-, must end in what ranks keep a share of; write dp2, "),
        ("dp2sp-gradients", "sequence parallel needs tp; write dp2tp2sp-gradients"),
    ],
)
def test_what_is_no_layout_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        parse_layout(name)
