"""Clients that leave, over real sockets: whatever phase their request is in, it ends, and what it held is free."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.server.client import collect
from tests.server.conftest import Start
from tests.server.process import Server, until

KEY = "lqs-test-key"
LONG = 60_000
WITHIN_S = 1.0
# Every middleware is on: auth, metrics, CORS, access log.
CONFIG = """
server.cors_origins = ["*"]
keys.file = "{keys}"
engine.parallel = 1
engine.ctx = 100000
engine.prefix_cache = false
"""


@pytest.fixture(scope="module")
def server(share: Start, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Server:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    record = {"name": "one", "tier": "normal", "sha256": hashlib.sha256(KEY.encode()).hexdigest()}
    keys.write_text(json.dumps(record) + "\n")
    return share(tiny, config=CONFIG.format(keys=keys))


def aborted(server: Server) -> float:
    return server.metrics()['vllm:request_success_total{finished_reason="abort"}']


def ended_soon(server: Server, leave: Callable[[], None]) -> None:
    """Leave, and see that the running one ends within a second and is counted once, with its tokens."""
    before, made = aborted(server), server.metric("lqs_step_tokens_total")
    billed = server.metric("vllm:generation_tokens_total")
    leave()
    began_s = time.monotonic()
    server.wait_at_rest()
    assert time.monotonic() - began_s < WITHIN_S
    assert aborted(server) == before + 1
    assert server.metric("lqs_device_kv_cells") == 0
    # What was made before it left belongs to it too, and nothing is made after it.
    total = server.metric("lqs_step_tokens_total")
    assert total >= made
    assert server.metric("vllm:generation_tokens_total") - billed >= total - made
    assert server.metric("lqs_step_tokens_total") == total


@pytest.mark.timing
@pytest.mark.parametrize("way", ["close", "reset"])
def test_who_leaves_in_a_stream_frees_everything_within_a_second(server: Server, way: str) -> None:
    """B03: read one chunk of a long stream, close the socket."""
    call = server.complete(LONG, key=KEY, stream=True)
    next(call.events())
    ended_soon(server, getattr(call, way))


@pytest.mark.timing
@pytest.mark.parametrize("way", ["close", "reset"])
def test_who_leaves_without_a_stream_frees_everything_within_a_second(server: Server, way: str) -> None:
    """B03: the same without a stream, closed while it runs."""
    call = server.complete(LONG, key=KEY)
    server.wait_running()
    ended_soon(server, getattr(call, way))


@pytest.mark.timing
@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_during_the_prompt_frees_everything_within_a_second(server: Server, stream: bool) -> None:
    """B03: close before the first token."""
    steps = server.metric("lqs_device_prefill_tokens_total")
    call = server.complete(10, key=KEY, prompt=[65] * 90_000, stream=stream)
    until(lambda: server.metric("lqs_device_prefill_tokens_total") > steps)
    made = server.metric("vllm:generation_tokens_total")
    ended_soon(server, call.reset)
    assert server.metric("vllm:generation_tokens_total") == made
    assert server.metric("lqs_device_prefill_tokens_total") < steps + 90_000


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_the_queue_is_never_computed_and_the_next_one_is_next(server: Server, stream: bool) -> None:
    """B04: A runs; B, C and D wait and close; E is next. The depth falls when they leave."""
    a = server.complete(LONG, key=KEY, stream=True)
    next(a.events())
    leavers = []
    for number in range(3):
        leavers.append(server.complete(10, key=KEY, stream=stream))
        server.wait_waiting(number + 1)
    e = server.complete(10, key=KEY)
    server.wait_waiting(4)
    started, cancelled = server.metric("lqs_queue_started_total"), server.metric("lqs_queue_cancelled_total")
    for call in leavers:
        call.close()
    # A still runs, and E is alone in the queue.
    server.wait_waiting(1)
    assert server.metric("vllm:num_requests_running") == 1
    assert server.metric("lqs_queue_places_taken") == 1
    assert server.metric("lqs_queue_cancelled_total") == cancelled + 3
    a.close()
    assert e.answer().usage[1] == 10
    # E alone was started since.
    assert server.metric("lqs_queue_started_total") == started + 1


def test_who_waits_starts_at_once_when_the_one_before_leaves(server: Server) -> None:
    """B03: a waiting request starts at once."""
    first = server.complete(LONG, key=KEY, stream=True)
    next(first.events())
    waiting = server.complete(5, key=KEY, stream=True)
    server.wait_waiting(1)
    left_s = time.monotonic()
    first.close()
    assert collect(waiting).is_done
    assert time.monotonic() - left_s < WITHIN_S


def test_a_connection_that_is_used_again_knows_nothing_of_the_request_before(server: Server) -> None:
    """The end of one answer is no leaving, and the next request on the connection is served."""
    call = server.complete(3, key=KEY)
    call.begin().read()
    headers = {"authorization": f"Bearer {KEY}"}
    call.again("POST", "/v1/completions", headers, b'{"prompt":"x","max_tokens":2,"ignore_eos":true}')
    assert call.answer().usage[1] == 2
