"""Under even routing the plan of a model with experts is right within 5 %; however tokens choose, ranks stay within its
worst case, and within the memory for which it names a factor.
"""

import json
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from megamix.model.experts import Router
from megamix.tools.plan.activations import TracedWork, trace_stage
from megamix.tools.plan.advice import Advice, advise
from megamix.tools.plan.expert_rows import expert_rows
from megamix.tools.plan.memory_plan import plan_memory
from megamix.tools.plan.report import report_lines
from megamix.tools.verify.core.layout import parse_layout
from megamix.train.least_memory import amount
from tests.builders import divided
from tests.conftest import FULL
from tests.tools.plan.test_memory_plan import SCALARS, _measured
from tests.tools.plan.test_memory_plan import _config as _dense

NUM_EXPERTS, TOP_K = 8, 2
EXPERTS = {"num_experts": NUM_EXPERTS, "top_k": TOP_K, "ffn_hidden_size": 192}
CROWDED = (0.0, 0.5, 1.0)  # shares of the tokens that choose the first experts; the others choose all in turn
AGAIN, BF16 = {"recompute": "full"}, {"dtype": "bf16"}
GATHER = {"expert": {"size": 2, "method": "gather"}}
CASES = {
    "exchange, positions divided": ("cp2ep2", BF16),
    "exchange, recompute": ("dp2ep2", AGAIN),
    "gather": ("dp2ep2", GATHER | BF16),
}
MORE = {
    "exchange in fp32": ("dp2ep2", {"recompute": "selective", "dtype": "fp32"}),
    "exchange, two stages": ("dp2ep2pp2", BF16),
    "gather, recompute": ("dp2ep2", GATHER | BF16 | AGAIN),
    "not divided": ("dp2", {}),
}


def _config(layout, **settings):
    sizes = {"vocab_size": 64, "seq_len": 64, "num_layers": 2, "experts": EXPERTS, "micro_batch_size": 8}
    return parse_layout(layout).apply(_dense(**sizes | settings), 2 if "pp" in layout else 1)


def _traced(config, blocks, dtype=torch.bfloat16):
    """Return what a GPU keeps of these blocks: with even routing, and with all tokens at the experts of one rank."""
    work = TracedWork(model=config.model, batch=(8, 64), dtype=dtype, machine="gpu", division=config.parallelism)
    return [trace_stage(replace(work, crowded=crowded), range(blocks)) for crowded in (False, True)]


_all_to_all = dist.all_to_all_single


def _with_copies(arrived, sent, *sizes, group, async_op=False):
    """Exchange copies that nobody counts: a thread of Gloo keeps what it was given for a moment longer."""
    with _disable_current_modes():
        copy = torch.empty_like(arrived)
        _all_to_all(copy, sent.clone(), *sizes, group=group)
        arrived.copy_(copy)


def _peaks(config):
    """Return the most bytes that live at once on this rank, for each share of CROWDED."""
    peaks = []
    for share in CROWDED:

        def choose(router, ranking, share=share):
            tokens = torch.arange(ranking[..., 0].numel()).view(*ranking.shape[:-1], 1)
            first = (TOP_K * tokens).masked_fill(tokens < share * tokens.numel(), 0)
            return (first + torch.arange(TOP_K)) % NUM_EXPERTS

        with mock.patch.object(Router, "choose", choose), mock.patch.object(dist, "all_to_all_single", _with_copies):
            peaks.append(max(_measured(config, steps=1)[2].values()))
    return peaks


@pytest.mark.parametrize("name", CASES | MORE if FULL else CASES)
def test_ranks_stay_within_the_plan_however_tokens_choose(run_ranks, name):
    layout_name, settings = (CASES | MORE)[name]
    layout, config = parse_layout(layout_name), _config(layout_name, **settings)
    even, half, worst = map(max, zip(*run_ranks(_peaks, layout.world_size, config), strict=True))
    plan = plan_memory(config, layout.size("dp"), "cpu")
    rows = expert_rows(config, plan, None)
    assert even == pytest.approx(plan.peak, rel=0.05)
    assert 0.95 * rows.worst_peak <= worst <= rows.worst_peak + SCALARS
    between = (plan.peak + rows.worst_peak) // 2
    assert half <= between + SCALARS
    if rows.worst > rows.even:
        factor = expert_rows(config, plan, between).factor
        assert factor == pytest.approx(1 + CROWDED[1] * (rows.worst / rows.even - 1), rel=1e-6)


