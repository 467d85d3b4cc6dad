"""The page behind `/metrics`, made when it is asked for.

Names are vLLM's where vLLM has the thing, so that dashboards work unchanged, else `lqs_`. Labels
come from the config alone: a client can never make a new series. Nothing here waits for the
engine: the core and the workers publish counters, and rendering reads them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from lqs.config import Config
from lqs.observe.counts import Counts
from lqs.request import NS_PER_S, Lane

_LANES = tuple(lane.name.lower() for lane in Lane)
_DEVICE_STATES = ("new", "ready", "stopped", "dead", "parked")

# (name, doc, the core's name) of what it shows by class.
_LEVEL_GAUGES = (
    ("lqs_queue_depth", "Waiting, by class.", "num_waiting"),
    ("lqs_queue_places_taken", "Places taken, by class.", "num_entered"),
    ("lqs_queue_drain_rate", "Starts per second while it had a queue.", "drain_rate"),
)
_LEVEL_COUNTERS = (
    ("lqs_queue_entered", "Requests that came to wait.", "num_enqueued"),
    ("lqs_queue_started", "Requests that left for a device slot.", "num_started"),
    ("lqs_queue_expired", "Requests that waited too long.", "num_expired"),
    ("lqs_queue_cancelled", "Requests cancelled while they waited.", "num_cancelled"),
    ("lqs_queue_no_device", "Requests that no device slot was left for.", "num_no_device"),
    ("lqs_queue_promotions", "Classes gained by waiting.", "num_promoted"),
    ("lqs_queue_aged_starts", "Starts owed to waiting.", "num_aged_starts"),
)
# (name, doc, the core's name) of what it shows by lane.
_LANE_GAUGES = (
    ("lqs_lane_depth", "Waiting, by lane.", "num_waiting"),
    ("lqs_lane_running", "Running, by lane.", "num_running"),
)
# (name, doc, the core's name) of what the ledger promises by device slot.
_LEDGER_GAUGES = (
    ("lqs_device_kv_tokens", "KV tokens that may be promised.", "capacity"),
    ("lqs_device_kv_reserved", "KV tokens promised to those that run.", "reserved"),
    ("lqs_device_sequences", "Sequences that may run.", "num_sequences"),
    ("lqs_device_sequences_running", "Sequences that run.", "num_running"),
    ("lqs_kv_paused", "Running requests that wait for more KV with what they hold.", "num_short"),
    ("lqs_kv_out", "Running requests that gave up their KV for better ones.", "num_out"),
)
_LEDGER_COUNTERS = (
    ("lqs_kv_promises", "Promises of KV that were made: starts and growths.", "num_promises"),
    ("lqs_kv_growths", "Promises made to running requests.", "num_growths"),
    ("lqs_kv_growths_refused", "Growths that found no room at once: the request paused.", "num_growths_refused"),
    ("lqs_kv_put_out", "Running requests told to give up their KV.", "num_put_out"),
    ("lqs_kv_resumed", "Those of them that were promised KV again.", "num_resumed"),
)
# (name, doc, the worker's name) of what it shows, and of what it counts.
_DEVICE_GAUGES = (
    ("lqs_device_healthy", "1 if it works.", "is_healthy"),
    ("lqs_device_threads", "Threads that compute just now.", "threads"),
    ("lqs_device_kv_cells", "KV cells that hold a token.", "cells_used"),
    ("lqs_device_cached_sequences", "Finished sequences kept as prefix cache.", "num_cached_sequences"),
    ("lqs_swap_bytes", "Host memory that holds KV of running requests.", "kept_bytes"),
)
_DEVICE_COUNTERS = (
    ("lqs_device_steps", "Steps made.", "num_steps"),
    ("lqs_step_tokens", "Tokens made by steps.", "generated_tokens"),
    ("lqs_device_decodes", "Calls of llama_decode.", "num_decodes"),
    ("lqs_device_prefill_tokens", "Prompt tokens computed.", "prefill_tokens"),
    ("lqs_device_failed_decodes", "Decodes that failed.", "num_failed_decodes"),
    ("lqs_device_kv_failures", "Decodes without room in the KV cache; expected 0.", "num_kv_failures"),
    ("lqs_device_cache_evictions", "Finished sequences that gave up their cells.", "num_cache_evictions"),
    ("lqs_device_compactions", "Times that the cells were put in order.", "num_compactions"),
    ("lqs_swaps_out", "Requests whose KV was copied to host memory.", "num_swaps_out"),
    ("lqs_swaps_in", "Requests whose KV was copied back.", "num_swaps_in"),
    ("lqs_swapped_bytes", "KV copied to host memory and back.", "swapped_bytes"),
    ("lqs_recomputed_tokens", "Tokens computed again because their KV was given up.", "recomputed_tokens"),
)
_DEVICE_CLOCKS = (
    ("lqs_step_seconds", "Time in steps.", "step_ns"),
    ("lqs_decode_seconds", "Time in llama_decode, part of the time in steps.", "decode_ns"),
    ("lqs_swap_seconds", "Time copying KV, part of the time in steps.", "swap_ns"),
)
# (name, doc, the core's name) of what it counts once.
_CORE_COUNTERS = (
    ("lqs_decisions", "Starts chosen, those among them that then found no room.", "num_decisions"),
    ("lqs_rounds", "Rounds of the scheduler.", "num_rounds"),
    ("lqs_out_buffers_full", "Times a worker found no room for text, because its reader is slow.", "num_starved"),
    ("lqs_core_broken", "Broken rules of the core; expected 0.", "num_broken"),
)

Snapshot = Callable[[], Mapping[str, Any]]


class Metrics(Counts):
    """Shows what the loop has counted, and what core and workers publish.

    `core` reads the scheduler's snapshot, `workers` those of the device slots by name, `bounds`
    by name how much of each further bound is used and what it is.

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
        bounds: Callable[[], Mapping[str, tuple[int, int]]] = dict,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        super().__init__(len(config.queue.levels), len(_LANES), now_ns)
        self._levels = config.queue.levels
        self._config = config
        self._labels = {"model_name": model_name}
        self._core = core
        self._workers = workers
        self._closed_reason = closed_reason
        self._bounds = bounds
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
        yield from self._device_families(core["slots"], workers)
        yield from self._token_families(workers.values())
        yield from self._histograms()
        yield from self._bound_families(core, workers)

    def _queue_families(self, core: Mapping[str, Any]) -> Iterator[Metric]:
        levels, lanes = core["levels"], core["lanes"]
        num_waiting = sum(level["num_waiting"] for level in levels)
        yield self._gauge("vllm:num_requests_running", "Requests that run.", core["num_running"])
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait.", num_waiting)
        for name, doc, key in _LEVEL_GAUGES:
            yield _gauges(name, doc, "level", self._by_level(levels, key))
        for name, doc, key in _LEVEL_COUNTERS:
            yield _counters(name, doc, "level", self._by_level(levels, key))
        for name, doc, key in _LANE_GAUGES:
            yield _gauges(name, doc, "lane", {lane: seen[key] for lane, seen in zip(_LANES, lanes, strict=True)})
        caps = dict(zip(self._levels, self._config.level_caps, strict=True))
        yield _gauges("lqs_queue_places", "Places, by class.", "level", caps)
        yield GaugeMetricFamily("lqs_queue_total_places", "Places, all classes.", value=self._config.queue.total)
        yield GaugeMetricFamily("lqs_queue_total_places_taken", "Places taken.", value=core["num_entered"])
        yield _gauges(
            "lqs_queue_oldest_wait_seconds", "Longest wait of those waiting.", "level", self._oldest_waits_s(levels)
        )
        yield GaugeMetricFamily("lqs_ready", "1 while requests are let in.", value=self._closed_reason() is None)
        yield _counters("lqs_refusals", "Requests refused.", "reason", self.refused_by_reason)

    def _by_level(self, levels: Iterable[Mapping[str, Any]], key: str) -> dict[str, float]:
        return {level: seen[key] for level, seen in zip(self._levels, levels, strict=True)}

    def _oldest_waits_s(self, levels: Iterable[Mapping[str, Any]]) -> dict[str, float]:
        now_ns = self._now_ns()
        waits_ns = [now_ns - level["oldest_arrival_ns"] if level["num_waiting"] else 0 for level in levels]
        return {level: max(wait_ns, 0) / NS_PER_S for level, wait_ns in zip(self._levels, waits_ns, strict=True)}

    def _device_families(
        self, slots: list[Mapping[str, Any]], workers: Mapping[str, Mapping[str, Any]]
    ) -> Iterator[Metric]:
        for name, doc, key in _DEVICE_GAUGES:
            yield _gauges(name, doc, "device", {device: seen[key] for device, seen in workers.items()})
        for name, doc, key in _DEVICE_COUNTERS:
            yield _counters(name, doc, "device", {device: seen[key] for device, seen in workers.items()})
        for name, doc, key in _DEVICE_CLOCKS:
            yield _counters(name, doc, "device", {device: seen[key] / NS_PER_S for device, seen in workers.items()})
        for name, doc, key in _LEDGER_GAUGES:
            yield _gauges(name, doc, "device", {device: slots[seen["slot"]][key] for device, seen in workers.items()})
        for name, doc, key in _LEDGER_COUNTERS:
            yield _counters(name, doc, "device", {device: slots[seen["slot"]][key] for device, seen in workers.items()})
        states = GaugeMetricFamily("lqs_device_state", "1 for the state that it is in.", labels=["device", "state"])
        for device, seen in workers.items():
            for state in _DEVICE_STATES:
                states.add_metric([device, state], state == seen["state"])
        yield states
        capacity = sum(slot["capacity"] for slot in slots)
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

    def _bound_families(self, core: Mapping[str, Any], workers: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
        """How near each bound is, and what was counted when one was reached."""
        swap_bytes = self._config.engine.swap_mb * 1_000_000
        bounds = {
            "table": (core["num_live"], core["table_capacity"]),
            **{f"ring_{name}": figures for name, figures in core["rings"].items()},
            **{f"swap_{device}": (seen["kept_bytes"], swap_bytes) for device, seen in workers.items()},
            **self._bounds(),
        }
        used = {name: used for name, (used, _) in bounds.items()}
        yield _gauges("lqs_bound_used", "How much of a bound is used.", "bound", used)
        limits = {name: limit for name, (_, limit) in bounds.items()}
        yield _gauges("lqs_bound_limit", "The bound.", "bound", limits)
        yield GaugeMetricFamily("lqs_requests_held", "Requests whose reader is slow.", value=core["num_held"])
        for name, doc, key in _CORE_COUNTERS:
            yield CounterMetricFamily(name, doc, value=core[key])
        yield CounterMetricFamily("lqs_events_lost", "Events lost; expected 0.", value=self.num_events_lost)

    def _gauge(self, name: str, doc: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, doc, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, doc: str, value: float) -> Metric:
        family = CounterMetricFamily(name, doc, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family


def _gauges(name: str, doc: str, label: str, values: Mapping[str, float]) -> Metric:
    return _filled(GaugeMetricFamily(name, doc, labels=[label]), values)


def _counters(name: str, doc: str, label: str, values: Mapping[str, float]) -> Metric:
    return _filled(CounterMetricFamily(name, doc, labels=[label]), values)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, float]) -> Metric:
    for value, count in values.items():
        family.add_metric([value], count)
    return family
