"""The end of the search for the first loss scale is reported; an overflow that a lower scale cannot cure does not
belong to the search.
"""

import math

from megamix.inspect.scale_search import ScaleSearch


def test_it_tells_the_first_scale_the_found_one_and_the_tries_once():
    search = ScaleSearch(1.0)
    assert [search.takes(0, 7.6, 2.0**exponent) for exponent in (24, 23, 22)] == [True] * 3
    assert search.end(2.0**21) == "loss scale: 2^24 -> 2^21 in 3 tries, nothing lost"
    assert search.end(2.0**21) == ""


def test_a_first_scale_that_holds_is_no_search():
    assert ScaleSearch(1.0).end(2.0**16) == ""


def test_overflows_of_another_cause_are_not_in_it():
    search = ScaleSearch(2.0**4)
    assert not search.takes(1, 7.6, 2.0**16)  # after the first update
    assert not search.takes(0, math.nan, 2.0**16)  # the forward pass is at fault
    assert not search.takes(0, 7.6, 2.0**4)  # the floor, or the only scale of a static rule
    assert search.takes(0, 7.6, 2.0**5)
    assert search.end(2.0**4) == "loss scale: 2^5 -> 2^4 in 1 try, nothing lost"
