"""The door: places first, refusals with a reason and a time, and nothing kept by who is sent away."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from lqs.admission.gate import Gate
from lqs.admission.prompts import Prompts
from lqs.config import Config, PromptsConfig
from lqs.errors import BadRequest, LqsError, NotFound, PromptTooLong, RequestRefused
from lqs.request import NS_PER_S, Lane, PromptSource, Request, RequestState, Segment, Tenant
from lqs.scheduling.core import make_door, make_scheduler
from lqs.scheduling.desk import Desk
from lqs.scheduling.outlook import make_outlook
from lqs.settings import load
from tests.admission.parts import OneModel, a_request, text
from tests.scheduling.parts import Told

S = NS_PER_S


class Door:
    """A gate over the real core, a catalogue of one model and a pool of one thread."""

    def __init__(self, **flags: Any) -> None:
        self.config: Config = load(None, None, {"engine.parallel": 1} | flags)
        self.service_s = 0.0
        self.core = make_scheduler(self.config, [1.0] * 8)
        self.core.add_device_slot(kv_tokens=1000, num_sequences=1)
        self.seen = Told()
        self.desk = Desk(
            self.core, self.seen, door=make_door(self.config), outlook=make_outlook(self.config, self.core)
        )
        self.models = OneModel()
        self.prompts = Prompts(PromptsConfig(threads=1))
        self.gate = Gate(
            self.config,
            desk=self.desk,
            models=self.models,  # type: ignore[arg-type]
            prompts=self.prompts,
            rng=random.Random(1),
            service_s=lambda request: self.service_s,
        )

    def admit(self, request: Request, source: PromptSource | None = None) -> Told:
        sink = Told()
        asyncio.run(self.gate.admit(request, source or text("hello"), sink))
        return sink

    def fill(self) -> None:
        """Let one run on the only sequence."""
        self.admit(now())
        self.core.round(time.monotonic_ns())
        self.desk.drain_events()

    def is_empty(self) -> bool:
        return self.desk.num_inside == 0 and not any(self.core.num_entered(level) for level in range(5))


@pytest.fixture
def door() -> Iterator[Door]:
    made = Door()
    yield made
    made.prompts.close()


def now(**given: Any) -> Request:
    return a_request(arrival_ns=time.monotonic_ns(), **given)


def refused(door: Door, request: Request) -> RequestRefused:
    with pytest.raises(RequestRefused) as caught:
        door.admit(request)
    assert (request.state, request.reason) == (RequestState.REFUSED, caught.value.reason)
    told = caught.value.headers
    assert told["Retry-After"].isdecimal()
    assert 1 <= int(told["Retry-After"]) <= 120
    return caught.value


def test_an_admitted_request_waits_in_the_core_with_its_limits(door: Door) -> None:
    request = now(max_tokens=10, queue_timeout_s=5, timeout_s=20)
    door.admit(request)
    assert request.handle is not None
    assert not request.holds_permit
    assert (request.level, request.lane, request.max_tokens_granted) == (2, Lane.SHORT, 10)
    assert request.expire_ns == request.arrival_ns + 5 * S
    assert request.stop_ns == request.arrival_ns + 20 * S
    door.core.round(time.monotonic_ns())
    assert len(door.core.take(0)) == 1


@pytest.mark.parametrize(("mode", "num_stuck"), [("expected", 0), ("guaranteed", 2)])
def test_who_comes_counts_for_as_much_kv_as_it_will_be_promised(mode: str, num_stuck: int) -> None:
    """Three sequences are free, and cells for two answers of 256 tokens, but for one of the longest only."""
    door = Door(**{"engine.kv_mode": mode})
    door.core.add_device_slot(kv_tokens=0, num_sequences=2)
    door.models.served.n_ctx = 800
    door.admit(now())
    door.admit(now())
    assert door.desk.entrance.figures()["num_stuck"] == num_stuck
    door.prompts.close()


@pytest.mark.parametrize(
    ("wishes", "wait_s", "life_s"),
    [({}, 60, 600), ({"queue_timeout_s": 999, "timeout_s": 9999}, 60, 600), ({"timeout_s": 30}, 30, 30)],
)
def test_a_client_may_ask_for_less_time_not_for_more(
    door: Door, wishes: dict[str, float], wait_s: int, life_s: int
) -> None:
    request = a_request(arrival_ns=7, **wishes)
    asyncio.run(door.gate.enter(request, 7))
    assert (request.expire_ns, request.stop_ns) == (7 + wait_s * S, 7 + life_s * S)


def test_a_full_class_refuses_at_once_and_says_when_to_come_back() -> None:
    door = Door(**{"queue.caps": [1]})
    door.fill()
    door.admit(now())
    error = refused(door, now())
    assert (error.status, error.reason) == (429, "queue_full")
    assert "normal" in error.message
    # Another class still has room.
    door.admit(now(priority=4))
    assert door.desk.num_inside == 3


def test_who_waits_for_a_place_comes_in_with_the_next_that_is_free() -> None:
    """And its client, its prompt and its time in the queue know nothing of it."""
    door = Door(**{"queue.total": 1, "queue.evict": [False], "queue.place_wait_s": [5.0], "queue.high_load_at": 1.0})
    door.fill()

    async def scene() -> None:
        low, vip = now(priority=4), now(priority=2)
        await door.gate.admit(low, text("low"), Told())
        waits = asyncio.create_task(door.gate.admit(vip, text("vip"), Told()))
        await asyncio.sleep(0)
        assert door.desk.entrance.figures()["levels"][2]["num_place_waiting"] == 1
        door.desk.cancel(low)
        door.core.round(time.monotonic_ns())
        door.desk.drain_events()
        await waits
        assert vip.handle is not None

    asyncio.run(scene())


def test_who_leaves_while_it_waits_for_a_place_keeps_nothing() -> None:
    door = Door(**{"queue.total": 1, "queue.evict": [False], "queue.place_wait_s": [5.0]})
    door.fill()

    async def scene() -> None:
        await door.gate.admit(now(), text("hi"), Told())
        task = asyncio.create_task(door.gate.admit(now(), text("hi"), Told()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scene())
    assert door.desk.num_inside == 2
    assert door.seen.events[-1] == ("ended", "cancelled")


def test_a_drain_sends_away_who_waits_for_a_place() -> None:
    door = Door(**{"queue.total": 1, "queue.evict": [False], "queue.place_wait_s": [5.0]})
    door.fill()

    async def scene() -> None:
        await door.gate.admit(now(), text("hi"), Told())
        task = asyncio.create_task(door.gate.admit(now(), text("hi"), Told()))
        await asyncio.sleep(0)
        door.gate.drain(time.monotonic_ns())
        with pytest.raises(RequestRefused) as caught:
            await task
        assert caught.value.reason == "draining"

    asyncio.run(scene())


def test_a_class_that_is_closed_is_told_when_it_opens_again() -> None:
    """S18: 429, and not before the breaker half-opens."""
    door = Door(**{"queue.total": 4, "queue.breaker_open_s": 40.0})
    door.fill()
    for _ in range(4):
        door.admit(now())
    error = refused(door, now(priority=4))
    assert (error.status, error.reason) == (429, "breaker_open")
    assert 39 <= int(error.headers["Retry-After"]) <= 51
    # The others are refused for want of a place only.
    assert refused(door, now()).reason == "queue_full"


def test_the_class_follows_deadline_and_load_at_arrival() -> None:
    """S10."""
    door = Door(**{"queue.total": 10})
    door.service_s = 30.0
    tenant = Tenant("ann", "normal", 3, 2, 1)
    urgent, calm = now(tenant=tenant, timeout_s=50), now(tenant=tenant, timeout_s=70)
    door.fill()
    for request in (urgent, calm):
        door.admit(request)
    assert [request.level for request in (urgent, calm)] == [1, 2]
    assert urgent.deadline_ns == urgent.arrival_ns + 50 * S
    for _ in range(7):
        door.admit(now())
    late = now()
    door.admit(late)
    assert (late.level, late.is_clamped) == (3, True)


def test_the_refused_do_not_all_return_together() -> None:
    door = Door(**{"queue.caps": [0]})
    door.fill()
    waits = {refused(door, now()).headers["retry-after-ms"] for _ in range(20)}
    assert len(waits) > 10


def test_places_are_taken_before_the_prompt_is_made() -> None:
    door = Door(**{"queue.caps": [1]})
    door.fill()
    rendered = []

    def render() -> list[Segment]:
        rendered.append(door.core.num_entered(2))
        return [Segment("hi", True)]

    door.admit(now(), PromptSource(render=render))
    assert rendered == [1]
    with pytest.raises(RequestRefused):
        door.admit(now(), PromptSource(render=render))
    assert len(rendered) == 1


def broken() -> list[Segment]:
    raise BadRequest("no")


@pytest.mark.parametrize(
    ("source", "error"),
    [
        (PromptSource(render=broken), BadRequest),
        (PromptSource(ids=[1] * 100), PromptTooLong),
        (PromptSource(render=broken, num_bytes_min=10**6), PromptTooLong),
    ],
)
def test_who_is_sent_away_keeps_nothing(door: Door, source: PromptSource, error: type[LqsError]) -> None:
    with pytest.raises(error):
        door.admit(now(), source)
    assert door.is_empty()


def test_who_leaves_while_the_prompt_is_made_keeps_nothing(door: Door) -> None:
    async def leave() -> None:
        task = asyncio.create_task(door.gate.admit(now(), text("hi"), Told()))
        await asyncio.sleep(0)
        assert door.desk.num_inside == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(leave())
    assert door.is_empty()
    assert door.seen.events == [("ended", "cancelled")]


def test_time_in_the_pool_is_time_in_the_queue(door: Door) -> None:
    request = a_request(arrival_ns=time.monotonic_ns() - 61 * S)
    assert refused(door, request).reason == "queue_timeout"
    assert door.is_empty()


def test_an_unknown_model_is_named_but_not_at_length(door: Door) -> None:
    with pytest.raises(NotFound) as caught:
        door.admit(now(model="x" * 10_000))
    assert caught.value.code == "model_not_found"
    assert len(caught.value.message) < 250
    assert door.is_empty()


def test_a_loading_model_says_when_it_is_there(door: Door) -> None:
    door.models.served.is_loading = True
    assert door.gate.closed_reason() == "model_loading"
    error = refused(door, now())
    assert error.reason == "model_loading"
    assert 7 <= int(error.headers["Retry-After"]) <= 9


def test_without_a_healthy_device_requests_fail_fast(door: Door) -> None:
    assert door.gate.closed_reason() is None
    door.models.served.has_healthy_device = False
    assert door.gate.closed_reason() == "no_device"
    assert refused(door, now()).reason == "no_device"


def test_a_drain_lets_nobody_in_and_tells_the_time_that_is_left(door: Door) -> None:
    door.gate.drain(time.monotonic_ns() - 20 * S)
    assert door.gate.closed_reason() == "draining"
    error = refused(door, now())
    assert error.headers["Connection"] == "close"
    assert 10 <= int(error.headers["Retry-After"]) <= 13


def test_who_is_at_the_door_when_the_drain_ends_is_sent_away(door: Door) -> None:
    door.gate.shut()
    assert refused(door, now()).reason == "draining"
    assert door.is_empty()
    assert door.gate.refuse_rest(now()).reason == "draining"


def test_new_limits_hold_for_the_next_request(door: Door) -> None:
    door.gate.reload(load(None, None, {"queue.timeout_s": 1.0, "queue.caps": [7]}))
    request = a_request(arrival_ns=0)
    asyncio.run(door.gate.enter(request, 0))
    assert request.expire_ns == S
    assert door.desk.entrance.figures()["levels"][0]["cap"] == 7


def test_texts_are_tokenised_in_the_pool(door: Door) -> None:
    async def both() -> bytes:
        served = door.models.served
        ids = await door.gate.tokenize(served, "a\ud800", add_special=False, parse_special=True)  # type: ignore[arg-type]
        return await door.gate.detokenize(served, ids)  # type: ignore[arg-type]

    assert asyncio.run(both()) == b"a?"
