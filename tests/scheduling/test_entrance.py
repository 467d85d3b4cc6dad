"""Who waits at the door, against the real scheduler: the test is its thread, the worker and the clock."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Iterable
from itertools import permutations
from typing import Any

import pytest

from lqs._core import Breaker, Work
from lqs.request import NS_PER_S, Lane, Request, RequestState, Tenant
from lqs.scheduling.core import make_door, make_scheduler
from lqs.scheduling.desk import Desk
from lqs.scheduling.entrance import NoPlace
from lqs.scheduling.outlook import make_outlook
from lqs.settings import load
from tests.scheduling.parts import Told

S = NS_PER_S
VIP, NORMAL, FREE, BATCH = 0, 2, 3, 4


class Scene:
    """A desk over one device slot with one sequence, at a time of the test's choice."""

    def __init__(self, **flags: Any) -> None:
        self.config = load(None, None, {"engine.parallel": 1, "engine.out_buffer_bytes": 4096} | flags)
        self.core = make_scheduler(self.config, [1.0, 1.0])
        self.core.add_device_slot(kv_tokens=1000, num_sequences=1)
        self.now_ns = 0
        self.changes: list[tuple[str, int | None, int]] = []
        self.desk = Desk(
            self.core,
            Told(),
            door=make_door(self.config),
            outlook=make_outlook(self.config, self.core, now_ns=lambda: self.now_ns),
            on_door=lambda *change: self.changes.append(change),
            now_ns=lambda: self.now_ns,
        )

    def request(self, name: str, level: int, **given: Any) -> Request:
        request = Request(
            id=name, tenant=Tenant("t", "normal", 1, 2, 0), model="m", arrival_ns=self.now_ns, level=level, **given
        )
        request.prompt, request.max_tokens_granted = array("i", [1, 2, 3]), 7
        return request

    async def arrive(self, request: Request) -> tuple[Request, NoPlace | None]:
        """Come in, if need be after a while, and wait in the scheduler."""
        no_place = await self.desk.enter(request, self.now_ns)
        if no_place is None:
            self.desk.submit(request, Work(), Told(), model=0)
        return request, no_place

    async def come(self, name: str, level: int, **given: Any) -> asyncio.Task[tuple[Request, NoPlace | None]]:
        """Begin to arrive."""
        task = asyncio.create_task(self.arrive(self.request(name, level, **given)))
        await asyncio.sleep(0)
        return task

    async def fill(self, names: Iterable[str], level: int, **given: Any) -> list[Request]:
        """Let one run on the only sequence if none does, and these wait."""
        if not self.core.num_running:
            await self.come("runs", level)
            await self.turn()
        tasks = [await self.come(name, level, **given) for name in names]
        return [(await task)[0] for task in tasks]

    async def turn(self) -> None:
        """A round, and what the loop makes of it."""
        self.core.round(self.now_ns)
        self.desk.drain_events()
        for _ in range(3):
            await asyncio.sleep(0)

    async def end_one(self) -> None:
        """What runs comes to its end, and the next starts."""
        for handle in self.core.take(0):
            self.core.finish(handle)
        await self.turn()
        await self.turn()

    def is_empty(self) -> bool:
        snapshot = self.core.snapshot()
        num_guests = sum(level["num_place_waiting"] for level in self.desk.entrance.figures()["levels"])
        return (self.desk.num_inside, snapshot["num_entered"], snapshot["num_live"], num_guests) == (0, 0, 0, 0)


def play(scene: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 20))  # type: ignore[arg-type]


async def served(scene: Scene, levels: Iterable[int]) -> list[int]:
    """The classes in the order in which they start, when these arrive while one runs."""
    await scene.fill([], VIP)
    requests = [(await (await scene.come("r", level)))[0] for level in levels]
    order: list[int] = []
    while len(order) < len(requests):
        await scene.end_one()
        order += [r.level for r in requests if r.state is RequestState.RUNNING]
        assert len(order) <= len(requests)
    await scene.end_one()
    assert scene.is_empty()
    return order


@pytest.mark.parametrize("levels", sorted(set(permutations([VIP, VIP, NORMAL, NORMAL, FREE, FREE]))))
def test_the_classes_are_served_in_their_order_whatever_that_of_arrival(levels: tuple[int, ...]) -> None:
    """S9: vip, vip, normal, normal, free, free."""

    async def scene() -> None:
        assert await served(Scene(), levels) == [VIP, VIP, NORMAL, NORMAL, FREE, FREE]

    play(scene)


