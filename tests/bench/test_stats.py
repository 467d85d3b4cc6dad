"""The arithmetic of a measurement."""

import math

import pytest

from bench.load.stats import Spread, median, percentile


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([5.0], 0.99, 5.0),
        ([1.0, 2.0, 3.0, 4.0], 0.50, 2.0),
        ([4.0, 3.0, 2.0, 1.0], 0.75, 3.0),
        ([float(n) for n in range(1, 101)], 0.99, 99.0),
        ([float(n) for n in range(1, 61)], 0.99, 60.0),
        ([1.0, 2.0], 0.0, 1.0),
    ],
)
def test_a_percentile_is_a_value_that_was_seen(values, share, expected):
    assert percentile(values, share) == expected


def test_without_values_nothing_is_claimed():
    assert math.isnan(percentile([], 0.5))
    assert math.isnan(median([]))
    assert math.isnan(Spread.of([]).median)


def test_the_median_of_an_even_number_lies_between_the_middle_two():
    assert median([4.0, 1.0, 3.0, 2.0]) == 2.5
    assert median([3.0, 1.0, 2.0]) == 2.0


def test_a_spread_leaves_out_runs_without_a_value():
    assert Spread.of([3.0, math.nan, 1.0]) == Spread(2.0, 1.0, 3.0)