@pytest.mark.parametrize(("recompute", "widened"), [("none", 4), ("selective", 2), ("full", 0)])
def test_each_further_row_keeps_in_each_layer_what_a_count_by_hand_says(recompute, widened):
    """A block keeps a row's input, the outputs of gate and up, that of their product, weighted and not, in BF16, and
    the weight. The row's place is kept for the way back, and for a repetition of the whole block.
    """
    even, worst = _traced(_config("dp4ep4", recompute=recompute), 2)
    row = 8 + (0 if recompute == "full" else 2 * (128 + widened * 192) + 4)
    assert worst.blocks - even.blocks == 2 * row * (8 - 2) * 8 * 64


def test_the_worst_case_on_a_gpu_has_groups_padded_to_twice_their_rows():
    """Padding is alive while a product is computed: at most its input and its output, in halves. BF16 has none."""
    rows, sizes = TOP_K * 8 * 64, (128, 192)
    for dtype, padding in ((torch.float16, 2 * rows * sum(sizes)), (torch.bfloat16, 0)):
        even, worst = _traced(_config("dp2"), 1, dtype)
        assert worst.blocks == even.blocks
        assert padding // 4 <= worst.forward - even.forward <= padding


def test_the_report_says_what_uneven_routing_takes():
    config = _config("dp4ep4")
    plan = plan_memory(config, 4, "gpu")
    rows = expert_rows(config, plan, None)
    tokens = 8 * 64
    assert (rows.even, rows.worst, rows.factor) == (2 * tokens, 8 * tokens, None)
    assert expert_rows(config, plan, plan.peak - 1) == rows
    third = plan.peak + (rows.worst_peak - plan.peak) // 3
    for limit, factor in ((plan.peak, 1.0), (third, 2.0), (rows.worst_peak + 1, 4.0)):
        assert expert_rows(config, plan, limit).factor == pytest.approx(factor, rel=1e-3)
    lines = [*report_lines(config, 4, "gpu", third, as_json=False)]
    (worst,) = (line for line in lines if "all tokens choose experts here" in line)
    assert worst.endswith(f" {8 * tokens:,}, peak {amount(rows.worst_peak)}")
    (most,) = (line for line in lines if " 2.00 times as many" in line)
    assert most.endswith('; model.recompute = "full" keeps the least of a row')
    (text,) = report_lines(config, 4, "gpu", plan.peak, as_json=True)
    assert json.loads(text)["experts"] == rows._asdict() | {"factor": 1.0}


@pytest.mark.parametrize(("layout", "settings"), [("dp2", BF16), ("dp2ep2", GATHER | BF16)])
def test_rows_that_no_routing_changes_are_said_once(layout, settings):
    config = _config(layout, **settings)
    rows = expert_rows(config, plan := plan_memory(config, 2, "gpu"), None)
    assert (rows.even, rows.worst_peak) == (rows.worst, plan.peak)
    lines = [*report_lines(config, 2, "gpu", plan.peak, as_json=False)]
    assert [line.split()[-1] for line in lines if "however tokens choose" in line] == [f"{rows.even:,}"]
    assert not any("even routing" in line for line in lines)


def test_rows_are_planned_that_do_not_divide_by_the_ranks():
    config = _config("dp4ep4", seq_len=9, micro_batch_size=1)
    rows = expert_rows(config, plan_memory(config, 4, "gpu"), None)
    assert (rows.even, rows.worst) == (2 * 9, 2 * 4 * 9)


def test_more_ranks_for_the_experts_are_proposed_with_the_peak_that_they_lead_to():
    config = _config("dp4-parameters", **BF16, **AGAIN, seq_len=63, micro_batch_size=1)  # no other ways
    more = divided(config, expert={"size": 4})
    plan, smaller = plan_memory(config, 4, "gpu"), plan_memory(more, 4, "gpu")
    assert Advice("parallelism.expert.size = 4", smaller.peak) in advise(config, plan, smaller.peak)