def test_two_vips_run_before_ten_free_that_came_earlier() -> None:
    """S9: 10 free, then 2 vip."""

    async def scene() -> None:
        assert await served(Scene(), [FREE] * 10 + [VIP] * 2) == [VIP] * 2 + [FREE] * 10

    play(scene)


def test_the_youngest_of_the_lowest_class_leaves_for_a_better_one() -> None:
    async def scene() -> None:
        at = Scene(**{"queue.total": 4})
        (low,) = await at.fill(["low"], FREE)
        lowest = await at.fill(["a", "b"], BATCH, lane=Lane.LONG)
        lowest += await at.fill(["c"], BATCH)
        vip = await at.come("vip", VIP)
        assert not vip.done()
        await at.turn()
        assert await vip == (vip.result()[0], None)
        # Over both lanes together.
        assert [request.state for request in [low, *lowest]] == [RequestState.WAITING] * 3 + [RequestState.REFUSED]
        assert lowest[-1].reason == "evicted"
        assert at.core.snapshot()["levels"][BATCH]["num_evicted"] == 1
        assert [level["num_pending"] for level in at.desk.entrance.figures()["levels"]] == [1, 0, 0, 1, 2]

    play(scene)


def test_nobody_leaves_for_its_own_class_and_nobody_that_runs() -> None:
    async def scene() -> None:
        at = Scene(**{"queue.total": 2, "queue.place_wait_s": [0.0]})
        await at.fill(["a", "b"], NORMAL)
        task = await at.come("c", NORMAL)
        assert (await task)[1] == NoPlace("queue_full")
        # The one that runs is of a lower class than this one, but those that wait are not.
        at = Scene(**{"queue.total": 2, "queue.place_wait_s": [0.0]})
        await at.fill([], BATCH)
        await at.fill(["a", "b"], VIP)
        assert (await (await at.come("c", VIP)))[1] == NoPlace("queue_full")
        assert at.core.num_running == 1

    play(scene)


def test_one_whose_prompt_is_still_made_cannot_leave_before_it_is_submitted() -> None:
    async def scene() -> None:
        at = Scene(**{"queue.total": 1})
        await at.fill([], VIP)
        low, sink = at.request("low", NORMAL), Told()
        assert await at.desk.enter(low, 0) is None
        vip = await at.come("vip", VIP)
        await at.turn()
        assert not vip.done()
        assert at.desk.entrance.figures()["levels"][VIP]["num_place_waiting"] == 1
        at.desk.submit(low, Work(), sink, model=0)
        await at.turn()
        assert (await vip)[1] is None
        assert sink.events == [("ended", "evicted"), "settled"]

    play(scene)


def test_one_whose_prompt_is_still_made_may_leave_its_place_to_who_waits() -> None:
    async def scene() -> None:
        at = Scene(**{"queue.total": 1})
        await at.fill([], VIP)
        preparing = at.request("p", NORMAL)
        assert await at.desk.enter(preparing, 0) is None
        vip = await at.come("vip", VIP)
        at.desk.leave(preparing)
        assert (await vip)[1] is None

    play(scene)


@pytest.mark.parametrize("asks", [False, True])
def test_who_leaves_at_the_door_leaves_nothing_behind(asks: bool) -> None:
    """While it waits for a place, and while it waits for the scheduler's answer."""

    async def scene() -> None:
        at = Scene(**{"queue.total": 1, "queue.evict": [asks]})
        (low,) = await at.fill(["low"], BATCH)
        vip = await at.come("vip", VIP)
        vip.cancel()
        await asyncio.wait([vip])
        assert vip.cancelled()
        await at.turn()
        assert low.reason == ("evicted" if asks else None)
        for _ in range(2):
            await at.end_one()
        assert at.is_empty()
        assert at.desk.entrance.figures()["num_asks"] == 0

    play(scene)


def test_one_that_was_evicted_for_somebody_who_left_gives_its_place_to_the_next() -> None:
    async def scene() -> None:
        at = Scene(**{"queue.total": 1, "queue.place_wait_s": [5.0], "queue.break_at": 0.0})
        (low,) = await at.fill(["low"], BATCH)
        vip = await at.come("vip", VIP)
        other = await at.come("other", BATCH)
        vip.cancel()
        await asyncio.wait([vip])
        await at.turn()
        assert low.reason == "evicted"
        assert (await other)[1] is None

    play(scene)


