"""Who was sent away and comes when it was told to gets in; who does not come keeps no place empty."""

from __future__ import annotations

import random
from typing import Any

import pytest

from lqs.errors import RETRY_AFTER_S_MAX
from lqs.request import NS_PER_S, Request, Tenant
from lqs.scheduling.promises import HELD_AFTER_NS, PROMISES_MAX, Promises
from lqs.settings import load
from tests.scheduling.rush import Rush, at_once

S = NS_PER_S


def a_request(key: int = 1, *, retry_count: int | None = 0, level: int = 2) -> Request:
    tenant = Tenant(f"t{key}", "normal", key, 2, 2)
    return Request(id="r", tenant=tenant, model="m", arrival_ns=0, level=level, retry_count=retry_count)


class Ledger:
    """Promises at a time of the test's choice; a place comes free each second."""

    def __init__(self, **given: Any) -> None:
        self.ratios: list[float] = []
        self.promises = Promises(5, rng=random.Random(1), observe=self.ratios.append, **given)

    def refuse(self, now_ns: int, request: Request | None = None, num_free: int = 0) -> int:
        return self.promises.refused(request or a_request(), num_free=num_free, service_ns=S, now_ns=now_ns)


def test_each_refusal_moves_the_promised_time_on() -> None:
    """B40: a time of at least a second, from the rate at which places come free; no two the same."""
    ledger = Ledger()
    waits = [ledger.refuse(0) for _ in range(50)]
    assert waits[0] >= S
    assert len(set(waits)) == 50
    for early, late in ((0, 10), (10, 30), (30, 49)):
        assert 1.0 <= (waits[late] - waits[early]) / (late - early) / S <= 1.4


def test_places_that_are_free_already_come_first() -> None:
    ledger = Ledger()
    for _ in range(10):
        ledger.refuse(0)
    assert ledger.refuse(0, num_free=8) < ledger.refuse(0)


def test_around_its_time_a_place_is_held_against_newcomers_only() -> None:
    ledger = Ledger()
    wait_ns = ledger.refuse(0)
    back = a_request(retry_count=1)
    assert (ledger.promises.num_held(2, 0, 100), ledger.promises.num_held(2, wait_ns - S, 100)) == (0, 1)
    assert ledger.promises.level_due(back, wait_ns - S) is None
    assert ledger.promises.level_due(back, wait_ns) is not None
    assert ledger.promises.level_due(a_request(), wait_ns) is None
    ledger.promises.entered(a_request(), wait_ns)
    assert ledger.promises.num_promised(2, wait_ns) == 1
    ledger.promises.entered(back, wait_ns)
    assert (ledger.promises.num_promised(2, wait_ns), ledger.promises.num_kept) == (0, 1)
    assert ledger.promises.level_due(back, wait_ns) is None


@pytest.mark.parametrize(
    ("promised", "comes", "has"),
    [
        ({}, {"retry_count": 1}, True),
        ({}, {"retry_count": 1, "key": 2}, False),
        ({}, {"retry_count": 1, "level": 3}, False),
        ({}, {"retry_count": None}, False),
        ({"retry_count": None}, {"retry_count": None}, True),
        ({"retry_count": None}, {"retry_count": 1}, False),
    ],
)
def test_a_promise_is_kept_to_its_key_and_kind_of_client(
    promised: dict[str, Any], comes: dict[str, Any], has: bool
) -> None:
    ledger = Ledger()
    wait_ns = ledger.refuse(0, a_request(**promised))
    assert (ledger.promises.level_due(a_request(**comes), wait_ns) is not None) is has


def test_who_does_not_come_loses_the_place_and_is_reckoned_with() -> None:
    ledger = Ledger()
    before = [ledger.refuse(0) for _ in range(100)]
    late_ns = max(before) + HELD_AFTER_NS
    # Whoever asks first finds them void.
    assert ledger.promises.num_promised(2, late_ns) == 0
    assert ledger.promises.num_held(2, late_ns, 1000) == 0
    assert ledger.promises.return_share(2) < 0.25
    # Few of the next are expected, so their times are closer together.
    after = [ledger.refuse(late_ns) for _ in range(100)]
    assert max(after) < max(before) / 2


def test_a_promise_holds_though_the_load_has_moved_the_class_meanwhile() -> None:
    """Refused in a lower class while the load was high; it comes back when it is not."""
    ledger = Ledger()
    moved = a_request(level=3)
    moved.asked_level = 2
    wait_ns = ledger.refuse(0, moved)
    assert ledger.promises.level_due(a_request(retry_count=1), wait_ns) == 3
    assert (ledger.promises.num_held(2, wait_ns, 100), ledger.promises.num_held(3, wait_ns, 100)) == (1, 0)


