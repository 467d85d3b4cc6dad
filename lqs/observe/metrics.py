"""The page behind `/metrics`, made when it is asked for.

Names are vLLM's where vLLM has the thing, so that dashboards work unchanged, else `lqs_`. Labels
come from the config alone: a client can never make a new series. Nothing here waits for the
engine: the core and the workers publish counters, and rendering reads them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from lqs.config import Config
from lqs.observe import tables
from lqs.observe.alerts import Alerts
from lqs.observe.counts import Counts
from lqs.observe.families import (
    Life,
    Promised,
    alert_families,
    foretold_families,
    life_families,
    queue_families,
    round_families,
)
from lqs.observe.families import counters as _counters
from lqs.observe.families import gauges as _gauges
from lqs.request import NS_PER_S, Lane

_LANES = tuple(lane.name.lower() for lane in Lane)
_DEVICE_STATES = (
    *("new", "ready", "stopped", "dead", "parked", "failed"),
    *("resting", "probation", "backoff", "opening", "quarantined"),
)

# (name, doc) of what it shows by limit.
_LIMIT_REMAINING = ("lqs_limit_remaining", "What is left of a limit for the whole server; of compute in microseconds.")
_LIMIT_REFUSALS = ("lqs_limit_refusals", "Requests that a limit refused.")

Snapshot = Callable[[], Mapping[str, Any]]


class LimitFigures(Protocol):
    """What is shown of one limit; `remaining` is None for one that is not for the whole server."""

    @property
    def num_refused(self) -> int: ...
    @property
    def remaining(self) -> int | None: ...


class Metrics(Counts):
    """Shows what the loop has counted, and what core and workers publish.

    `core` reads the scheduler's snapshot, `workers` those of the device slots by name, `bounds`
    by name how much of each further bound is used and what it is, `door` the figures of the door,
    `limits` by name how limits stand, `alerts` the rules, `promised` what the refused were told,
    `rounds` how long the scheduler's rounds took, `gpus` makes the families of the GPUs, `lives` tells
    what became of every device slot.

    Owner: the event loop.
    """

    def __init__(
        self,
        config: Config,
        *,
        model_name: str,
        core: Snapshot,
        workers: Callable[[], Mapping[str, Mapping[str, Any]]],
        closed_reason: Callable[[], str | None],
        door: Snapshot,
        bounds: Callable[[], Mapping[str, tuple[int, int]]] = dict,
        limits: Callable[[], Mapping[str, LimitFigures]] = dict,
        alerts: Callable[[], Alerts | None] = lambda: None,
        promised: Promised | None = None,
        rounds: Snapshot = dict,
        gpus: Callable[[], Iterator[Metric]] = lambda: iter(()),
        lives: Callable[[], Iterable[Life]] = tuple,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        super().__init__(len(config.queue.levels), len(_LANES), now_ns)
        self._levels = config.queue.levels
        self._config = config
        self._labels = {"model_name": model_name}
        self._core = core
        self._workers = workers
        self._closed_reason = closed_reason
        self._door = door
        self._bounds = bounds
        self._limits = limits
        self._alerts = alerts
        self._promises = promised
        self._rounds = rounds
        self._gpus = gpus
        self._lives = lives
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def render(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        """Keep the registry from collecting when this is registered."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All families. Called by the registry."""
        core, workers = self._core(), self._workers()
        yield from self._queue_families(core)
        yield from self._door_families(door := self._door())
        yield from self._device_families(core["slots"], workers)
        yield from self._token_families(workers.values())
        yield from self._histograms()
        yield from self._bound_families(core, door, workers)
        yield from self._limit_families()
        yield from queue_families(core["queues"], _LANES, self._levels)
        yield from foretold_families(self, self._promises, self._levels, self._now_ns())
        yield from round_families(self._rounds())
        yield from alert_families(self._alerts())
        yield from self._gpus()
        yield from life_families(self._lives())

    def _queue_families(self, core: Mapping[str, Any]) -> Iterator[Metric]:
        levels, lanes = core["levels"], core["lanes"]
        num_waiting = sum(level["num_waiting"] for level in levels)
        yield self._gauge("vllm:num_requests_running", "Requests that run.", core["num_running"])
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait.", num_waiting)
        for name, doc, key in tables.LEVEL_GAUGES:
            yield _gauges(name, doc, "level", self._by_level(levels, key))
        for name, doc, key in tables.LEVEL_COUNTERS:
            yield _counters(name, doc, "level", self._by_level(levels, key))
        for name, doc, key in tables.LANE_GAUGES:
            yield _gauges(name, doc, "lane", {lane: seen[key] for lane, seen in zip(_LANES, lanes, strict=True)})
        yield GaugeMetricFamily("lqs_lane_border_tokens", "Where short ends just now.", value=core["border_tokens"])
        yield GaugeMetricFamily("lqs_holding", "Device slots held for one request each.", value=core["num_holding"])
        yield GaugeMetricFamily("lqs_queue_total_places_taken", "Places taken.", value=core["num_entered"])
        yield _gauges(
            "lqs_queue_oldest_wait_seconds", "Longest wait of those waiting.", "level", self._oldest_waits_s(levels)
        )
        yield GaugeMetricFamily("lqs_ready", "1 while requests are let in.", value=self._closed_reason() is None)
        yield _counters("lqs_refusals", "Requests refused.", "reason", self.refused_by_reason)
        yield CounterMetricFamily(
            "lqs_refusals_too_many",
            "Refusals with 429 but for limits: more than the server can do.",
            value=self.num_too_many,
        )
        yield CounterMetricFamily("lqs_degraded", "Requests that the fallback model answered.", value=self.num_degraded)

    def _door_families(self, door: Mapping[str, Any]) -> Iterator[Metric]:
        for name, doc, key in tables.DOOR_GAUGES:
            yield _gauges(name, doc, "level", self._by_level(door["levels"], key))
        for name, doc, key in tables.DOOR_COUNTERS:
            yield _counters(name, doc, "level", self._by_level(door["levels"], key))
        yield GaugeMetricFamily("lqs_queue_total_places", "Places, all classes.", value=door["total"])
        warned = {"all": door["is_warned"], **self._by_level(door["levels"], "is_warned")}
        yield _gauges("lqs_queue_warning", "1 while a class, or all together, is nearly full.", "level", warned)
        yield GaugeMetricFamily("lqs_load", "How much is taken of KV or queue; 1 is all.", value=door["load"])

    def _by_level(self, levels: Iterable[Mapping[str, Any]], key: str) -> dict[str, float]:
        return {level: seen[key] for level, seen in zip(self._levels, levels, strict=True)}

    def _oldest_waits_s(self, levels: Iterable[Mapping[str, Any]]) -> dict[str, float]:
        now_ns = self._now_ns()
        waits_ns = [now_ns - level["oldest_arrival_ns"] if level["num_waiting"] else 0 for level in levels]
        return {level: max(wait_ns, 0) / NS_PER_S for level, wait_ns in zip(self._levels, waits_ns, strict=True)}

    def _device_families(
        self, slots: list[Mapping[str, Any]], workers: Mapping[str, Mapping[str, Any]]
    ) -> Iterator[Metric]:
        for name, doc, key in tables.DEVICE_GAUGES:
            yield _gauges(name, doc, "device", {device: seen[key] for device, seen in workers.items()})
        for name, doc, key in tables.DEVICE_COUNTERS:
            yield _counters(name, doc, "device", {device: seen[key] for device, seen in workers.items()})
        for name, doc, key in tables.DEVICE_CLOCKS:
            yield _counters(name, doc, "device", {device: seen[key] / NS_PER_S for device, seen in workers.items()})
        for name, doc, key in tables.LEDGER_GAUGES:
            yield _gauges(name, doc, "device", {device: slots[seen["slot"]][key] for device, seen in workers.items()})
        for name, doc, key in tables.LEDGER_COUNTERS:
            yield _counters(name, doc, "device", {device: slots[seen["slot"]][key] for device, seen in workers.items()})
        states = GaugeMetricFamily(
            "lqs_device_state",
            "1 for the state that it is in; docs/devices.md says what each means.",
            labels=["device", "state"],
        )
        for device, seen in workers.items():
            for state in _DEVICE_STATES:
                states.add_metric([device, state], state == seen["state"])
        yield states
        # Where nobody runs and nobody may start, as on those of a model that is not loaded, there is none.
        there = [slot for slot in slots if not slot["is_dead"] and (not slot["is_drained"] or slot["reserved"])]
        capacity = sum(slot["capacity"] for slot in there)
        reserved = sum(slot["reserved"] for slot in slots)
        usage = reserved / capacity if capacity else 0.0
        yield self._gauge("vllm:kv_cache_usage_perc", "KV promised; 1 is all.", usage)
        yield self._cache_config(capacity)

    def _cache_config(self, num_tokens: int) -> Metric:
        engine = self._config.engine
        shown = {
            **self._labels,
            "block_size": "1",
            "enable_prefix_caching": str(engine.prefix_cache),
            "num_gpu_blocks": str(num_tokens),
        }
        info = GaugeMetricFamily("vllm:cache_config_info", "How the KV cache is set.", labels=list(shown))
        info.add_metric(list(shown.values()), 1)
        return info

    def _token_families(self, workers: Iterable[Mapping[str, Any]]) -> Iterator[Metric]:
        counter = self._counter
        num_queries = sum(seen["prefix_queries"] for seen in workers)
        num_hits = sum(seen["prefix_hits"] for seen in workers)
        yield counter("vllm:prompt_tokens", "Prompt tokens.", self.num_prompt_tokens)
        yield counter("vllm:generation_tokens", "Tokens made.", self.num_completion_tokens)
        num_preemptions = sum(seen["num_preemptions"] for seen in workers)
        yield counter("vllm:num_preemptions", "Times that a running request gave up its KV.", num_preemptions)
        yield counter("vllm:prefix_cache_queries", "Tokens looked up.", num_queries)
        yield counter("vllm:prefix_cache_hits", "Tokens found.", num_hits)
        yield _counters(
            "vllm:request_success",
            "Requests that ran, by how they finished.",
            "finished_reason",
            self.finished_by_reason,
        )

    def _histograms(self) -> Iterator[Metric]:
        named = (
            ("vllm:time_to_first_token_seconds", "From arrival to the first text.", self.ttft),
            ("vllm:inter_token_latency_seconds", "Between two tokens.", self.inter_token),
            ("vllm:e2e_request_latency_seconds", "From arrival to the end.", self.e2e),
            ("vllm:request_queue_time_seconds", "From arrival to the start.", self.queue),
            ("vllm:request_prefill_time_seconds", "From start to first token.", self.prefill),
            ("vllm:request_decode_time_seconds", "From first token to the end.", self.decode),
            ("vllm:request_prompt_tokens", "Tokens of a prompt.", self.prompt_tokens),
            ("vllm:request_generation_tokens", "Tokens of an answer.", self.completion_tokens),
        )
        for name, doc, histogram in named:
            family = HistogramMetricFamily(name, doc, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), histogram.buckets(), histogram.sum)
            yield family
        family = HistogramMetricFamily("lqs_queue_time_seconds", "Wait, by class and lane.", labels=["level", "lane"])
        for level, lanes in zip(self._levels, self.queue_by_class, strict=True):
            for lane, histogram in zip(_LANES, lanes, strict=True):
                family.add_metric([level, lane], histogram.buckets(), histogram.sum)
        yield family

    def _bound_families(
        self, core: Mapping[str, Any], door: Mapping[str, Any], workers: Mapping[str, Mapping[str, Any]]
    ) -> Iterator[Metric]:
        """How near each bound is, and what was counted when one was reached."""
        swap_bytes = self._config.engine.swap_mb * 1_000_000
        bounds = {
            "table": (core["num_live"], core["table_capacity"]),
            "place_waiters": (door["num_guests"], door["num_guests_max"]),
            **{f"ring_{name}": figures for name, figures in core["rings"].items()},
            **{f"swap_{device}": (seen["kept_bytes"], swap_bytes) for device, seen in workers.items()},
            **self._bounds(),
        }
        used = {name: used for name, (used, _) in bounds.items()}
        yield _gauges("lqs_bound_used", "How much of a bound is used.", "bound", used)
        limits = {name: limit for name, (_, limit) in bounds.items()}
        yield _gauges("lqs_bound_limit", "The bound.", "bound", limits)
        yield GaugeMetricFamily("lqs_requests_lost_waiting", "Lost ones that wait to go on.", value=core["num_again"])
        yield GaugeMetricFamily("lqs_requests_held", "Requests whose reader is slow.", value=core["num_held"])
        for name, doc, key in tables.CORE_COUNTERS:
            yield CounterMetricFamily(name, doc, value=core[key])
        yield CounterMetricFamily("lqs_events_lost", "Events lost; expected 0.", value=self.num_events_lost)

    def _limit_families(self) -> Iterator[Metric]:
        figures = self._limits()
        left = {name: seen.remaining for name, seen in figures.items() if seen.remaining is not None}
        yield _gauges(*_LIMIT_REMAINING, "limit", left)
        refused = {name: seen.num_refused for name, seen in figures.items()}
        yield _counters(*_LIMIT_REFUSALS, "limit", refused)

    def _gauge(self, name: str, doc: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, doc, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, doc: str, value: float) -> Metric:
        family = CounterMetricFamily(name, doc, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family
