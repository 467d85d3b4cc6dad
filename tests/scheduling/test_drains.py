"""Device slots that are held back, over the real core."""

from __future__ import annotations

import asyncio

import pytest

from lqs.request import Request
from lqs.scheduling.drains import Drains
from tests.scheduling.parts import Told
from tests.scheduling.test_desk import FINISH_CANCELLED, S, Scene

LIMIT_S = 30


class House(Scene):
    """Two device slots of one model with a sequence each, and one of another model."""

    def __init__(self) -> None:
        super().__init__()
        self.core.add_device_slot(kv_tokens=1000, num_sequences=1)
        self.core.add_device_slot(model=1, kv_tokens=1000, num_sequences=1)
        self.drains = Drains(self.desk, LIMIT_S)

    def hold(self, *slots: int, now_ns: int = 0, holder: str = "operator") -> None:
        for slot in slots:
            self.drains.hold(slot, now_ns, holder)
        self.turn(now_ns)

    def release(self, slot: int, holder: str = "operator") -> None:
        self.drains.release(slot, 0, holder)
        self.turn()

    def takes(self, slot: int) -> bool:
        return not self.core.slots()[slot]["is_drained"]


def wait(house: House, request: Request, sink: Told) -> None:
    """See it wait, whatever the scheduler does."""
    house.turn()
    assert house.core.position(request.handle) == 1
    assert sink.events == []


def test_a_device_slot_that_is_held_takes_nobody_and_the_model_stays_open() -> None:
    house, sink = House(), Told()
    house.hold(0)
    house.submit(sink)
    house.turn()
    assert [len(house.core.take(slot)) for slot in (0, 1)] == [0, 1]
    assert not house.drains.is_closed(0)
    assert not house.drains.has_closed


def test_a_device_slot_opens_when_the_last_has_let_go() -> None:
    house = House()
    house.hold(0)
    house.hold(0, holder="health")
    assert house.drains.holders(0) == ["health", "operator"]
    house.release(0)
    assert not house.takes(0)
    house.release(0, "health")
    assert house.takes(0)
    assert house.drains.holders(0) == []


def test_a_model_is_closed_while_nothing_takes_its_requests() -> None:
    house = House()
    house.hold(0, 1, now_ns=5 * S)
    assert house.drains.is_closed(0)
    assert not house.drains.is_closed(1)
    house.release(1)
    assert not house.drains.is_closed(0)


def test_what_only_its_health_holds_closes_no_model() -> None:
    house = House()
    house.hold(0, 1, holder="health")
    assert not house.drains.has_closed
    house.hold(1)
    assert house.drains.is_closed(0)


def test_a_drained_device_slot_beside_a_dead_one_closes_the_model() -> None:
    house = House()
    house.hold(0)
    house.core.report_dead(1)
    house.turn()
    assert not house.drains.is_closed(0)
    house.drains.look(0)
    assert house.drains.is_closed(0)
    # And a dead one alone is not the operator's doing.
    house.core.report_dead(0)
    house.turn()
    house.drains.look(0)
    assert not house.drains.has_closed


def test_who_waits_for_a_closed_model_runs_if_it_opens_in_time() -> None:
    house, sink = House(), Told()
    house.hold(0, 1)
    request = house.submit(sink)
    house.drains.look(LIMIT_S * S - 1)
    wait(house, request, sink)
    house.release(0)
    assert sink.events == ["started"]


def test_who_waits_for_a_closed_model_is_told_at_the_limit_and_who_runs_is_not() -> None:
    house, runs, waits = House(), Told(), Told()
    house.submit(runs)
    house.turn()
    house.hold(0, 1)
    request = house.submit(waits)
    wait(house, request, waits)
    house.drains.look(LIMIT_S * S)
    house.turn()
    assert waits.events == [("ended", "cancelled"), "settled"]
    assert request.reason == "draining"
    assert runs.events == ["started"]


@pytest.mark.parametrize(("finishes", "is_empty"), [(True, True), (False, False)])
def test_a_wait_ends_when_nothing_runs_there_or_at_its_limit(finishes: bool, is_empty: bool) -> None:
    house = House()
    house.submit(Told())
    house.turn()
    (handle,) = house.core.take(0)
    house.hold(0)

    async def scene() -> bool:
        waiting = asyncio.ensure_future(house.drains.wait_empty([0], 5 if finishes else 0))
        await asyncio.sleep(0)
        if finishes:
            assert not waiting.done()
            house.core.finish(handle)
            house.turn()
        return await waiting

    assert asyncio.run(scene()) is is_empty


def test_who_holds_a_device_slot_holds_each_seat_that_it_gets() -> None:
    house = House()
    house.hold(1)
    house.core.report_dead(1)
    seat = house.core.add_device_slot(kv_tokens=1000, num_sequences=1, is_resting=True)
    house.drains.moved(1, seat)
    house.core.rest_slot(seat, False)
    house.turn()
    assert (house.drains.holders(1), house.takes(seat)) == (["operator"], False)
    # The operator's word counts for the new seat too: with the other one held nobody takes requests.
    house.hold(0)
    assert house.drains.is_closed(0)
    assert asyncio.run(house.drains.wait_empty([0, 1], 0))
    house.release(1)
    assert (house.drains.holders(1), house.takes(seat), house.drains.is_closed(0)) == ([], True, False)


def test_who_was_lost_and_waits_for_a_closed_model_is_told_at_the_limit() -> None:
    house, lost, runs = House(), Told(), Told()
    for sink in (lost, runs):
        house.submit(sink)
        house.turn()
    house.core.take(0)
    house.hold(1)
    house.core.report_dead(0)
    for _ in range(2):
        house.turn()
    assert house.core.snapshot()["num_again"] == 1
    house.drains.look(0)
    house.drains.look(LIMIT_S * S - 1)
    house.turn()
    assert lost.events == ["started"]
    house.drains.look(LIMIT_S * S)
    house.turn()
    assert lost.events == ["started", ("finished", FINISH_CANCELLED), "settled"]
    assert runs.events == ["started"]
