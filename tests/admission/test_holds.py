"""The line of those who wait for a model: everybody's place, however many there are."""

from __future__ import annotations

import asyncio
import random
import time
from types import SimpleNamespace
from typing import Any

import pytest

from lqs.admission.holds import Holds, Line

NUM_WAITING = 4000


class Absent:
    """A fleet in which no model ever comes."""

    def try_have(self, served: Any) -> bool:
        return False

    async def have(self, served: Any) -> None:
        await asyncio.get_running_loop().create_future()


def request() -> Any:
    return SimpleNamespace(expire_ns=time.monotonic_ns() + 10**12, models_held=(), model_wait_ns=0)


def test_places_are_those_of_a_list_whoever_leaves() -> None:
    line, tickets, pick = Line(), [], random.Random(7)
    for turn in range(3000):
        if not tickets or pick.random() < (0.6 if turn < 1500 else 0.4):
            tickets.append(line.join())
        else:
            line.leave(tickets.pop(pick.choice([0, 0, pick.randrange(len(tickets)), len(tickets) - 1])))
        for ticket in pick.sample(tickets, min(3, len(tickets))):
            assert line.place(ticket) == tickets.index(ticket) + 1
    assert tickets


def test_all_leave_and_who_comes_then_is_the_first() -> None:
    line = Line()
    for ticket in [line.join() for _ in range(9)]:
        line.leave(ticket)
    assert line.place(line.join()) == 1


async def _wait_all(holds: Holds, requests: list[Any], model: Any) -> list[asyncio.Task[None]]:
    tasks = [asyncio.create_task(holds.take(each, model)) for each in requests]
    await asyncio.sleep(0)
    return tasks


@pytest.mark.parametrize("num_before", [1, NUM_WAITING])
def test_each_has_its_place_at_its_own_model_until_it_waits_no_more(num_before: int) -> None:
    async def scene() -> None:
        holds = Holds(Absent())  # type: ignore[arg-type]
        first, second = [request() for _ in range(num_before)], [request() for _ in range(2)]
        tasks = [
            *await _wait_all(holds, first, SimpleNamespace(index=0)),
            *await _wait_all(holds, second, SimpleNamespace(index=1)),
        ]
        assert [holds.position(each) for each in (*first[-1:], *second)] == [num_before, 1, 2]
        tasks[-2].cancel()
        await asyncio.sleep(0)
        assert [holds.position(each) for each in second] == [None, 1]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert {holds.position(each) for each in (*first, *second)} == {None}

    asyncio.run(scene())


def test_each_of_many_has_a_place_of_its_own() -> None:
    async def scene() -> None:
        holds, requests = Holds(Absent()), [request() for _ in range(NUM_WAITING)]  # type: ignore[arg-type]
        tasks = await _wait_all(holds, requests, SimpleNamespace(index=0))
        assert [holds.position(each) for each in requests] == list(range(1, NUM_WAITING + 1))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(scene())
