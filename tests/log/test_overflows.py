"""The report on an overflow distinguishes a non-finite loss, a non-finite gradient and one too large to square. The end
of the search for the first loss scale is reported, without overflows that a lower scale cannot cure.
"""

import math

import pytest

from megamix.log.culprits import Origin, Origins, ParamPeak
from megamix.log.overflows import cause, culprit_table, origin_lines, overflow_words
from megamix.log.scale_search import ScaleSearch

INF, NAN = math.inf, math.nan
NAMES = ["embedding.weight", "blocks.0.up.weight", "blocks.0.down.weight", "blocks.1.up.weight", "norm.weight"]
MANY = [ParamPeak(str(number), INF, INF) for number in range(40)]
VALUES = {None: (4.0, 2.0), "inf": (INF, INF), "NaN": (NAN, NAN), "too large to square": (INF, 2.0**64)}


def peaks(**faults):
    """Return all parameters, with faults by the last two parts of their names, joined by an underscore."""
    found = {
        name: next((faults[key] for key in faults if name.startswith(key.replace("_", "."))), None) for name in NAMES
    }
    return [ParamPeak(name, *VALUES[fault]) for name, fault in found.items()]


def test_one_line_names_the_culprit_and_the_nearest_other():
    rest = peaks(blocks_0_down="inf")
    rest[0] = ParamPeak("embedding.weight", 1e9, 65504 / 4)
    assert overflow_words(4.5, rest) == (
        "blocks.0.down.weight (inf); the largest of the others is embedding.weight at 1.638e+04, "
        "2.0 octaves below 65504"
    )
    rest[0] = ParamPeak("embedding.weight", 1e30, 1e15)
    assert overflow_words(4.5, rest).endswith("embedding.weight at 1e+15")  # BF16 goes on where FP16 ends


def test_many_culprits_are_counted_from_the_end_of_the_model():
    faults = {"blocks": "inf", "norm": "NaN", "embedding": "inf"}
    told = "norm.weight (NaN), blocks.1.up.weight (inf) and 3 more of 5 parameters"
    assert overflow_words(4.5, peaks(**faults)) == told
    assert overflow_words(4.5, peaks(**faults | {"norm": "inf"})) == "all 5 parameters (inf)"


@pytest.mark.parametrize(
    ("loss", "fault", "words"),
    [
        (NAN, "NaN", "the loss itself is nan: the forward pass is at fault, and no loss scale cures that"),
        (INF, "NaN", "the loss itself is inf"),
        (4.5, "NaN", "the loss is finite, but a gradient is NaN"),
        (4.5, "inf", "the loss is finite, but a gradient went beyond its dtype's range"),
        (4.5, "too large to square", "loss and gradients are finite, but a gradient's square is beyond FP32"),
    ],
)
def test_the_cause_tells_loss_gradient_and_square_apart(loss, fault, words):
    assert cause(loss, peaks(blocks_1=fault)).startswith(words)
    assert overflow_words(loss, peaks(blocks_1=fault)).startswith("the loss is ") == (not math.isfinite(loss))


def test_each_culprit_has_a_line_with_ranks_and_micro_batches():
    found = [Origin("blocks.1.up.weight", *place) for place in ((0, 1, "inf"), (0, 3, "inf"), (2, 0, "NaN"))]
    assert origin_lines(peaks(blocks_1="NaN", blocks_0_up="inf"), Origins(found, 0)) == [
        "blocks.1.up.weight: inf on rank 0, micro-batches 1, 3; NaN on rank 2, micro-batch 0",
        "blocks.0.up.weight: inf only in the sum over micro-batches and ranks, in no gradient by itself",
    ]
    (_, left_out) = origin_lines(peaks(blocks_1="NaN", blocks_0_up="inf"), Origins(found, 7))
    assert left_out == "blocks.0.up.weight: inf, among the 7 places that are not listed"
    assert origin_lines(MANY, Origins([], 0))[-1] == "and 36 more parameters"


def test_the_table_of_a_run_that_gives_up_counts_parameters_and_layers():
    history = [peaks(blocks_0="inf"), peaks(blocks_0_down="inf"), peaks(blocks_0_down="NaN", norm="NaN")]
    assert culprit_table(history) == [
        "blocks.0.down.weight: inf in 2 of 3",
        "blocks.0.up.weight: inf in 1 of 3",
        "norm.weight: NaN in 1 of 3",
        "blocks.0.down.weight: NaN in 1 of 3",
        "layers: blocks.0 (3), norm (1)",
    ]
    assert culprit_table([MANY])[-2] == "and 28 more"
    # Attempts without an overflow name nobody.
    assert culprit_table([peaks()] * 20) == []
    assert origin_lines(peaks(), Origins([], 0)) == []


def test_a_search_tells_the_first_scale_the_found_one_and_the_tries_once():
    search = ScaleSearch(1.0)
    assert search.end(2.0**16) == ""
    assert [search.takes(0, 7.6, 2.0**exponent) for exponent in (24, 23, 22)] == [True] * 3
    assert search.end(2.0**21) == "loss scale: 2^24 -> 2^21 in 3 tries, nothing lost"
    assert search.end(2.0**21) == ""


def test_overflows_of_another_cause_are_not_in_a_search():
    search = ScaleSearch(2.0**4)
    # After the first update; the forward pass is at fault; the floor, or the only scale of a static rule.
    for attempt in ((1, 7.6, 2.0**16), (0, math.nan, 2.0**16), (0, 7.6, 2.0**4)):
        assert not search.takes(*attempt)
    assert search.takes(0, 7.6, 2.0**5)
    assert search.end(2.0**4) == "loss scale: 2^5 -> 2^4 in 1 try, nothing lost"
