"""Absolute goals hold for one machine: scales them to this one by the time of a known operation."""

from __future__ import annotations

import queue
import time
from dataclasses import dataclass

from bench.compare.report import Row

REFERENCE_NS = 1210.0
_NUM_PAIRS = 20_000


@dataclass(frozen=True, slots=True)
class Scale:
    """What `queue.Queue` put + get costs here, in ns; REFERENCE_NS on the goals' machine."""

    queue_ns: float

    @classmethod
    def measure(cls) -> Scale:
        """Time put + get; the best of five, as others can only make it slower."""
        return cls(min(_put_get_ns() for _ in range(5)))

    def here(self, value: float) -> float:
        """Return an absolute goal as it stands on this machine."""
        return value * self.queue_ns / REFERENCE_NS

    def row(self) -> Row:
        """Return the measurement as a row of the report."""
        what = "queue.Queue put + get, scales the absolute goals"
        return Row(None, what, "ns", (self.queue_ns,), "the goals' machine", (REFERENCE_NS,))


def _put_get_ns() -> float:
    box: queue.Queue[int] = queue.Queue()
    start_ns = time.perf_counter_ns()
    for number in range(_NUM_PAIRS):
        box.put(number)
        box.get()
    return (time.perf_counter_ns() - start_ns) / _NUM_PAIRS
