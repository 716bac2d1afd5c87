"""An overflow on each of the eight ranks of dp2 tp2 pp2 changes nothing on any; real ranks of each of ten layouts (four
without --full) load the checkpoint of every other, bit for bit, and pairs of them train on.
"""

import pytest
import torch

from megamix.checkpoint.load import load, newest_checkpoint
from megamix.checkpoint.manifest import RunRecord
from megamix.checkpoint.save import save
from megamix.checkpoint.snapshot import take_snapshot
from megamix.log.culprits import gather_peaks
from megamix.tools.verify.core.layout import parse_layout
from megamix.tools.verify.core.observed_step import rank_device
from megamix.tools.verify.layouts.observe import take_step
from megamix.train.engine import build_training
from megamix.train.replicas import check_replicas
from tests.checkpoint.state import all_or_none_of
from tests.conftest import FULL
from tests.parallel.layouts import are_equal, assemble, contents, states, with_one_inf
from tests.tools.verify.jobs import make_config
from tests.tools.verify.layouts.test_layouts import LAYOUTS

SAMPLE = ("dp2", "tp2", "pp2", "dp2tp2")
# (saved by, loaded by): every axis left and taken up.
TRAINED_ON = [
    ("dp2", "tp2"), ("tp2", "pp2"), ("pp2", "dp2tp2"), ("dp2tp2", "dp2"), ("pp4", "dp2tp2pp2"), ("dp2tp2pp2", "tp4"),
]  # fmt: skip
MICRO_BATCHES = 4  # micro-batches of a step, over all data-parallel ranks


def _config(layout):
    """Return a layout's configuration: all have the same model and global batch."""
    place = parse_layout(layout)
    # As many blocks as there are stages, a tied table; biases, of which ranks have parts or copies.
    config = make_config("pp4" if FULL else "pp2", family="gpt", dtype="fp32", sequence_parallel=False)
    return place.apply(config, MICRO_BATCHES // place.size("dp"))


# An overflow on any rank.


def _overflows(config):
    """Return what is wrong in steps in which one rank after the other has an inf in one gradient."""
    runner = build_training(config, rank_device())
    engine = runner.engine
    rank, wrong = engine.topology.world.rank, []
    take_step(config, runner, 0)
    before = contents(engine)
    params = [*engine.module.parameters()]
    for victim in range(engine.topology.world.size):
        handle = params[(3 * victim + 1) % len(params)].register_hook(with_one_inf) if rank == victim else None
        result = take_step(config, runner, 1)
        if handle is not None:
            handle.remove()
        faults = [peak.fault for peak in gather_peaks(engine, result.by_piece, result.peak_rows) if peak.fault]
        told = bool(result.found_inf), faults, int(engine.skipped_steps), int(engine.applied_updates)
        if told != (True, ["inf"], victim + 1, 1) or not are_equal(before, contents(engine)):
            wrong.append(f"rank {victim} overflows, rank {rank}: {told}")
    if take_step(config, runner, 1).found_inf:
        wrong.append("the step after")
    return wrong


@pytest.mark.parametrize("dtype", ["fp16", "bf16"] if FULL else ["fp16"])
def test_an_overflow_on_any_of_eight_ranks_changes_nothing_on_any(run_ranks, dtype):
    config = make_config("dp2tp2pp2", dtype=dtype, sequence_parallel=True, accumulation=1)
    assert run_ranks(_overflows, 8, config) == [[]] * 8


# Checkpoints.


def _save(layout, folder):
    """Return what this rank saved after a step, and the loss of the next step."""
    config = _config(layout)
    runner = build_training(config, rank_device())
    take_step(config, runner, 0)
    save(folder / layout, take_snapshot(runner.engine, RunRecord()), all_or_none_of(runner.engine))
    return states(runner.engine), float(take_step(config, runner, 1).loss)


def _load_each(layout, folder, sources):
    """Return this rank's part of each loaded checkpoint, and the loss of the next step, if one follows."""
    config = _config(layout)
    runner = build_training(config, rank_device())
    engine, all_or_none, found = runner.engine, all_or_none_of(runner.engine), []
    for source in sources:
        load(newest_checkpoint(folder / source, all_or_none), engine, all_or_none)
        check_replicas(engine)
        mine = states(engine)
        found.append((mine, float(take_step(config, runner, 1).loss) if (source, layout) in TRAINED_ON else None))
    return found


def test_every_layout_loads_what_every_other_saved_and_goes_on(run_ranks, tmp_path):
    layouts = [*(LAYOUTS if FULL else SAMPLE)]
    sizes = {layout: parse_layout(layout).world_size for layout in layouts}
    saved = {layout: run_ranks(_save, sizes[layout], layout, tmp_path) for layout in layouts}
    trained_on = []
    for layout in layouts:
        sources = [source for source in layouts if source != layout]
        by_rank = run_ranks(_load_each, sizes[layout], layout, tmp_path, sources)
        for source, *ranks in zip(sources, *by_rank, strict=True):
            for kind in saved[source][0][0]:
                want, _ = assemble([owned[kind] for owned, _ in saved[source]])
                have, shared = assemble([loaded[kind] for loaded, _ in ranks])
                assert not shared
                assert have.keys() == want.keys()
                assert all(torch.equal(have[name], want[name]) for name in want), (source, layout, kind)
            losses = {loss for _, loss in ranks}
            if losses != {None}:
                trained_on.append((source, layout))
                (loss,) = losses
                assert loss == pytest.approx(saved[source][0][1], rel=1e-6)  # FP32, summed in another order
    assert {*trained_on} == {pair for pair in TRAINED_ON if {*pair} <= {*layouts}}
