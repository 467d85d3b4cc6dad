"""What a client is told of its wait, through the routes; the worker is played by the test."""

from __future__ import annotations

from tests.api.harness import HI, House, driven, until

CHAT = "/v1/chat/completions"


@driven
async def test_a_waiting_request_shows_its_place_and_time():
    house = House(slots=1)
    first = house.call("POST", CHAT, HI | {"max_tokens": 10})
    (running,) = await house.starts()
    for _ in range(3):
        house.emit(running, "x")
    second = house.call("POST", CHAT, HI | {"max_tokens": 10}, headers=[(b"x-request-id", b"mine.1")])
    await until(lambda: house.turn() or house.desk.scheduler.num_waiting(2) == 1)
    shown = (await house.ask("GET", "/v1/requests/mine.1")).json
    assert (shown["state"], shown["position"]) == ("waiting", 1)
    assert shown["eta_s"] >= 0
    house.finish(running)
    await first.done()
    await house.serve(second, "ok")
    assert second.status == 200


@driven
async def test_a_try_that_is_counted_claims_what_the_first_was_promised():
    """B40: its place is held against the newcomers that come at the same time."""
    house = House(slots=1, queue={"caps": [2], "total": 2, "high_load_at": 1.0, "break_at": 0.0})
    runs = house.call("POST", CHAT, HI)
    (running,) = await house.starts()
    waiting = [house.call("POST", CHAT, HI) for _ in range(2)]
    await until(lambda: house.turn() or house.desk.scheduler.num_waiting(2) == 2)
    first_try, second_try = [(b"x-stainless-retry-count", b"0")], [(b"x-stainless-retry-count", b"1")]
    refused = await house.ask("POST", CHAT, HI, headers=first_try)
    assert refused.status == 429
    # As far as the clock of the promises goes, the time has come and one place is free.
    waiting[0].leave()
    await until(lambda: house.turn() or house.desk.scheduler.num_waiting(2) == 1)
    house.desk.outlook._now_ns = lambda now=house.desk.outlook._now_ns, ms=int(refused.headers["retry-after-ms"]): (
        now() + ms * 1_000_000
    )
    assert (await house.ask("POST", CHAT, HI, headers=first_try)).status == 429
    claims = house.call("POST", CHAT, HI, headers=second_try)
    await until(lambda: house.turn() or house.desk.scheduler.num_waiting(2) == 2)
    house.finish(running)
    await runs.done()
    await house.serve(waiting[1], "ok")
    await house.serve(claims, "ok")
    assert claims.status == 200
