"""Classes and a full queue over a real socket, in real time."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.server.client import Call
from tests.server.conftest import Start
from tests.server.process import Server, until

# Three classes, the anonymous key may ask for each; the load moves nobody.
BASE = """
engine.parallel = 1
engine.ctx = 60000
queue.levels = ["vip", "paid", "free"]
queue.high_load_at = 1.0
tiers.normal = { level = 1, best = 0 }
"""
LONG = 50_000
# Long enough that one ends after the other, and to be told apart from the next.
SHORT = 60


@pytest.fixture(scope="module")
def server(share: Start, tiny: Path) -> Server:
    """No class may wait for a place, nor make another leave."""
    return share(tiny, config=BASE + "queue.caps = [20, 20, 3]\nqueue.place_wait_s = [0]\nqueue.evict = [false]")


@pytest.fixture(scope="module")
def small(share: Start, tiny: Path) -> Server:
    """The source's: 30 places for three classes, eviction off; the best class waits up to 5 s for one."""
    return share(tiny, config=BASE + "queue.total = 30\nqueue.evict = [false]")


@contextmanager
def held(server: Server) -> Iterator[Call]:
    """The only sequence is taken."""
    call = server.complete(LONG, priority=0)
    server.wait_running()
    yield call
    call.close()
    server.wait_at_rest()


def served(server: Server, levels: Iterable[int]) -> list[int]:
    """The classes in the order in which they are answered, when these arrive while one runs."""
    order: list[int] = []

    def read(level: int, call: Call) -> None:
        assert call.answer().status == 200
        order.append(level)

    with held(server) as holder, ThreadPoolExecutor(16) as pool:
        calls = []
        for number, level in enumerate(levels, 1):
            calls.append((level, server.complete(SHORT, priority=level)))
            server.wait_waiting(number)
        reading = [pool.submit(read, *call) for call in calls]
        holder.close()
        for each in reading:
            each.result()
    return order


@pytest.mark.parametrize("levels", [[2, 2, 1, 1, 0, 0], [1, 2, 0, 2, 0, 1]])
def test_the_classes_are_served_in_their_order_whatever_that_of_arrival(server: Server, levels: list[int]) -> None:
    """S9: vip, vip, normal, normal, free, free."""
    assert served(server, levels) == [0, 0, 1, 1, 2, 2]


def test_two_vips_run_before_ten_that_came_earlier(server: Server) -> None:
    """S9: 10 of a lower class, then 2 vip."""
    assert served(server, [1] * 10 + [0] * 2) == [0] * 2 + [1] * 10


def test_of_five_for_three_places_of_a_class_two_are_refused(server: Server) -> None:
    """S9: capacity 3 per class."""
    with held(server):
        inside = [server.complete(SHORT, priority=2) for _ in range(3)]
        server.wait_waiting(3)
        for _ in range(2):
            answer = server.complete(SHORT, priority=2).answer()
            assert (answer.status, answer.code) == (429, "queue_full")
            assert int(answer.headers["retry-after"]) >= 1
        for call in inside:
            call.close()


def test_overflow_with_the_figures_of_the_source(small: Server) -> None:
    """S17: capacity 30, 40 arrivals of class i % 3, consumers held: 30 are in; 31, 32, 34, 35, 37 and 38 are
    refused at once; 30, 33, 36 and 39 wait up to 5 s. S18: 24 of 30 warn, 30 of 30 close the lowest class.
    """
    refused, waiting, began_s = {}, {}, {}
    with held(small):
        calls = []
        for number in range(30):
            calls.append(small.complete(1, priority=number % 3))
            small.wait_waiting(number + 1)
            assert small.metrics()['lqs_queue_warning{level="all"}'] == (number >= 23)
        assert small.metrics()['lqs_breaker_state{level="free"}'] == 2
        assert (
            small.log.count("warning queue nearly full level=all")
            == small.log.count("warning breaker open level=free")
            == 1
        )
        for number in range(30, 40):
            began_s[number] = time.monotonic()
            call = small.complete(1, priority=number % 3)
            if number % 3:
                refused[number] = call.answer()
                assert time.monotonic() - began_s[number] < 1
            else:
                waiting[number] = call
                until(lambda: small.metric("lqs_place_waiting") == len(waiting))
        assert sorted(refused) == [31, 32, 34, 35, 37, 38]
        assert {answer.status for answer in refused.values()} == {429}
        # Two of its callers leave; a place is for the one that has waited longest.
        calls[0].close()
        small.wait_waiting(30)
        until(lambda: small.metric("lqs_place_waiting") == 3)
        waiting.pop(39).close()
        until(lambda: small.metric("lqs_place_waiting") == 2)
        calls.append(waiting.pop(30))
        for number, call in waiting.items():
            answer = call.answer()
            waited_s = time.monotonic() - began_s[number]
            assert (answer.status, answer.code) == (429, "queue_full")
            assert 4.9 < waited_s < 7
        assert small.metric("vllm:num_requests_waiting") == 30
        for call in calls:
            call.close()


def test_the_lowest_and_youngest_leaves_for_a_better_one(start: Start, tiny: Path) -> None:
    """S17: lowest class evicted first. And new bounds count from the next arrival on."""
    server = start(tiny, config=BASE + "queue.total = 3")
    with held(server) as holder:
        low = []
        for number in range(3):
            low.append(server.complete(1, priority=1 + number % 2, stream=number == 2))
            server.wait_waiting(number + 1)
        vip = server.complete(1, priority=0)
        evicted = low[1].answer()
        assert (evicted.status, evicted.code, evicted.headers["x-lqs-reason"]) == (429, "evicted", "evicted")
        assert int(evicted.headers["retry-after"]) >= 1
        server.wait_waiting(3)
        assert server.metrics()['lqs_queue_evictions_total{level="free"}'] == 1
        assert server.metrics()['lqs_refusals_total{reason="evicted"}'] == 1
        # The other two are of a better class than this one.
        assert server.complete(1, priority=2).answer().status == 429
        config = server.log_path.parent / "lqs.toml"
        config.write_text(
            BASE + 'queue.total = 4\nqueue.on_full = ["refuse", "demote"]\nqueue.caps = [2]\nqueue.break_at = 0'
        )
        server.signal(signal.SIGHUP)
        until(lambda: "reloaded" in server.log)
        demoted = server.complete(1, priority=1)
        server.wait_waiting(4)
        holder.close()
        assert demoted.answer().headers["x-lqs-priority"] == "2"
        for call in (vip, low[0], low[2]):
            assert call.answer().status == 200
