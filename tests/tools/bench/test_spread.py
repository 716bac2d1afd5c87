"""Medians, quartiles and paired ratios, by numbers worked out by hand."""

import pytest

from megamix.tools.bench.report import Spread, paired_ratio, spread


@pytest.mark.parametrize(
    ("values", "want"),
    [
        ([5.0], Spread(5.0, 5.0, 5.0)),
        ([3.0, 1.0], Spread(1.5, 2.0, 2.5)),
        ([4.0, 1.0, 3.0, 2.0, 5.0], Spread(2.0, 3.0, 4.0)),
        ([1.0, 2.0, 3.0, 4.0], Spread(1.75, 2.5, 3.25)),
    ],
)
def test_median_between_its_quartiles(values: list[float], want: Spread) -> None:
    assert spread(values) == want


def test_a_slow_round_cancels_in_a_paired_ratio() -> None:
    # The machine is ten times slower in the second round, for both sides.
    assert paired_ratio([20.0, 2.0, 20.0], [10.0, 1.0, 10.0]) == Spread(2.0, 2.0, 2.0)
    assert paired_ratio([1.0, 6.0, 2.0], [1.0, 2.0, 1.0]) == Spread(1.5, 2.0, 2.5)


def test_rounds_that_do_not_pair_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        paired_ratio([1.0, 2.0], [1.0])
