"""How long a request may wait and run, and what its client hears meanwhile."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.client import collect
from tests.server.conftest import Start
from tests.server.process import Server

CONFIG = """
engine.parallel = 1
engine.ctx = 100000
engine.prefix_cache = false
queue.hold_s = 0.3
"""
LONG = 90_000
COMMENT = re.compile(r": queue( position=\d+)?( eta_s=\d+\.\d)?")


@pytest.fixture(scope="module")
def server(share: Start, tiny: Path) -> Server:
    return share(tiny, config=CONFIG)


@pytest.fixture
def busy(server: Server) -> Iterator[Server]:
    """The only sequence is taken."""
    call = server.complete(LONG)
    server.wait_running()
    yield server
    call.close()
    server.wait_at_rest()


@pytest.mark.parametrize("stream", [False, True])
def test_who_waits_too_long_is_told_503_and_nothing_was_computed(busy: Server, stream: bool) -> None:
    """The status of a stream is held back until then, so that it still can be a 503."""
    started, expired = busy.metric("lqs_queue_started_total"), busy.metric("lqs_queue_expired_total")
    answer = busy.complete(5, queue_timeout=0.2, stream=stream).answer()
    assert (answer.status, answer.code, answer.headers["x-lqs-reason"]) == (503, "queue_timeout", "queue_timeout")
    assert int(answer.headers["retry-after"]) >= 1
    assert float(answer.headers["x-lqs-queue-ms"]) >= 200
    assert busy.metric("lqs_queue_started_total") == started
    assert busy.metric("lqs_queue_expired_total") == expired + 1


def test_a_waiting_stream_opens_after_its_hold_and_says_how_far_it_is(busy: Server) -> None:
    """And what would have been a status is then its last event."""
    began_s = time.monotonic()
    call = busy.complete(5, queue_timeout=2.5, stream=True)
    lines = call.lines()
    first = next(lines)
    assert 0.25 < time.monotonic() - began_s < 2
    rest = list(lines)
    comments = [first, *rest[:-1]]
    assert all(COMMENT.fullmatch(line) for line in comments)
    assert "position=1" in first
    # At most one a second.
    assert 2 <= len(comments) <= 4
    assert '"queue_timeout"' in rest[-1]


def test_a_waiting_stream_that_gets_its_turn_goes_on_as_any_other(server: Server) -> None:
    first = server.complete(LONG)
    server.wait_running()
    call = server.complete(5, stream=True)
    lines = call.lines()
    assert next(lines).startswith(": queue")
    first.close()
    events = [line for line in lines if not line.startswith(":")]
    assert events[-1] == "data: [DONE]"
    assert len(events) >= 3


def test_who_waits_is_shown_its_place(busy: Server) -> None:
    calls = [
        busy.call("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1}, headers={"x-request-id": f"w-{number}"})
        for number in range(2)
        if not busy.wait_waiting(number)
    ]
    busy.wait_waiting(2)
    shown = [busy.ask("GET", f"/v1/requests/w-{number}").json for number in range(2)]
    assert [(each["state"], each["position"]) for each in shown] == [("waiting", 1), ("waiting", 2)]
    assert busy.ask("DELETE", "/v1/requests/w-0").json["state"] == "cancelled"
    assert calls[0].answer().code == "cancelled"
    busy.wait_waiting(1)
    assert busy.ask("GET", "/v1/requests/w-1").json["position"] == 1
    calls[1].close()


def test_a_better_class_is_served_first(server: Server) -> None:
    """B33: L runs, others of low class wait; who comes later and better is next."""
    running = server.complete(LONG)
    server.wait_running()
    low = [server.complete(3000, priority=4) for _ in range(3)]
    server.wait_waiting(3)
    high = server.complete(5, priority=2)
    server.wait_waiting(4)
    running.close()
    assert high.answer().status == 200
    assert server.metric("vllm:num_requests_waiting") >= 2
    for call in low:
        call.close()
    server.wait_at_rest()


def test_who_runs_too_long_is_told_504(server: Server) -> None:
    answer = server.complete(LONG, timeout=0.3).answer()
    assert (answer.status, answer.code) == (504, "timeout")
    assert server.metrics()['vllm:request_success_total{finished_reason="timeout"}'] == 1
    server.wait_at_rest()


def test_a_stream_that_runs_too_long_ends_with_an_error(server: Server) -> None:
    told = collect(server.complete(LONG, timeout=0.3, stream=True))
    assert told.text
    assert told.error is not None
    assert (told.error["code"], told.finish, told.is_done) == ("timeout", None, False)


def test_time_in_the_queue_counts_for_the_whole(busy: Server) -> None:
    answer = busy.complete(5, timeout=0.2).answer()
    assert (answer.status, answer.code) == (503, "queue_timeout")
