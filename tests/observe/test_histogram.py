"""Buckets add up, and a bound belongs to its own bucket."""

from lqs.observe.histogram import Histogram


def test_values_count_in_every_bucket_that_they_are_not_above() -> None:
    histogram = Histogram((1, 2.5))
    for value in (0.5, 1, 1.1, 99):
        histogram.observe(value)
    histogram.observe(2, count=3)
    assert histogram.buckets() == [("1.0", 2), ("2.5", 6), ("+Inf", 7)]
    assert histogram.sum == 0.5 + 1 + 1.1 + 99 + 6
