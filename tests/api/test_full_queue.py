"""What a client sees of a full queue: it is made to leave, waits at the door, or stands in another class."""

from __future__ import annotations

import pytest

from tests.api.harness import HI, House, driven, until

CHAT = "/v1/chat/completions"
LOW, HIGH = HI | {"priority": 4}, HI | {"priority": 2}


async def full_house(**queue: object) -> tuple[House, int]:
    """One runs on the only sequence; there is one place. The load moves nobody."""
    house = House(queue={"total": 1, "high_load_at": 1.0, **queue})
    house.call("POST", CHAT, HIGH)
    (running,) = await house.starts()
    return house, running


@driven
async def test_who_has_to_leave_is_told_so_and_when_to_come_back():
    house, running = await full_house()
    low = house.call("POST", CHAT, LOW)
    await until(lambda: house.turn() or house.desk.scheduler.num_waiting(4) == 1)
    high = house.call("POST", CHAT, HIGH)
    await until(lambda: house.turn() or low.task.done())
    assert (low.status, low.error["code"], low.headers["x-lqs-reason"]) == (429, "evicted", "evicted")
    assert low.error["type"] == "rate_limit_error"
    assert int(low.headers["retry-after"]) >= 1
    assert float(low.headers["x-lqs-queue-ms"]) >= 0
    house.finish(running)
    await house.serve(high, "x")
    assert high.status == 200
    assert house.metrics.refused_by_reason == {"evicted": 1}


@driven
async def test_a_stream_that_has_opened_hears_of_its_eviction_in_its_last_event():
    house, _ = await full_house(hold_s=0)
    low = house.call("POST", CHAT, LOW | {"stream": True})
    await until(lambda: house.turn() or b": queue position=1" in low.body)
    house.call("POST", CHAT, HIGH)
    await until(lambda: house.turn() or low.task.done())
    assert (low.status, low.events[-1]["error"]["code"]) == (200, "evicted")


@pytest.mark.parametrize("way", ["leaves", "cancels"])
@driven
async def test_who_waits_for_a_place_may_go_away(way: str):
    house, running = await full_house(evict=[False], place_wait_s=[5.0])
    waits = house.call("POST", CHAT, HIGH)
    await until(lambda: house.turn() or house.desk.scheduler.num_waiting(2) == 1)
    guest = house.call("POST", CHAT, HIGH, headers=[(b"x-request-id", b"guest")])
    await until(lambda: house.desk.entrance.figures()["num_guests"] == 1)
    if way == "leaves":
        guest.leave()
    else:
        shown = await house.ask("GET", "/v1/requests/guest")
        assert (shown.json["state"], shown.json["position"]) == ("waiting", None)
        assert (await house.ask("DELETE", "/v1/requests/guest")).json["state"] == "cancelled"
    await guest.done()
    assert house.desk.entrance.figures()["num_guests"] == 0
    house.finish(running)
    await house.serve(waits, "x")
    assert house.desk.num_inside == 0


@driven
async def test_a_demoted_request_is_told_its_class():
    house, running = await full_house(total=9, caps=[1], on_full=["demote"])
    first = house.call("POST", CHAT, HIGH)
    await until(lambda: house.turn() or house.desk.scheduler.num_waiting(2) == 1)
    second = house.call("POST", CHAT, HIGH)
    await until(lambda: house.turn() or house.desk.scheduler.num_waiting(3) == 1)
    house.finish(running)
    for call, shown in ((first, None), (second, "3")):
        await house.serve(call, "x")
        assert (call.status, call.headers.get("x-lqs-priority")) == (200, shown)
