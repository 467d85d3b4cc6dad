"""What operators see: vLLM's names, labels of the config alone, nothing that a client can add."""

from __future__ import annotations

import io
import time
from array import array
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families

from lqs.observe.alerts import Alerts, Reading
from lqs.observe.families import Life
from lqs.observe.log import Log
from lqs.observe.metrics import Metrics
from lqs.request import NS_PER_S, Request, Tenant
from lqs.scheduling.core import make_door, make_scheduler
from lqs.scheduling.promises import Promises
from lqs.settings import load

S = NS_PER_S
VLLM = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
    "vllm:request_success",
    "vllm:num_preemptions",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
}
WORKER = {
    "is_healthy": True,
    "state": "ready",
    "slot": 0,
    "threads": 2,
    "num_steps": 4,
    "step_ns": 5 * S,
    "num_decodes": 3,
    "decode_ns": 4 * S,
    "cells_used": 8,
    "cells_garbage": 1,
    "num_cached_sequences": 3,
    "prefill_tokens": 5,
    "generated_tokens": 6,
    "prefix_queries": 30,
    "prefix_hits": 20,
    "num_failed_decodes": 0,
    "num_kv_failures": 0,
    "num_cache_evictions": 1,
    "num_compactions": 2,
    "num_preemptions": 4,
    "num_swaps_out": 3,
    "num_swaps_in": 2,
    "swapped_bytes": 500,
    "swap_ns": S,
    "recomputed_tokens": 17,
    "num_taken_over": 3,
    "kept_bytes": 100,
}
PARKED = WORKER | {"is_healthy": False, "state": "parked", "slot": 1, "step_ns": S, "prefix_hits": 1}


class LimitSeen(NamedTuple):
    """How one limit stands."""

    num_refused: int
    remaining: int | None


@dataclass
class Ended:
    """An outcome with times a second apart."""

    finish: int = 1
    error_code: int = 0
    num_cached_tokens: int = 2
    num_completion_tokens: int = 7
    assigned_ns: int = 1 * S
    prefill_done_ns: int = 2 * S
    first_token_ns: int = 3 * S
    finished_ns: int = 5 * S


