"""Families of metrics about the models: where each stands between file and memory, and who waits for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

# (name, doc, the figure's name).
_GAUGES = (
    ("lqs_model_users", "Requests that hold the model in memory.", "num_users"),
    ("lqs_model_waiting", "Requests that wait for the model to be loaded.", "num_waiting"),
)
_COUNTERS = (
    ("lqs_model_loads", "Loads that were begun after the start.", "num_loads"),
    ("lqs_model_failed_loads", "Loads that failed.", "num_failed_loads"),
    ("lqs_model_unloads", "Times that it has left memory.", "num_unloads"),
)


class ModelFigures(NamedTuple):
    """What is shown of one model."""

    name: str
    standing: str
    num_users: int
    num_waiting: int
    num_loads: int
    num_failed_loads: int
    num_unloads: int
    failure: str | None  # Why the last load failed.


def model_families(models: Iterable[ModelFigures], standings: Iterable[str]) -> Iterator[Metric]:
    """Every family; `standings` are all that there are."""
    known = list(models)
    standing = GaugeMetricFamily(
        "lqs_model_standing",
        "1 for where it stands: absent, waiting, loading, ready, closed or unloading.",
        labels=["model", "standing"],
    )
    for each in known:
        for word in standings:
            standing.add_metric([each.name, word], each.standing == word)
    yield standing
    for name, doc, figure in _GAUGES:
        gauge = GaugeMetricFamily(name, doc, labels=["model"])
        for each in known:
            gauge.add_metric([each.name], getattr(each, figure))
        yield gauge
    for name, doc, figure in _COUNTERS:
        counter = CounterMetricFamily(name, doc, labels=["model"])
        for each in known:
            counter.add_metric([each.name], getattr(each, figure))
        yield counter
