"""Every layout passes `verify` with every family, dtype, tying, accumulation and `shard`, with AdamW and Muon, overflow
included.
"""

import random
from collections import Counter
from functools import cache
from typing import get_args

import pytest

from megamix.mixed_precision.settings import Shard
from megamix.tools.verify.core.layout import parse_layout
from tests.conftest import FULL, also_wide
from tests.distributed.pipelines import SCHEDULES
from tests.tools.verify.catalogue.run import judged_layouts
from tests.tools.verify.jobs import make_config
from tests.tools.verify.layouts.covering import covering_runs, whole_matrix

MOST_RUNS = 20
LAYOUTS = ("dp2", "dp4", "tp2", "tp4", "pp2", "pp4", "dp2tp2", "dp2pp2", "tp2pp2", "dp2tp2pp2")
OPTIMIZERS = ("adamw", "muon")
AXES = {
    "layout": LAYOUTS,
    "shard": get_args(Shard),
    "family": ("gpt", "llama"),
    "dtype": ("fp16", "bf16", "fp32"),
    "tied": (True, False),
    "accumulation": (1, 2),
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


@cache
def _runs():
    if not FULL:
        runs = covering_runs(AXES, _allowed, MOST_RUNS)
        counts = Counter(item for run in runs for item in run.items())
        assert all(counts[axis, value] >= 2 for axis, values in AXES.items() for value in values)
        return runs
    # Six times as many runs show no more.
    runs, drawn = whole_matrix(AXES | {"shard": ("states",), "name": ("adamw",)}, _allowed), random.Random(0)
    turned = [run | {"shard": drawn.choice(get_args(Shard)), "name": drawn.choice(OPTIMIZERS)} for run in runs]
    return [run if _allowed(run) else run | {"shard": "gradients"} for run in turned]


WORLD_SIZES = sorted({parse_layout(name).world_size for name in LAYOUTS})


@pytest.mark.parametrize("world_size", also_wide(WORLD_SIZES, 2))
def test_every_layout_passes(run_ranks, world_size):
    runs = [run for run in _runs() if parse_layout(str(run["layout"])).world_size == world_size]
    wrong = []
    found = judged_layouts(run_ranks, world_size, [make_config(**run) for run in runs])
    for run, verdict in zip(runs, found, strict=True):
        assert verdict.skipped == 1
        wrong += [f"{run}: {difference}" for difference in verdict.differences[:1]]
    assert wrong == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hsdp2", r"must name axes \(pp, replicas, dp, cp, tp, ep\) and their ranks"),
        ("dp2dp2", "names an axis twice"),
        ("dp2sp", "sequence parallel needs tp; write dp2tp2sp"),
        ("dp2-zero3", "dp2-zero3, must end in what ranks keep a share of; write dp2, dp2-gradients or dp2-parameters"),
        ("dp2sp-gradients", "sequence parallel needs tp; write dp2tp2sp-gradients"),
    ],
)
def test_what_is_no_layout_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        parse_layout(name)
