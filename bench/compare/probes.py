"""G13: how soon health checks and metrics answer while the queue is full and a prefill runs."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math
import time

from bench.compare.metrics import Metrics
from bench.compare.report import Row
from bench.compare.rounds import Bench, Values, compare
from bench.compare.scale import Scale
from bench.compare.server import Live
from bench.compare.workload import LONG_PRIORITY, completions
from bench.load.drive import cancel_all
from bench.load.stats import percentile

PATHS = ("/health", "/livez", "/metrics")
NUM_WAITING, NUM_WAITING_PEER = 4000, 500
PARALLEL, CTX = 1, 4096
PROMPT_WORDS = 2000
LIMIT_MS = 50.0
TIMEOUT_S = 5.0
INTERVAL_S = 0.05
# A server that does not answer is believed after so many tries.
NUM_SILENT_MAX = 3
# How long the queue may take to fill, and when it counts as full.
FILL_S, FILLED = 30.0, 0.98
WAITING_METRICS = ("vllm:num_requests_waiting", "llamacpp:requests_deferred")


async def g13(bench: Bench) -> list[Row]:
    """Compare the latency of probes under a full queue; a peer gets a shorter queue."""
    num_probes = 20 if bench.quick else 100
    subject = dataclasses.replace(bench.subject, num_waiting_max=NUM_WAITING + 100)
    measure = functools.partial(_measure, num_waiting=NUM_WAITING, num_probes=num_probes)
    measure_peer = functools.partial(_measure, num_waiting=NUM_WAITING_PEER, num_probes=5)
    mine, *peers = await bench.alternate(
        "G13",
        bench.setup(PARALLEL, CTX),
        [(subject, measure), *((peer, measure_peer) for peer in bench.peers)],
    )
    scale = Scale.measure()
    rows = []
    for path in PATHS:
        for peer in peers:
            what = f"{path} P99 with {NUM_WAITING} waiting (peer {NUM_WAITING_PEER})"
            limit_ms = scale.here(LIMIT_MS)

            def within(row: Row, limit_ms: float = limit_ms) -> bool:
                return row.value <= limit_ms

            note = f"{TIMEOUT_S * 1e3:.0f} ms stand for no answer" if path == PATHS[0] else ""
            rows.append(compare("G13", what, "ms", path, mine, peer, within, note))
    for peer in peers:
        rows += [
            compare(None, "waiting when probed", "requests", "waiting", mine, peer),
            compare(None, "slowest /metrics while they come in", "ms", "filling", mine, peer),
        ]
    return [*rows, scale.row()]


async def _measure(live: Live, num_waiting: int, num_probes: int) -> Values:
    """Fill the queue with prompts whose prefill lasts, then probe."""
    supply = completions(live.client, PROMPT_WORDS, 4, draw=13, priority=LONG_PRIORITY)
    waiting = []
    for number in range(num_waiting):
        waiting.append(asyncio.create_task(live.client.send(supply())))
        if number % 50 == 49:
            # In portions: a listening socket holds only so many connections that wait for it.
            await asyncio.sleep(0.02)
    filling_ms = await _fill(live, num_waiting)
    values = await _probe(live, num_probes)
    values["filling"] = filling_ms
    values["waiting"] = sum(not task.done() for task in waiting)
    await cancel_all(waiting)
    return values


async def _fill(live: Live, num_waiting: int) -> float:
    """Wait until the server itself counts the waiting; return its slowest answer until then, in ms.

    After FILL_S it is probed as it is: a server may not say how many wait.
    """
    slowest_ms = 0.0
    give_up_s = time.perf_counter() + FILL_S
    while time.perf_counter() < give_up_s:
        reply = await live.client.get("/metrics", TIMEOUT_S)
        slowest_ms = max(slowest_ms, (reply.end_s - reply.start_s) * 1e3)
        metrics = Metrics.parse(reply.text if reply.status == 200 else "")
        if any(metrics.get(name) >= FILLED * num_waiting for name in WAITING_METRICS):
            break
        await asyncio.sleep(INTERVAL_S)
    return slowest_ms


async def _probe(live: Live, num_probes: int) -> Values:
    """Return each path's P99 in ms. No answer counts as the timeout; NaN for an unknown path."""
    latencies_ms: dict[str, list[float]] = {path: [] for path in PATHS}
    for _ in range(num_probes):
        for path, values_ms in latencies_ms.items():
            num_silent = sum(value_ms >= TIMEOUT_S * 1e3 for value_ms in values_ms)
            if num_silent < NUM_SILENT_MAX:
                values_ms.append(await _latency_ms(live, path))
        await asyncio.sleep(INTERVAL_S)
    return {path: percentile(values_ms, 0.99) for path, values_ms in latencies_ms.items()}


async def _latency_ms(live: Live, path: str) -> float:
    reply = await live.client.get(path, TIMEOUT_S)
    return math.nan if reply.status == 404 else (reply.end_s - reply.start_s) * 1e3
