"""Families of metrics about waiting, promises, alerts and rounds, and the small ones that all share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from lqs.observe.alerts import Alerts
from lqs.observe.counts import Counts, Errors
from lqs.request import NS_PER_S

# (name, doc, the core's name, unit) of what is shown by class and lane.
_QUEUE_GAUGES = (
    ("lqs_lane_queue_depth", "Waiting, by class and lane.", "num_waiting", 1),
    ("lqs_lane_queue_drain_rate", "Starts per second while it had a queue, by class and lane.", "drain_rate", 1),
)
_QUEUE_COUNTERS = (
    ("lqs_lane_queue_started", "Requests that left for a device slot, by class and lane.", "num_started", 1),
    ("lqs_lane_queue_wait_seconds", "Time waited by those, by class and lane.", "wait_ns_sum", NS_PER_S),
)


class Promised(Protocol):
    """What the refused were told, as far as it is shown."""

    num_made: int
    num_kept: int

    def num_promised(self, level: int, now_ns: int) -> int: ...
    def return_share(self, level: int) -> float: ...


class Life(NamedTuple):
    """How often a device slot died and was opened anew, whatever stood for it, since the server began."""

    device: str
    model: str
    num_deaths: int
    num_reopened: int


def life_families(lives: Iterable[Life]) -> Iterator[Metric]:
    """What goes on counting where the figures of a worker begin anew with it."""
    labels = ["device", "model"]
    deaths = CounterMetricFamily("lqs_device_deaths", "Times that it stopped working for good.", labels=labels)
    reopened = CounterMetricFamily("lqs_device_reopenings", "Times that it was opened anew.", labels=labels)
    for life in lives:
        deaths.add_metric([life.device, life.model], life.num_deaths)
        reopened.add_metric([life.device, life.model], life.num_reopened)
    yield deaths
    yield reopened


def queue_families(
    queues: Sequence[Sequence[Mapping[str, Any]]], lanes: Sequence[str], levels: Sequence[str]
) -> Iterator[Metric]:
    """What waits in each lane and class. `queues` is by lane, then by class."""
    for name, doc, key, unit in _QUEUE_GAUGES:
        yield _by_queue(GaugeMetricFamily(name, doc, labels=["level", "lane"]), queues, lanes, levels, key, unit)
    for name, doc, key, unit in _QUEUE_COUNTERS:
        yield _by_queue(CounterMetricFamily(name, doc, labels=["level", "lane"]), queues, lanes, levels, key, unit)
    means = GaugeMetricFamily(
        "lqs_queue_mean_wait_seconds", "Mean wait of all that started, by class and lane.", labels=["level", "lane"]
    )
    for lane, by_level in zip(lanes, queues, strict=False):
        for level, seen in zip(levels, by_level, strict=True):
            means.add_metric([level, lane], seen["wait_ns_sum"] / NS_PER_S / max(seen["num_started"], 1))
    yield means


def foretold_families(
    counts: Counts, promised: Promised | None, levels: Sequence[str], now_ns: int
) -> Iterator[Metric]:
    """How far from the truth clients were told what they wait, and when to come back."""
    yield _histogram(
        "lqs_wait_error_ratio", "Expected wait at its start beside the real one: error over wait.", counts.wait_error
    )
    yield GaugeMetricFamily(
        "lqs_wait_error_median", "The same, the median of the last 256.", value=counts.wait_error.median()
    )
    yield _histogram(
        "lqs_retry_error_ratio", "Promised time beside when the place came free: error over it.", counts.retry_error
    )
    yield GaugeMetricFamily(
        "lqs_retry_error_median", "The same, the median of the last 256 promises.", value=counts.retry_error.median()
    )
    if promised is None:
        return
    yield CounterMetricFamily("lqs_promises", "Places promised to the refused.", value=promised.num_made)
    yield CounterMetricFamily("lqs_promises_kept", "Promised places that were taken.", value=promised.num_kept)
    outstanding = {level: float(promised.num_promised(n, now_ns)) for n, level in enumerate(levels)}
    yield gauges("lqs_promises_outstanding", "Promises not yet claimed, by class.", "level", outstanding)
    shares = {level: promised.return_share(n) for n, level in enumerate(levels)}
    yield gauges("lqs_promises_return_share", "How many of the promised come, lately, by class.", "level", shares)


def round_families(rounds: Mapping[str, Any]) -> Iterator[Metric]:
    """How long the scheduler takes to decide."""
    if rounds:
        buckets = [("+Inf" if bound == float("inf") else f"{bound:g}", float(n)) for bound, n in rounds["counts"]]
        yield HistogramMetricFamily(
            "lqs_round_time_seconds", "Time of a round of the scheduler.", buckets=buckets, sum_value=rounds["seconds"]
        )


def alert_families(alerts: Alerts | None) -> Iterator[Metric]:
    """What is raised, and the figures that the rules look at."""
    if alerts is None:
        return
    raised = GaugeMetricFamily("lqs_alert", "1 while the alert is raised.", labels=["rule", "level"])
    for alert in alerts.alerts:
        raised.add_metric([alert.rule, str(alert.level)], alert.is_raised)
    yield raised
    yield gauges("lqs_alert_value", "The figure that a rule looks at.", "rule", alerts.values)


def gauges(name: str, doc: str, label: str, values: Mapping[str, float]) -> Metric:
    """A gauge for each value of one label."""
    return _filled(GaugeMetricFamily(name, doc, labels=[label]), values)


def counters(name: str, doc: str, label: str, values: Mapping[str, float]) -> Metric:
    """A counter for each value of one label."""
    return _filled(CounterMetricFamily(name, doc, labels=[label]), values)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, float]) -> Metric:
    for value, count in values.items():
        family.add_metric([value], count)
    return family


def _by_queue(
    family: GaugeMetricFamily | CounterMetricFamily,
    queues: Sequence[Sequence[Mapping[str, Any]]],
    lanes: Sequence[str],
    levels: Sequence[str],
    key: str,
    unit: int,
) -> Metric:
    for lane, by_level in zip(lanes, queues, strict=False):
        for level, seen in zip(levels, by_level, strict=True):
            family.add_metric([level, lane], seen[key] / unit)
    return family


def _histogram(name: str, doc: str, errors: Errors) -> Metric:
    histogram = errors.histogram
    return HistogramMetricFamily(name, doc, buckets=histogram.buckets(), sum_value=histogram.sum)
