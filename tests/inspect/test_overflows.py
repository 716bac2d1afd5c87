"""The report on an overflow distinguishes a non-finite loss, a non-finite gradient and one too large to square."""

import math

import pytest

from megamix.inspect.culprits import Origin, Origins, ParamPeak
from megamix.inspect.overflows import cause, culprit_table, origin_lines, overflow_words

INF, NAN = math.inf, math.nan
NAMES = ["embedding.weight", "blocks.0.up.weight", "blocks.0.down.weight", "blocks.1.up.weight", "norm.weight"]
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
    assert overflow_words(4.5, peaks(**faults)) == (
        "norm.weight (NaN), blocks.1.up.weight (inf) and 3 more of 5 parameters"
    )
    everywhere = {"blocks": "inf", "norm": "inf", "embedding": "inf"}
    assert overflow_words(4.5, peaks(**everywhere)) == "all 5 parameters (inf)"


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
    found = [
        Origin("blocks.1.up.weight", 0, 1, "inf"),
        Origin("blocks.1.up.weight", 0, 3, "inf"),
        Origin("blocks.1.up.weight", 2, 0, "NaN"),
    ]
    assert origin_lines(peaks(blocks_1="NaN", blocks_0_up="inf"), Origins(found, 0)) == [
        "blocks.1.up.weight: inf on rank 0, micro-batches 1, 3; NaN on rank 2, micro-batch 0",
        "blocks.0.up.weight: inf only in the sum over micro-batches and ranks, in no gradient by itself",
    ]
    (_, left_out) = origin_lines(peaks(blocks_1="NaN", blocks_0_up="inf"), Origins(found, 7))
    assert left_out == "blocks.0.up.weight: inf, among the 7 places that are not listed"
    many = [ParamPeak(str(number), INF, INF) for number in range(40)]
    assert origin_lines(many, Origins([], 0))[-1] == "and 36 more parameters"


def test_the_table_of_a_run_that_gives_up_counts_parameters_and_layers():
    history = [peaks(blocks_0="inf"), peaks(blocks_0_down="inf"), peaks(blocks_0_down="NaN", norm="NaN")]
    assert culprit_table(history) == [
        "blocks.0.down.weight: inf in 2 of 3",
        "blocks.0.up.weight: inf in 1 of 3",
        "norm.weight: NaN in 1 of 3",
        "blocks.0.down.weight: NaN in 1 of 3",
        "layers: blocks.0 (3), norm (1)",
    ]
    assert culprit_table([[ParamPeak(str(number), INF, INF) for number in range(40)]])[-2] == "and 28 more"


def test_attempts_without_an_overflow_name_nobody():
    assert culprit_table([peaks()] * 20) == []
    assert origin_lines(peaks(), Origins([], 0)) == []
