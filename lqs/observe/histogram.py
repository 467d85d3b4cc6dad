"""Counts of values by size, as cheap as counting can be."""

from __future__ import annotations

from bisect import bisect_left


class Histogram:
    """Counts of values up to each bound, and their sum. Owner: the event loop."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Add `count` times the value."""
        self._counts[bisect_left(self._bounds, value)] += count
        self.sum += value * count

    def buckets(self) -> list[tuple[str, float]]:
        """For each bound in Prometheus' spelling, how many values were not above it."""
        total, found = 0, []
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        for name, count in zip(names, self._counts, strict=True):
            total += count
            found.append((name, float(total)))
        return found