def test_nothing_below_the_least_wait_could_have_been_told() -> None:
    ledger = Ledger()
    wait_ns = ledger.promises.refused(a_request(), num_free=0, service_ns=S / 10, now_ns=0)
    ledger.promises.freed(a_request(), S // 10)
    assert ledger.ratios == [wait_ns / S]


def test_at_most_half_of_the_places_are_held() -> None:
    ledger = Ledger()
    for _ in range(40):
        ledger.promises.refused(a_request(), num_free=0, service_ns=S / 100, now_ns=0)
    assert ledger.promises.num_held(2, S, 20) == 10
    assert ledger.promises.num_held(2, S, 1) == 0


def test_promises_are_bounded_and_so_is_what_is_told() -> None:
    ledger = Ledger()
    waits = [ledger.promises.refused(a_request(), num_free=0, service_ns=1000, now_ns=0) for _ in range(5000)]
    assert ledger.promises.num_promised(2, 0) == PROMISES_MAX
    assert max(waits) <= RETRY_AFTER_S_MAX * S
    slow = [ledger.promises.refused(a_request(level=3), num_free=0, service_ns=30 * S, now_ns=0) for _ in range(50)]
    assert ledger.promises.num_promised(3, 0) < 10
    # Beyond the longest time nobody is promised anything; they are spread over its last part.
    assert all(0.75 * RETRY_AFTER_S_MAX * S <= wait <= RETRY_AFTER_S_MAX * S for wait in slow[10:])
    assert max(slow[10:]) - min(slow[10:]) > 10 * S


def test_what_was_promised_is_held_against_when_the_place_came_free() -> None:
    ledger = Ledger()
    waits = [ledger.refuse(0) for _ in range(3)]
    for second in (2, 4, 6, 8):
        ledger.promises.freed(a_request(), second * S)
    assert ledger.ratios == [waits[0] / (2 * S), waits[1] / (4 * S), waits[2] / (6 * S)]


def burst(**given: Any) -> Rush:
    """Five times the capacity for 20 s, after a while at 0.8 of it."""
    rush = Rush(**given)
    capacity = rush.num_sequences / rush.mean_s
    rush.arrive(0.8 * capacity, 0, 30)
    rush.arrive(5 * capacity, 30, 20)
    return rush.run()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_after_a_burst_nine_of_ten_get_in_at_the_first_retry(seed: int) -> None:
    """B40: retrying after the told time succeeds; three tries in all."""
    rush = burst(seed=seed)
    assert len(rush.first_retries) > 200
    assert rush.share_at_first_retry >= 0.9
    assert rush.share_failed <= 0.02


def test_clients_that_do_not_count_their_tries_share_with_newcomers() -> None:
    """Nobody can tell their return from an arrival, so an arrival may take what they were promised."""
    rush = burst(counts_tries=False)
    assert rush.share_at_first_retry >= 0.8
    assert rush.share_failed <= 0.02


def test_a_constant_retry_after_would_fail_most() -> None:
    assert burst(obeys=lambda told_s: 1.0).share_failed > 0.5


def test_a_short_queue_keeps_its_word_too() -> None:
    assert burst(num_places=8).share_at_first_retry >= 0.85


def test_for_those_who_never_come_back_nobody_else_is_kept_out() -> None:
    """At 1.5 of capacity with nobody returning the server stays busy."""
    rush = Rush(obeys=lambda told_s: 1e6)
    rush.arrive(6.0, 0, 300)
    rush.run()
    served = sum(client.is_in for client in rush.clients)
    # Four a second for 300 s.
    assert served >= 0.95 * 1200


def test_times_told_are_near_the_truth() -> None:
    ratios = burst().ratios
    errors = sorted(abs(ratio - 1) for ratio in ratios)
    assert len(errors) > 100
    assert errors[len(errors) // 2] <= 0.25
    assert errors[len(errors) * 9 // 10] <= 0.5


def test_a_burst_on_an_idle_server_is_told_times_of_what_ran_before() -> None:
    """Nobody waits or runs in that moment: all their prompts are still being made."""
    rush = Rush(num_sequences=1, num_places=4, mean_s=0.1)
    rush.arrive(2, 0, 10)
    rush.run()
    requests = [
        Request(
            id=str(n), tenant=Tenant("t", "normal", 1, 2, 2), model="m", arrival_ns=rush.now_ns, retry_count=0, level=2
        )
        for n in range(10)
    ]
    is_in = [at_once(rush.desk.enter(request, rush.now_ns)) is None for request in requests]
    # Four places, and the sequence that is free.
    assert is_in == [True] * 5 + [False] * 5
    told_s = [rush.desk.retry_after_s(request) for request in requests[5:]]
    # A tenth of a second for each; a second is the least that is told.
    assert all(1.0 <= told <= 2.5 for told in told_s)
    for request in requests[:5]:
        rush.desk.leave(request)


def test_new_caps_bound_what_is_held() -> None:
    rush = Rush(num_sequences=1, num_places=4)
    rush.desk.reload(load(None, None, {"queue.caps": [40], "queue.total": 40}))
    for _ in range(30):
        rush.desk.outlook.promises.refused(a_request(), num_free=0, service_ns=S / 100, now_ns=rush.now_ns)
    rush.now_ns += S
    num_held, _ = rush.desk.outlook.claim(a_request())
    assert num_held == 20