class Board:
    """Metrics over a real scheduler, at a time of the test's choice."""

    def __init__(self, **flags: Any) -> None:
        config = load(None, None, flags)
        self.core = make_scheduler(config, [1.0])
        self.door = make_door(config)
        self.core.add_device_slot(kv_tokens=100, num_sequences=2)
        self.core.add_device_slot(kv_tokens=50, num_sequences=1, model=1)
        self.now_ns = 0
        self.closed: str | None = None
        self.metrics = Metrics(
            config,
            model_name="m",
            core=self.core.snapshot,
            workers=lambda: {"cpu:0": WORKER, "cpu:1": PARKED},
            closed_reason=lambda: self.closed,
            door=lambda: self.door.figures(self.now_ns),
            bounds=lambda: {"connections": (7, 100)},
            limits=lambda: {"rpm": LimitSeen(3, None), "entry": LimitSeen(0, 100)},
            lives=lambda: [Life("cpu:0", "m", 2, 1), Life("cpu:1@o", "o", 0, 0)],
            now_ns=lambda: self.now_ns,
        )

    def read(self) -> dict[tuple[str, ...], float]:
        text = self.metrics.render().decode()
        return {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


def a_request(name: str = "r") -> Request:
    request = Request(id=name, tenant=Tenant("t", "normal", 0, 2, 2), model="secret", arrival_ns=0, level=1)
    request.prompt = array("i", [1] * 11)
    return request


def test_all_of_vllms_names_are_there_from_the_start() -> None:
    text = Board().metrics.render().decode()
    assert {family.name for family in text_string_to_metric_families(text)} >= VLLM


def test_a_request_is_counted_once_in_everything_that_it_reached() -> None:
    board, request = Board(), a_request()
    board.metrics.started(request, 2 * S)
    board.now_ns = 3 * S
    board.metrics.output(request, 1)
    board.now_ns = 5 * S
    board.metrics.output(request, 4)
    board.metrics.output(request, 0)
    board.metrics.finished(request, Ended())
    seen = board.read()
    assert seen["vllm:prompt_tokens_total", "m"] == 11
    assert seen["vllm:generation_tokens_total", "m"] == 7
    assert seen["vllm:time_to_first_token_seconds_sum", "m"] == 3
    assert seen["vllm:inter_token_latency_seconds_count", "m"] == 4
    assert seen["vllm:inter_token_latency_seconds_sum", "m"] == 2
    assert seen["vllm:request_prefill_time_seconds_sum", "m"] == 2
    assert seen["vllm:request_decode_time_seconds_sum", "m"] == 2
    assert seen["vllm:e2e_request_latency_seconds_sum", "m"] == 5
    assert seen["lqs_queue_time_seconds_sum", "short", "high"] == 2
    assert seen["lqs_queue_time_seconds_sum", "long", "high"] == 0
    assert outcomes(seen) == {"stop": 1}


def outcomes(seen: dict[tuple[str, ...], float]) -> dict[str, float]:
    names = ("vllm:request_success_total", "lqs_refusals_total")
    return {key[1]: value for key, value in seen.items() if key[0] in names and value}


def test_each_way_to_end_has_its_counter() -> None:
    board = Board()
    for finish in (1, 2, 3, 4, 5, 6, 0):
        board.metrics.finished(a_request(), Ended(finish=finish, first_token_ns=0))
    cancelled, expired = a_request(), a_request()
    expired.reason = "queue_timeout"
    board.metrics.ended(cancelled, "cancelled")
    board.metrics.ended(expired, "expired")
    board.metrics.count_refusal("queue_full")
    seen = board.read()
    assert outcomes(seen) == {
        "stop": 1,
        "length": 1,
        "abort": 2,
        "timeout": 1,
        "error": 3,
        "queue_timeout": 1,
        "queue_full": 1,
    }
    # None of them got to a first token.
    assert seen["vllm:request_prefill_time_seconds_count", "m"] == 0


def test_a_cancelled_stream_leaves_nothing_behind() -> None:
    board, request = Board(), a_request()
    board.metrics.output(request, 1)
    board.metrics.ended(request, "cancelled")
    board.now_ns = 9 * S
    board.metrics.output(request, 1)
    assert board.read()["vllm:time_to_first_token_seconds_count", "m"] == 2


def test_the_queue_and_the_device_slots_are_shown_as_the_core_has_them() -> None:
    from lqs._core import Work

    board = Board(**{"queue.caps": [3]})
    for _ in range(3):
        assert board.core.try_enter(2)
        board.core.submit(Work(), object(), level=2, arrival_ns=1 * S, footprint_tokens=50)
    assert board.read()["lqs_queue_places_taken", "normal"] == 3
    board.core.round(2 * S)
    board.now_ns = 5 * S
    seen = board.read()
    assert (seen["vllm:num_requests_running", "m"], seen["vllm:num_requests_waiting", "m"]) == (2, 1)
    assert (seen["lqs_queue_depth", "normal"], seen["lqs_queue_places", "normal"]) == (1, 3)
    assert seen["vllm:kv_cache_usage_perc", "m"] == 100 / 150
    assert (seen["lqs_device_kv_reserved", "cpu:0"], seen["lqs_device_kv_tokens", "cpu:0"]) == (100, 100)
    assert (seen["lqs_device_sequences_running", "cpu:0"], seen["lqs_device_sequences", "cpu:1"]) == (2, 1)
    assert (seen["lqs_lane_depth", "short"], seen["lqs_lane_running", "short"]) == (1, 2)
    assert (seen["lqs_lane_depth", "long"], seen["lqs_lane_running", "long"]) == (0, 0)
    assert seen["lqs_queue_oldest_wait_seconds", "normal"] == 4
    assert seen["lqs_queue_oldest_wait_seconds", "high"] == 0
    assert (seen["lqs_device_healthy", "cpu:0"], seen["lqs_device_kv_cells", "cpu:0"]) == (1, 8)
    # The third was not looked at: no device slot of its model has a sequence.
    assert (seen["lqs_decisions_total",], seen["lqs_queue_started_total", "normal"]) == (2, 2)


def test_what_happens_at_the_door_is_shown_by_class() -> None:
    board = Board(**{"queue.caps": [1, 1, 1, 1, 2], "queue.total": 5, "queue.on_full": ["demote"]})
    # The first has no place left, the second waits for one, the third finds the breaker open.
    for level in (0, 0, 2, 2, 4, 0, 4):
        board.door.enter(level, 0)
    seen = board.read()
    assert (seen["lqs_queue_places", "background"], seen["lqs_queue_total_places",]) == (2, 5)
    assert (seen["lqs_queue_demotions_total", "critical"], seen["lqs_queue_demotions_total", "normal"]) == (1, 1)
    assert (seen["lqs_queue_overflows_total", "critical"], seen["lqs_place_waiting", "critical"]) == (2, 1)
    assert (seen["lqs_breaker_state", "background"], seen["lqs_breaker_state", "low"]) == (2, 0)
    assert (seen["lqs_breaker_openings_total", "background"], seen["lqs_breaker_refusals_total", "background"]) == (
        1,
        1,
    )
    assert (seen["lqs_queue_warning", "all"], seen["lqs_queue_warning", "critical"], seen["lqs_load",]) == (1, 1, 1)
    assert (seen["lqs_bound_used", "place_waiters"], seen["lqs_bound_limit", "place_waiters"]) == (1, 320)
    board.now_ns = 5 * S
    assert board.read()["lqs_breaker_state", "background"] == 1
    board.door.tend(5 * S)
    assert board.read()["lqs_place_waits_lost_total", "critical"] == 1


def test_what_the_workers_counted_is_shown_by_device_slot_in_seconds_and_tokens() -> None:
    seen = Board().read()
    assert (seen["lqs_step_seconds_total", "cpu:0"], seen["lqs_step_seconds_total", "cpu:1"]) == (5, 1)
    assert (seen["lqs_decode_seconds_total", "cpu:0"], seen["lqs_step_tokens_total", "cpu:0"]) == (4, 6)
    assert (seen["lqs_device_threads", "cpu:0"], seen["lqs_device_cached_sequences", "cpu:0"]) == (2, 3)
    # vLLM has one pair for all.
    assert (seen["vllm:prefix_cache_queries_total", "m"], seen["vllm:prefix_cache_hits_total", "m"]) == (60, 21)


def test_what_became_of_a_device_slot_is_counted_by_device_and_model() -> None:
    seen = Board().read()
    assert seen["lqs_device_deaths_total", "cpu:0", "m"] == 2
    assert seen["lqs_device_reopenings_total", "cpu:0", "m"] == 1
    assert seen["lqs_device_deaths_total", "cpu:1@o", "o"] == 0


def test_a_device_slot_is_in_one_state() -> None:
    seen = Board().read()
    states = [key[1:] for key, value in seen.items() if key[0] == "lqs_device_state" and value]
    assert states == [("cpu:0", "ready"), ("cpu:1", "parked")]


def test_how_near_each_bound_is_can_be_read() -> None:
    from lqs._core import Work

    board = Board(**{"queue.table_capacity": 512})
    for _ in range(2):
        assert board.core.try_enter(2)
        handle = board.core.submit(Work(), object(), level=2, footprint_tokens=10)
    seen = board.read()
    for name, used, limit in (
        ("table", 2, 512),
        ("ring_submit", 2, 3 * 512 + 1024),
        ("connections", 7, 100),
        ("swap_cpu:0", 100, 256_000_000),
    ):
        assert (seen["lqs_bound_used", name], seen["lqs_bound_limit", name]) == (used, limit)
    board.core.round(0)
    seen = board.read()
    assert (seen["lqs_bound_used", "ring_submit"], seen["lqs_bound_used", "ring_events"]) == (0, 2)
    board.core.poll()
    board.core.hold(handle)
    while board.core.emit(handle, b"x" * 1000):
        assert board.core.poll() == []
    assert (board.read()["lqs_requests_held",], board.read()["lqs_out_buffers_full_total",]) == (1, 0)
    board.core.resume(handle)
    board.core.poll()
    assert (board.read()["lqs_requests_held",], board.read()["lqs_out_buffers_full_total",]) == (0, 1)


def test_readiness_and_lost_events_are_shown() -> None:
    board = Board()
    assert (board.read()["lqs_ready",], board.read()["lqs_events_lost_total",]) == (1, 0)
    board.closed = "draining"
    board.metrics.event_lost(a_request(), RuntimeError())
    assert (board.read()["lqs_ready",], board.read()["lqs_events_lost_total",]) == (0, 1)


def test_how_true_the_told_times_were_is_shown() -> None:
    board = Board()
    for expected, real in ((9, 10), (15, 10), (30, 10), (1, 0.1)):
        board.metrics.foretold(int(expected * S), int(real * S))
    board.metrics.promised(1.2)
    seen = board.read()
    # The wait of a tenth of a second was none.
    assert seen["lqs_wait_error_ratio_count",] == 3
    assert (seen["lqs_wait_error_ratio_bucket", "0.1"], seen["lqs_wait_error_ratio_bucket", "0.5"]) == (1, 2)
    assert (seen["lqs_wait_error_median",], seen["lqs_retry_error_median",]) == (0.5, pytest.approx(0.2))


def test_lanes_promises_alerts_and_rounds_are_shown() -> None:
    from lqs._core import Work

    config = load(None, None, {})
    alerts = Alerts(config.alerts, Log(config.log, io.StringIO()), {})
    alerts.look(Reading(90, 0.9, 0.0, 0, 0, 0), S)
    promises = Promises(5)
    promises.refused(a_request(), num_free=0, service_ns=S, now_ns=time.monotonic_ns())
    rounds = {"seconds": 2.0, "counts": [(1e-6, 3), (float("inf"), 4)]}
    board = Board()
    board.metrics = Metrics(
        config, model_name="m", core=board.core.snapshot, workers=dict, closed_reason=lambda: None,
        door=lambda: board.door.figures(0),
        alerts=lambda: alerts, promised=promises, rounds=lambda: rounds,
    )  # fmt: skip
    for arrival_s in (1, 2, 3):
        assert board.core.try_enter(2)
        board.core.submit(Work(), object(), level=2, lane=1, arrival_ns=arrival_s * S, footprint_tokens=50)
    board.core.round(4 * S)
    board.metrics.count_refusal("queue_full")
    board.metrics.count_refusal("draining")
    board.metrics.count_refusal("rate_limit_exceeded")
    seen = board.read()
    assert (seen["lqs_lane_queue_depth", "long", "normal"], seen["lqs_lane_queue_depth", "short", "normal"]) == (1, 0)
    assert seen["lqs_lane_queue_wait_seconds_total", "long", "normal"] == 3 + 2
    assert seen["lqs_queue_mean_wait_seconds", "long", "normal"] == 2.5
    assert (seen["lqs_promises_total",], seen["lqs_promises_outstanding", "high"]) == (1, 1)
    assert seen["lqs_promises_return_share", "high"] == 1
    assert (seen["lqs_alert", "tighten", "fill"], seen["lqs_alert", "break", "fill"]) == (1, 0)
    assert seen["lqs_alert_value", "fill"] == 0.9
    assert (seen["lqs_round_time_seconds_count",], seen["lqs_round_time_seconds_sum",]) == (4, 2)
    assert seen["lqs_refusals_too_many_total",] == 1


def test_limits_are_shown_by_name_and_what_is_left_of_those_for_the_whole_server() -> None:
    seen = Board().read()
    limits = {key: value for key, value in seen.items() if key[0].startswith("lqs_limit_")}
    assert limits == {
        ("lqs_limit_remaining", "entry"): 100,
        ("lqs_limit_refusals_total", "rpm"): 3,
        ("lqs_limit_refusals_total", "entry"): 0,
    }


def test_nothing_of_a_client_becomes_a_label() -> None:
    board, request = Board(), a_request("id-of-a-client")
    board.metrics.started(request, 1)
    board.metrics.output(request, 1)
    board.metrics.finished(request, Ended())
    text = board.metrics.render()
    assert b"secret" not in text
    assert b"id-of-a-client" not in text
    assert list(board.metrics.describe()) == []
