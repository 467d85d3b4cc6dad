"""The arithmetic of a measurement: percentiles, medians, and the spread of repeated runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` (0..1) of all values do not exceed.

    The nearest rank, never an interpolation: what is reported has been seen. NaN for no values.
    """
    if not values:
        return math.nan
    rank = math.ceil(share * len(values))
    return sorted(values)[max(rank, 1) - 1]


def median(values: Sequence[float]) -> float:
    """Return the middle value, or the mean of the two middle ones. NaN for no values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    half = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[half]
    return (ordered[half - 1] + ordered[half]) / 2


@dataclass(frozen=True, slots=True)
class Spread:
    """Repeated runs of one measurement: the median stands for them, min and max for scatter."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise runs; runs without a value (NaN) are left out."""
        seen = [value for value in values if not math.isnan(value)]
        if not seen:
            return cls(math.nan, math.nan, math.nan)
        return cls(median(seen), min(seen), max(seen))
