"""2,000 requests cut off at random points: afterwards everything is as at the start, and everybody comes in."""

from __future__ import annotations

import hashlib
import json
import re
import signal
from collections import Counter
from pathlib import Path

from tests.server.conftest import Start
from tests.server.process import Server, until
from tests.server.storm import storm

KEY = "storm-key"
NUM_SEQUENCES, NUM_PLACES = 4, 6
NUM_REQUESTS, NUM_PARTS = 2000, 8
GROWTH_MAX = 0.02
CONFIG = f"""
engine.parallel = {NUM_SEQUENCES}
engine.ctx = 90000
engine.prefix_cache = false
queue.caps = [{NUM_PLACES}]
queue.total = {NUM_PLACES}
queue.entry_per_s = 0
queue.break_at = 0
refusals.retry_after_s = 1
keys.file = "{{keys}}"
[limits.at_once]
of = "parallel"
amount = {NUM_REQUESTS}
per = "server"
"""


def alive(server: Server, path: Path) -> dict[str, int]:
    """Tasks of the event loop, and requests of any kind that are not forgotten."""
    path.unlink(missing_ok=True)
    server.signal(signal.SIGUSR2)
    until(path.exists)
    counts: dict[str, int] = json.loads(path.read_text())
    return counts


def outcomes(server: Server) -> float:
    """Requests that came to any end: ran, cancelled, refused, wrong."""
    return server.metric("vllm:request_success_total") + server.metric("lqs_refusals_total")


def test_2000_requests_cut_off_at_random_leave_nothing_behind(start: Start, tiny: Path, tmp_path: Path) -> None:
    """B38: gauges, permits, promises, sequences, cells, files, threads, tasks and memory."""
    keys, counts = tmp_path / "keys", tmp_path / "counts"
    record = {"name": "one", "tier": "normal", "sha256": hashlib.sha256(KEY.encode()).hexdigest()}
    keys.write_text(json.dumps(record) + "\n")
    program = ("-m", "tests.server.counted", str(counts))
    server = start(tiny, config=CONFIG.format(keys=keys), program=program)
    # A connection that has just been answered may still be among the tasks.
    first = min((alive(server, counts) for _ in range(5)), key=lambda seen: seen["tasks"])
    num_threads = server.num_threads

    seen: Counter[int | None] = Counter()
    memory = []
    for seed in range(NUM_PARTS):
        seen.update(storm(server.port, KEY, seed, NUM_REQUESTS // NUM_PARTS))
        server.wait_at_rest()
        left: dict[str, int] = {}
        try:
            until(lambda left=left: left.update(alive(server, counts)) or left == first, 20)
        except AssertionError:
            raise AssertionError(f"still alive: {left}, at the start: {first}") from None
        memory.append(server.memory_bytes)
        assert server.metrics()['lqs_limit_remaining{limit="at_once"}'] == NUM_REQUESTS

    # Every kind of end was there, and nothing else.
    assert set(seen) == {None, 200, 400, 401, 404, 429, 499, 503, 504}, seen
    assert seen.total() == NUM_REQUESTS
    # Each request that the server saw has exactly one outcome.
    num_seen = len(re.findall(r"access method=POST ", server.log))
    num_other = len(re.findall(r"access method=DELETE .*status=404", server.log))
    assert outcomes(server) == num_seen + num_other
    assert num_seen <= NUM_REQUESTS
    assert server.metric("lqs_device_kv_cells") == 0
    # The prompts' pool starts its two threads when they are needed.
    assert server.num_threads <= num_threads + 2
    # It swings by a little; at the end it is where it was in the first thousand.
    assert memory[-1] < max(memory[: NUM_PARTS // 2]) * (1 + GROWTH_MAX), memory

    # Who comes now comes in: one on each sequence, one in each place.
    calls = [server.complete(60 if n else 61, key=KEY) for n in range(NUM_SEQUENCES + NUM_PLACES)]
    answers = [call.answer() for call in calls]
    assert [answer.headers.get("x-lqs-reason") for answer in answers] == [None] * len(calls)
