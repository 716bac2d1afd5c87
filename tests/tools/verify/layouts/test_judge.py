"""`verify` catches and names planted bugs: a missing reduction, a norm counted once per rank, a wrong divisor, a stale
gather, a scale applied twice, a tied table that a pipeline's ends do not sum, an overflow that only one rank sees.
"""

from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from megamix.tools.verify.core.layout import parse_layout
from megamix.tools.verify.core.verdict import EXPLAINED
from megamix.tools.verify.layouts.judge_steps import judge
from megamix.tools.verify.layouts.layout_lines import verify_layout
from megamix.tools.verify.layouts.observe import _Documents, observe
from tests.tools.verify.catalogue.bugs import BUGS
from tests.tools.verify.catalogue.engine import OWN
from tests.tools.verify.catalogue.run import config_of, judged_layouts, verdicts
from tests.tools.verify.catalogue.test_catalogue import check
from tests.tools.verify.jobs import UPDATES, make_config


def _part(bug):
    """Return what of a job a bug is in."""
    if "experts" in bug.job.get("model", {}):
        return "experts of 4 ranks" if bug.ranks == 4 else "experts"
    return "muon" if bug.job.get("name") == "muon" else "job" if bug.job else bug.layout.partition("-")[0]


PARTS = {}
for bug in BUGS.values():
    if bug.layout:
        PARTS.setdefault(_part(bug), []).append(bug)


@pytest.mark.parametrize("part", PARTS)
def test_planted_bugs_are_named_and_are_the_rows_of_the_table(run_ranks, part):
    check(verdicts(run_ranks, [bug.name for bug in PARTS[part]]))


def test_the_parts_of_tensor_parallel_ranks_and_of_owners_are_named(run_ranks):
    config = make_config("tp2sp", loss_scale=4.0)
    (verdict,) = judged_layouts(run_ranks, 2, [config], ["positions_of_one_rank"], None, 1)
    found = [one.looks_like for one in verdict.differences[:EXPLAINED] if one.check == "gradient"]
    kinds = OWN, "tensor-parallel rank 1's part is missing"  # the same numbers for rank 0's elements
    assert {next((kind for kind in kinds if text.startswith(kind)), text) for text in found} == {*kinds}


def test_what_a_job_may_have_passes(run_ranks):
    one_layer = {"num_layers": 1}
    jobs = [config_of(bug).with_keys(model=one_layer) for bug in PARTS["job"] if bug.ranks == 2 and bug.attempt == 0]
    jobs += [
        make_config("dp2", family="gpt", dtype="bf16", name="nag"), make_config("dp2", dtype="fp32", clip_grad=0.0),
    ]  # fmt: skip
    for config, verdict in zip(jobs, judged_layouts(run_ranks, 2, jobs), strict=True):
        assert verdict.differences == []
        assert (verdict.attempts, verdict.skipped) == (3, 1)
        assert 0 < verdict.worst["gradient"] < 1  # it was compared, and rounds
        assert 0 < verdict.worst.get("average", 0.5) < 1, config


def test_no_unit_drops_out_where_one_process_would_drop_others(run_ranks):
    pool = SimpleNamespace(where="cpu", call=lambda work, *args: run_ranks(work, 1, *args))
    configs = [make_config("dp1", model={"dropout": share}) for share in (0.0, 0.3)]
    without, dropped = (verify_layout(config, parse_layout("dp1"), pool) for config in configs)
    assert without.differences == []
    assert without == dropped  # every share of a bound is the same


def test_steps_without_any_target_pass():
    config = make_config("dp1", packing="documents")
    right = _Documents.read

    def read(documents, samples):
        rows = right(documents, samples)
        return rows._replace(positions=np.zeros_like(rows.tokens))  # every document has one token

    with mock.patch.object(_Documents, "read", read):
        verdict = judge(config, [observe(config, UPDATES, None)], torch.device("cpu"), UPDATES, None)
    assert (verdict.differences, verdict.attempts) == ([], UPDATES)


def test_a_run_that_only_overflows_has_proved_nothing(monkeypatch):
    monkeypatch.setattr("megamix.tools.verify.layouts.observe.MOST_SKIPPED", 1)
    config = make_config("dp1", loss_scale=2.0**100)
    verdict = judge(config, [observe(config, UPDATES, None)], torch.device("cpu"), UPDATES, None)
    assert (verdict.attempts, verdict.skipped) == (UPDATES + 1, UPDATES + 1)
    assert str(verdict.differences[0]) == "attempt 2: applied updates of the run: 0 of 2"
