"""Full collections of garbage wait for a quiet moment."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from lqs.collector import AT_LATEST_NS, EVERY_NS, NUM_INSIDE_QUIET, Collector


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    collector.start(0)
    yield collector
    collector.stop()


def num_full() -> int:
    return gc.get_stats()[2]["collections"]


def test_however_much_is_made_nothing_but_the_young_is_looked_at(collector: Collector) -> None:
    before, young = num_full(), gc.get_stats()[1]["collections"]
    kept = [[number] for number in range(300_000)]
    assert (num_full(), len(kept)) == (before, 300_000)
    assert gc.get_stats()[1]["collections"] > young
    assert gc.get_freeze_count() > 10_000


def test_what_hangs_in_a_cycle_goes_when_few_requests_are_inside(collector: Collector) -> None:
    before = num_full()
    collector.tend(NUM_INSIDE_QUIET, EVERY_NS - 1)
    collector.tend(NUM_INSIDE_QUIET + 1, EVERY_NS)
    assert num_full() == before
    collector.tend(NUM_INSIDE_QUIET, EVERY_NS)
    assert num_full() == before + 1
    collector.tend(NUM_INSIDE_QUIET, 2 * EVERY_NS - 1)
    assert num_full() == before + 1


def test_a_server_that_is_never_quiet_collects_all_the_same_in_the_end(collector: Collector) -> None:
    before = num_full()
    collector.tend(10**6, AT_LATEST_NS)
    assert num_full() == before + 1


def test_the_interpreter_gets_its_collector_back() -> None:
    thresholds = gc.get_threshold()
    collector = Collector()
    collector.start(0)
    collector.stop()
    assert gc.get_threshold() == thresholds
    assert gc.get_freeze_count() == 0