def test_a_place_that_comes_in_the_moment_of_leaving_is_the_requests_to_give_back() -> None:
    async def scene() -> None:
        at = Scene(**{"queue.total": 1, "queue.evict": [False]})
        (waits,) = await at.fill(["low"], BATCH)
        request = at.request("vip", VIP)
        task = asyncio.create_task(at.arrive(request))
        await asyncio.sleep(0)
        at.desk.cancel(waits)
        at.core.round(0)
        at.desk.drain_events()
        # It is in, and does not know yet.
        task.cancel()
        await asyncio.wait([task])
        assert request.holds_permit
        at.desk.abandon(request)
        await at.end_one()
        assert at.is_empty()

    play(scene)


@pytest.mark.parametrize(
    ("expire_s", "reason", "until_s"), [(60, "queue_full", 5), (3, "queue_timeout", 3), (0, "queue_full", 5)]
)
def test_a_wait_for_a_place_is_over_after_its_time(expire_s: int, reason: str, until_s: int) -> None:
    async def scene() -> None:
        at = Scene(**{"queue.total": 1, "queue.evict": [False]})
        await at.fill(["low"], BATCH)
        vip = await at.come("vip", VIP, expire_ns=expire_s * S)
        at.now_ns = until_s * S - 1
        await at.turn()
        assert not vip.done()
        at.now_ns += 1
        await at.turn()
        assert (await vip)[1] == NoPlace(reason)

    play(scene)


def test_the_loop_comes_back_by_itself_when_a_wait_is_over() -> None:
    async def scene() -> None:
        at = Scene(**{"queue.total": 1, "queue.evict": [False], "queue.place_wait_s": [0.02]})
        await at.fill(["low"], BATCH)
        vip = await at.come("vip", VIP)
        at.now_ns = S
        assert (await vip)[1] == NoPlace("queue_full")

    play(scene)


def test_who_is_not_in_is_sent_away_when_nobody_may_come_in_any_more() -> None:
    async def scene() -> None:
        at = Scene(**{"queue.total": 1, "queue.place_wait_s": [5.0], "queue.break_at": 0.0})
        await at.fill(["low"], BATCH)
        asks, waits = await at.come("vip", VIP), await at.come("free", BATCH)
        at.desk.entrance.dismiss("draining")
        assert [(await task)[1] for task in (asks, waits)] == [NoPlace("draining")] * 2
        await at.turn()
        await at.end_one()
        assert at.is_empty()

    play(scene)


def test_a_demoted_request_stands_in_its_new_class_and_says_so() -> None:
    async def scene() -> None:
        at = Scene(**{"queue.caps": [1], "queue.on_full": ["refuse", "refuse", "demote"]})
        await at.fill(["a"], NORMAL)
        request, no_place = await (await at.come("b", NORMAL))
        assert (request.level, request.is_clamped, no_place) == (FREE, True, None)
        await at.turn()
        assert (at.core.num_waiting(NORMAL), at.core.num_waiting(FREE)) == (1, 1)
        await at.end_one()
        await at.end_one()
        await at.end_one()
        assert at.is_empty()

    play(scene)


def test_the_breaker_is_told_of_with_the_time_of_its_end() -> None:
    async def scene() -> None:
        at = Scene(**{"queue.total": 10})
        await at.fill("abcdefgh", NORMAL)
        assert at.changes == [("warning", None, 1)]
        await at.fill("ij", NORMAL)
        assert at.changes[1:] == [("breaker", BATCH, Breaker.BREAKER_OPEN)]
        at.now_ns = 2 * S
        assert (await (await at.come("k", BATCH)))[1] == NoPlace("breaker_open", 5 * S)
        at.now_ns = 5 * S
        for _ in range(6):
            await at.end_one()
        assert at.changes[2:] == [("warning", None, 0)]
        await at.fill("lmn", BATCH)
        assert at.changes[3:] == [
            ("breaker", BATCH, state) for state in (Breaker.BREAKER_HALF_OPEN, Breaker.BREAKER_CLOSED)
        ]

    play(scene)


def test_new_rules_let_in_who_waits() -> None:
    async def scene() -> None:
        at = Scene(**{"queue.total": 1, "queue.evict": [False]})
        await at.fill(["low"], BATCH)
        vip = await at.come("vip", VIP)
        at.desk.reload(load(None, None, {"queue.total": 2}))
        assert (await vip)[1] is None
        assert at.desk.entrance.load() == 1.0

    play(scene)
