"""The numbers behind `/metrics`: counted as plain ints in the event loop, rendered when asked.

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
from lqs.observe.histogram import Histogram
from lqs.request import NS_PER_S, FinishReason, Outcome, Request

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.5, 1, 2.5, 5)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
# In the order of the core's numbers for how a request finished.
_FINISHES = (
    None,
    FinishReason.STOP,
    FinishReason.LENGTH,
    FinishReason.CANCELLED,
    FinishReason.TIMEOUT,
    FinishReason.ERROR,
    FinishReason.DEVICE,
)
# vLLM's words for how a request finished.
_REASON_LABELS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
    FinishReason.TIMEOUT: "timeout",
    FinishReason.ERROR: "error",
    FinishReason.DEVICE: "error",
}

# (name, doc, the core's name) of what it counts by class.
_LEVEL_COUNTERS = (
    ("lqs_queue_entered", "Requests that came to wait.", "num_enqueued"),
    ("lqs_queue_started", "Requests that left for a device slot.", "num_started"),
    ("lqs_queue_expired", "Requests that waited too long.", "num_expired"),
    ("lqs_queue_cancelled", "Requests cancelled while they waited.", "num_cancelled"),
    ("lqs_queue_no_device", "Requests that no device slot was left for.", "num_no_device"),
    ("lqs_queue_promotions", "Classes gained by waiting.", "num_promoted"),
    ("lqs_queue_aged_starts", "Starts owed to waiting.", "num_aged_starts"),
)
# (name, doc, the worker's name) of what it counts.
_DEVICE_COUNTERS = (
    ("lqs_device_steps", "Steps made.", "num_steps"),
    ("lqs_device_prefill_tokens", "Prompt tokens computed.", "prefill_tokens"),
    ("lqs_device_generated_tokens", "Tokens made.", "generated_tokens"),
    ("lqs_device_failed_decodes", "Decodes that failed.", "num_failed_decodes"),
    ("lqs_device_kv_failures", "Decodes without room in the KV cache; expected 0.", "num_kv_failures"),
    ("lqs_device_cache_evictions", "Finished sequences that gave up their cells.", "num_cache_evictions"),
)

Snapshot = Callable[[], Mapping[str, Any]]


class Metrics:
    """Counts what the desk sees and shows what core and workers publish.

    `core` reads the scheduler's snapshot, `workers` those of the device slots by name.

    Owner: the event loop; `render` may run in any thread, its numbers are then at most a moment
    apart from each other.
    """

    def __init__(
        self,
        config: Config,
        *,
        model_name: str,
        core: Snapshot,
        workers: Callable[[], Mapping[str, Mapping[str, Any]]],
        closed_reason: Callable[[], str | None],
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._levels = config.queue.levels
        self._config = config
        self._labels = {"model_name": model_name}
        self._core = core
        self._workers = workers
        self._closed_reason = closed_reason
        self._now_ns = now_ns
        self._last_output_ns: dict[str, int] = {}
        self._num_prompt_tokens = self._num_completion_tokens = 0
        self._num_prefix_queries = self._num_prefix_hits = 0
        self._num_events_lost = 0
        self._finished = dict.fromkeys(_REASON_LABELS.values(), 0)
        self._refused: dict[str, int] = {}
        self._ttft = Histogram(_SECONDS)
        self._inter_token = Histogram(_TOKEN_SECONDS)
        self._e2e = Histogram(_SECONDS)
        self._queue = Histogram(_SECONDS)
        self._prefill = Histogram(_SECONDS)
        self._decode = Histogram(_SECONDS)
        self._prompt_tokens = Histogram(_TOKENS)
        self._completion_tokens = Histogram(_TOKENS)
        self._queue_by_level = [Histogram(_SECONDS) for _ in self._levels]
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def started(self, request: Request, queue_ns: int) -> None:
        """A request got its sequence."""
        self._queue.observe(queue_ns / NS_PER_S)
        self._queue_by_level[request.level].observe(queue_ns / NS_PER_S)

    def output(self, request: Request, num_tokens: int) -> None:
        """Text of a running request arrived in the loop."""
        now_ns = self._now_ns()
        last_ns = self._last_output_ns.get(request.id)
        self._last_output_ns[request.id] = now_ns
        if last_ns is None:
            self._ttft.observe((now_ns - request.arrival_ns) / NS_PER_S)
        elif num_tokens:
            self._inter_token.observe((now_ns - last_ns) / num_tokens / NS_PER_S, num_tokens)

    def finished(self, request: Request, outcome: Outcome) -> None:
        """A request that ran is over."""
        self._last_output_ns.pop(request.id, None)
        finish = _FINISHES[outcome.finish] or FinishReason.ERROR
        self._finished[_REASON_LABELS[finish]] += 1
        self._num_prompt_tokens += request.num_prompt_tokens
        self._num_completion_tokens += outcome.num_completion_tokens
        self._num_prefix_queries += request.num_prompt_tokens
        self._num_prefix_hits += outcome.num_cached_tokens
        self._prompt_tokens.observe(request.num_prompt_tokens)
        self._completion_tokens.observe(outcome.num_completion_tokens)
        self._e2e.observe((self._now_ns() - request.arrival_ns) / NS_PER_S)
        self._phases(outcome)

    def ended(self, request: Request, reason: str) -> None:
        """A request never ran: refused for its `reason`, or cancelled by its client if it has none."""
        self._last_output_ns.pop(request.id, None)
        if request.reason is None:
            self._finished["abort"] += 1
        else:
            self.count_refusal(request.reason)

    def event_lost(self, request: Request, error: Exception) -> None:
        """A receiver failed; expected never."""
        self._num_events_lost += 1

    def count_refusal(self, reason: str) -> None:
        """A request was refused; `reason` is one of the codes that lqs itself gives."""
        self._refused[reason] = self._refused.get(reason, 0) + 1

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
        yield from self._device_families(core, workers)
        yield from self._counters()
        yield from self._histograms()
        yield from self._lost_families(core)

    def _phases(self, outcome: Outcome) -> None:
        """Prefill and decode times, of those that got so far."""
        if outcome.first_token_ns and outcome.assigned_ns:
            self._prefill.observe((outcome.first_token_ns - outcome.assigned_ns) / NS_PER_S)
            self._decode.observe((outcome.finished_ns - outcome.first_token_ns) / NS_PER_S)

    def _queue_families(self, core: Mapping[str, Any]) -> Iterator[Metric]:
        levels = core["levels"]
        num_waiting = sum(level["num_waiting"] for level in levels)
        yield self._gauge("vllm:num_requests_running", "Requests that run.", core["num_running"])
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait.", num_waiting)
        yield self._by_level("lqs_queue_depth", "Waiting, by class.", levels, "num_waiting")
        yield self._by_level("lqs_queue_places_taken", "Places taken, by class.", levels, "num_entered")
        caps = [{"cap": cap} for cap in self._config.level_caps]
        yield self._by_level("lqs_queue_places", "Places, by class.", caps, "cap")
        yield GaugeMetricFamily("lqs_queue_total_places", "Places, all classes.", value=self._config.queue.total)
        yield GaugeMetricFamily("lqs_queue_total_places_taken", "Places taken.", value=core["num_entered"])
        yield self._oldest(levels)
        yield self._by_level("lqs_queue_drain_rate", "Starts per second while it had a queue.", levels, "drain_rate")
        for name, doc, key in _LEVEL_COUNTERS:
            counts = {level: seen[key] for level, seen in zip(self._levels, levels, strict=True)}
            yield _labelled(name, doc, "level", counts)
        yield GaugeMetricFamily("lqs_ready", "1 while requests are let in.", value=self._closed_reason() is None)

    def _by_level(self, name: str, doc: str, levels: Iterable[Mapping[str, Any]], key: str) -> Metric:
        family = GaugeMetricFamily(name, doc, labels=["level"])
        for level, seen in zip(self._levels, levels, strict=True):
            family.add_metric([level], seen[key])
        return family

    def _oldest(self, levels: Iterable[Mapping[str, Any]]) -> Metric:
        now_ns = self._now_ns()
        waits = [now_ns - level["oldest_arrival_ns"] if level["num_waiting"] else 0 for level in levels]
        seen = [{"wait_s": max(wait_ns, 0) / NS_PER_S} for wait_ns in waits]
        return self._by_level("lqs_queue_oldest_wait_seconds", "Longest wait of those waiting.", seen, "wait_s")

    def _device_families(self, core: Mapping[str, Any], workers: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
        healthy = GaugeMetricFamily("lqs_device_healthy", "1 if it works.", labels=["device"])
        used = GaugeMetricFamily("lqs_device_kv_cells", "KV cells that hold a token.", labels=["device"])
        counters = [(CounterMetricFamily(name, doc, labels=["device"]), key) for name, doc, key in _DEVICE_COUNTERS]
        for device, seen in workers.items():
            healthy.add_metric([device], seen["is_healthy"])
            used.add_metric([device], seen["cells_used"])
            for family, key in counters:
                family.add_metric([device], seen[key])
        yield healthy
        yield used
        yield from (family for family, _ in counters)
        slots = core["slots"]
        capacity = sum(slot["capacity"] for slot in slots)
        reserved = sum(slot["reserved"] for slot in slots)
        yield self._gauge(
            "vllm:kv_cache_usage_perc", "KV promised; 1 is all.", reserved / capacity if capacity else 0.0
        )
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

    def _counters(self) -> Iterator[Metric]:
        counter = self._counter
        yield counter("vllm:prompt_tokens", "Prompt tokens.", self._num_prompt_tokens)
        yield counter("vllm:generation_tokens", "Tokens made.", self._num_completion_tokens)
        yield counter("vllm:num_preemptions", "Requests set aside while they ran.", 0)
        yield counter("vllm:prefix_cache_queries", "Tokens looked up.", self._num_prefix_queries)
        yield counter("vllm:prefix_cache_hits", "Tokens found.", self._num_prefix_hits)
        yield _labelled(
            "vllm:request_success",
            "Requests that ran, by how they finished.",
            "finished_reason",
            self._finished,
        )
        yield _labelled("lqs_refusals", "Requests refused.", "reason", self._refused)

    def _histograms(self) -> Iterator[Metric]:
        named = (
            ("vllm:time_to_first_token_seconds", "From arrival to the first text.", self._ttft),
            ("vllm:inter_token_latency_seconds", "Between two tokens.", self._inter_token),
            ("vllm:e2e_request_latency_seconds", "From arrival to the end.", self._e2e),
            ("vllm:request_queue_time_seconds", "From arrival to the start.", self._queue),
            ("vllm:request_prefill_time_seconds", "From start to first token.", self._prefill),
            ("vllm:request_decode_time_seconds", "From first token to the end.", self._decode),
            ("vllm:request_prompt_tokens", "Tokens of a prompt.", self._prompt_tokens),
            ("vllm:request_generation_tokens", "Tokens of an answer.", self._completion_tokens),
        )
        for name, doc, histogram in named:
            family = HistogramMetricFamily(name, doc, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), histogram.buckets(), histogram.sum)
            yield family
        family = HistogramMetricFamily("lqs_queue_time_seconds", "Wait, by class.", labels=["level"])
        for level, histogram in zip(self._levels, self._queue_by_level, strict=True):
            family.add_metric([level], histogram.buckets(), histogram.sum)
        yield family

    def _gauge(self, name: str, doc: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, doc, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, doc: str, value: float) -> Metric:
        family = CounterMetricFamily(name, doc, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _lost_families(self, core: Mapping[str, Any]) -> Iterator[Metric]:
        yield CounterMetricFamily("lqs_events_lost", "Events lost; expected 0.", value=self._num_events_lost)
        yield CounterMetricFamily("lqs_core_broken", "Broken rules of the core; expected 0.", value=core["num_broken"])


def _labelled(name: str, doc: str, label: str, counts: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, doc, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family
