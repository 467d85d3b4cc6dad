"""2,000 requests cut off at random points: afterwards everything is as at the start, and everybody comes in."""

from __future__ import annotations

import hashlib
import json
import re
import signal
from pathlib import Path

from tests.server.conftest import Start
from tests.server.process import Server, until
from tests.server.storm import storm

KEY = "storm-key"
NUM_SEQUENCES, NUM_PLACES = 4, 6
NUM_HALF = 1000
GROWTH_MAX = 0.02
CONFIG = f"""
engine.parallel = {NUM_SEQUENCES}
engine.ctx = 90000
engine.prefix_cache = false
queue.caps = [{NUM_PLACES}]
queue.total = {NUM_PLACES}
keys.file = "{{keys}}"
"""


def alive(server: Server, path: Path) -> dict[str, int]:
    """Tasks of the event loop, and requests of any kind that are not forgotten."""
    path.unlink(missing_ok=True)
    server.signal(signal.SIGUSR1)
    until(lambda: server.ask("GET", "/livez").status == 200 and path.exists())
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
    first = alive(server, counts)
    num_threads = server.num_threads

    seen = storm(server.port, KEY, 1, NUM_HALF)
    server.wait_at_rest()
    middle_bytes = server.memory_bytes
    for status, number in storm(server.port, KEY, 2, NUM_HALF).items():
        seen[status] = seen.get(status, 0) + number
    server.wait_at_rest()

    # Every kind of end was there, and nothing else.
    assert set(seen) == {None, 200, 400, 401, 404, 429, 499, 503, 504}, seen
    assert sum(seen.values()) == 2 * NUM_HALF
    # Each request that the server saw has exactly one outcome.
    num_seen = len(re.findall(r"access method=POST ", server.log))
    num_other = len(re.findall(r"access method=DELETE .*status=404", server.log))
    assert outcomes(server) == num_seen + num_other
    assert num_seen <= 2 * NUM_HALF
    assert server.metric("lqs_device_kv_cells") == 0
    until(lambda: alive(server, counts) == first)
    # The prompts' pool starts its two threads when they are needed.
    assert server.num_threads <= num_threads + 2
    assert server.memory_bytes < middle_bytes * (1 + GROWTH_MAX)

    # Who comes now comes in: one on each sequence, one in each place.
    calls = [server.complete(60 if n else 61, key=KEY) for n in range(NUM_SEQUENCES + NUM_PLACES)]
    assert [call.answer().status for call in calls] == [200] * len(calls)
