"""The desk against the real scheduler, with the test as scheduler's thread and as worker."""

from __future__ import annotations

import asyncio
import itertools
from array import array
from typing import Any

import pytest

from lqs._core import Work
from lqs.errors import RETRY_AFTER_S_MAX, RequestRefused
from lqs.request import NS_PER_S, Request, RequestState, Tenant
from lqs.scheduling.core import make_door, make_scheduler
from lqs.scheduling.desk import Desk
from lqs.scheduling.entrance import NoPlace
from lqs.scheduling.outlook import make_outlook
from lqs.settings import load
from lqs.streaming.outlet import Outlet
from tests.scheduling.parts import Told

S = NS_PER_S
FINISH_STOP, FINISH_CANCELLED = 1, 3


def enter(desk: Desk, request: Request, now_ns: int = 0) -> NoPlace | None:
    """What the desk says at once."""
    coroutine = desk.enter(request, now_ns)
    with pytest.raises(StopIteration) as said:
        coroutine.send(None)
    return said.value.value  # type: ignore[no-any-return]


class Scene:
    """A desk over one device slot with one sequence."""

    def __init__(self, *, num_sequences: int = 1, body: Any = None, **flags: Any) -> None:
        config = load(None, None, {"engine.parallel": 1, "engine.out_buffer_bytes": 4096} | flags)
        scheduler = make_scheduler(config, [1.0, 1.0])
        self.seen = Told()
        self.now_ns = 0
        outlook = make_outlook(config, scheduler, now_ns=lambda: self.now_ns)
        self.desk = Desk(scheduler, self.seen, door=make_door(config), outlook=outlook, body=body)
        self.core = scheduler
        self.core.add_device_slot(kv_tokens=1000, num_sequences=num_sequences)

    def enter(self, level: int = 2, **given: Any) -> Request:
        request = Request(id="r", tenant=Tenant("t", "normal", 1, 2, 2), model="m", arrival_ns=0, level=level, **given)
        request.prompt, request.max_tokens_granted = array("i", [1, 2, 3]), 7
        assert enter(self.desk, request) is None
        return request

    def submit(self, sink: Told, **given: Any) -> Request:
        request = self.enter(**given)
        self.desk.submit(request, Work(), sink, model=0)
        return request

    def turn(self, now_ns: int = 0) -> None:
        self.now_ns = now_ns
        self.core.round(now_ns)
        self.desk.drain_events()


def test_a_request_is_told_everything_in_order() -> None:
    scene, sink = Scene(), Told()
    request = scene.submit(sink)
    assert request.handle is not None
    scene.turn(1)
    (handle,) = scene.core.take(0)
    assert (request.state, handle) == (RequestState.RUNNING, request.handle)
    scene.core.emit(handle, b"hel")
    scene.core.emit(handle, b"lo", 2)
    scene.core.finish(handle, FINISH_STOP, num_completion_tokens=3)
    scene.turn(2)
    assert sink.events == ["started", ("output", b"hello", 3, None), ("finished", FINISH_STOP), "settled"]
    assert (request.state, request.handle) == (RequestState.FINISHED, None)
    assert scene.desk.num_inside == 0
    # The observer is told of everything but the settling.
    assert [event if isinstance(event, str) else event[0] for event in scene.seen.events] == [
        "started",
        "foretold",
        "output",
        "finished",
    ]


def test_a_wait_for_memory_is_told_as_a_wait_and_is_none_of_the_queues() -> None:
    scene = Scene()
    request = scene.enter(model_wait_ns=50 * S)
    outlet = Outlet(request)
    scene.desk.submit(request, Work(), outlet, model=0)
    scene.turn(52 * S)
    assert outlet.queue_ns == 52 * S
    level = scene.core.snapshot()["levels"][2]
    assert (level["num_started"], level["wait_ns_sum"]) == (1, 2 * S)


async def read_slowly(scene: Scene, outlet: Outlet, handle: int, text: bytes) -> tuple[bytes, int]:
    """Write `text` byte by byte through the core while the reader takes only when nothing moves any more.

    What was read, and the most that lay in the outlet at once.
    """
    pieces, got, num_written, num_bytes_max = outlet.pieces(), b"", 0, 0
    while len(got) < len(text):
        while num_written < len(text) and scene.core.emit(handle, text[num_written : num_written + 1]):
            num_written += 1
            if num_written % 10 == 0:
                scene.turn()
        scene.turn()
        piece = (await anext(pieces)).text
        num_bytes_max = max(num_bytes_max, len(piece))
        got += piece
    return got, num_bytes_max


def test_a_slow_readers_text_waits_with_its_worker_and_none_of_it_is_lost() -> None:
    scene = Scene()
    request = scene.enter()
    outlet = Outlet(request, valve=scene.desk, num_bytes_max=100)
    scene.desk.submit(request, Work(), outlet, model=0)
    scene.turn()
    (handle,) = scene.core.take(0)
    text = bytes(range(256)) * 40
    got, num_bytes_max = asyncio.run(read_slowly(scene, outlet, handle, text))
    assert got == text
    # The outlet's bound, and at most what the out-buffer holds: 16 bytes for each of these records.
    assert num_bytes_max <= 100 + 4096 // 16
    scene.core.finish(handle, FINISH_STOP)
    scene.turn()
    assert (outlet.is_over, outlet.is_settled, scene.desk.num_inside) == (True, True, 0)


def test_a_paused_request_that_is_cancelled_ends_though_nobody_reads() -> None:
    scene = Scene()
    request = scene.enter()
    outlet = Outlet(request, valve=scene.desk, num_bytes_max=1)
    scene.desk.submit(request, Work(), outlet, model=0)
    scene.turn()
    (handle,) = scene.core.take(0)
    scene.core.emit(handle, b"a")
    scene.turn()
    scene.core.emit(handle, b"b")
    scene.core.finish(handle, FINISH_STOP)
    scene.turn()
    assert (outlet.is_over, scene.desk.num_inside) == (False, 1)
    scene.desk.cancel(request)
    scene.turn()
    assert (outlet.is_over, outlet.is_settled, scene.desk.num_inside) == (True, True, 0)
    # The reader that comes to it later finds it gone, and that is all.
    for late in (scene.desk.pause, scene.desk.resume):
        late(request)


def test_the_place_is_taken_at_arrival_and_given_back_once() -> None:
    scene = Scene(**{"queue.caps": [1], "queue.total": 1})
    scene.submit(Told())
    scene.turn()
    request = scene.enter()
    late = Request(id="x", tenant=request.tenant, model="m", arrival_ns=0, level=2)
    assert enter(scene.desk, late) == NoPlace("queue_full")
    for _ in range(2):
        scene.desk.leave(request)
    assert scene.desk.num_inside == 1
    assert scene.core.num_entered(0) == 0
    scene.enter(level=0)


def test_who_leaves_before_submitting_is_counted_as_cancelled() -> None:
    scene = Scene()
    request = scene.enter()
    scene.desk.abandon(request)
    assert (request.state, scene.seen.events) == (RequestState.CANCELLED, [("ended", "cancelled")])
    assert scene.core.num_entered(2) == 0


def test_a_cancelled_request_leaves_the_queue_at_once() -> None:
    scene, first, second = Scene(), Told(), Told()
    scene.submit(first)
    scene.turn()
    request = scene.submit(second)
    scene.turn()
    assert scene.desk.position(request) == 1
    for _ in range(2):
        scene.desk.cancel(request)
    scene.turn()
    assert second.events == [("ended", "cancelled"), "settled"]
    assert (request.state, request.reason) == (RequestState.CANCELLED, None)
    assert scene.core.num_waiting(2) == 0
    scene.desk.cancel(request)
    assert scene.desk.position(request) is None
    assert scene.desk.eta_s(request) is None


def test_a_request_that_waited_too_long_is_refused() -> None:
    scene, first, second = Scene(), Told(), Told()
    scene.submit(first)
    scene.turn()
    request = scene.submit(second, expire_ns=5 * S)
    scene.turn(1)
    scene.turn(6 * S)
    assert second.events == [("ended", "expired"), "settled"]
    assert (request.state, request.reason) == (RequestState.REFUSED, "queue_timeout")


def test_one_that_no_device_had_the_memory_for_in_time_is_told_so() -> None:
    scene, first, second = Scene(num_sequences=2), Told(), Told()
    request = scene.enter()
    request.max_tokens_granted = 900
    scene.desk.submit(request, Work(), first, model=0)
    scene.turn()
    large = scene.enter(expire_ns=5 * S)
    large.max_tokens_granted = 900
    scene.desk.submit(large, Work(), second, model=0)
    scene.turn(1)
    scene.turn(6 * S)
    assert second.events == [("ended", "no_kv"), "settled"]
    assert (large.state, large.reason) == (RequestState.REFUSED, "kv_budget")


def test_a_key_that_the_core_has_no_room_for_leaves_nothing_behind() -> None:
    scene = Scene()
    request = scene.enter()
    request.tenant = Tenant("t", "normal", 99, 2, 2)
    with pytest.raises(IndexError):
        scene.desk.submit(request, Work(), Told(), model=0)
    assert (scene.desk.num_inside, scene.core.num_entered(2)) == (0, 0)


def test_without_a_living_device_slot_a_request_is_refused() -> None:
    scene, sink = Scene(), Told()
    scene.core.report_dead(0)
    scene.turn()
    request = scene.submit(sink)
    scene.turn()
    assert sink.events == [("ended", "no_device"), "settled"]
    assert request.reason == "no_device"


def test_a_full_table_refuses_and_gives_everything_back() -> None:
    scene = Scene(num_sequences=2, **{"queue.table_capacity": 17, "queue.total": 16})
    for _ in range(2):
        scene.submit(Told())
    scene.turn()
    for _ in range(15):
        scene.submit(Told())
    request = scene.enter(level=1)
    with pytest.raises(RequestRefused) as caught:
        scene.desk.submit(request, Work(), Told(), model=0)
    assert caught.value.reason == request.reason == "queue_full"
    assert scene.core.num_entered(1) == 0
    assert scene.desk.num_inside == 17
    scene.desk.leave(request)
    assert scene.core.num_entered(1) == 0


def test_a_receiver_that_fails_loses_its_event_and_no_other() -> None:
    class Broken(Told):
        def output(self, *args: Any) -> None:
            raise RuntimeError

    scene, broken, sound = Scene(num_sequences=2), Broken(), Told()
    scene.submit(broken)
    scene.submit(sound)
    scene.turn()
    for handle in scene.core.take(0):
        scene.core.emit(handle, b"x")
        scene.core.finish(handle)
    scene.turn()
    assert broken.events[-1] == sound.events[-1] == "settled"
    assert ("output", b"x", 1, None) in sound.events
    assert ("lost", "RuntimeError") in scene.seen.events
    assert scene.desk.num_inside == 0


def drained(scene: Scene, level: int, num_starts: int, every_ns: int) -> None:
    """Let a class start that many requests, one every so often, with always some behind."""
    for _ in range(3):
        scene.submit(Told(), level=level)
    scene.turn(1)
    for number in range(1, num_starts):
        scene.submit(Told(), level=level)
        (handle,) = scene.core.take(0)
        scene.core.finish(handle)
        scene.turn(number * every_ns)


def a_refused(**given: Any) -> Request:
    return Request(id="r", tenant=Tenant("t", "normal", 1, 2, 2), model="m", arrival_ns=0, level=2, **given)


def test_retry_after_tells_each_refused_client_the_next_free_place() -> None:
    """B40: from the true wait, one service time apart."""
    scene = Scene()
    drained(scene, 2, 40, 2 * S)
    scene.now_ns = 80 * S
    waits = [scene.desk.retry_after_s(a_refused()) for _ in range(3)]
    # 97 places are free: nothing but the least wait, and what is drawn.
    assert all(1 <= wait <= 6 for wait in waits)
    scene.desk.outlook.retry_after_s(a_refused(), num_free=0)
    waits = [scene.desk.outlook.retry_after_s(a_refused(), num_free=0) for _ in range(20)]
    steps = [later - sooner for sooner, later in itertools.pairwise(waits)]
    assert sum(steps) / len(steps) == pytest.approx(2, rel=0.3)
    # Later the places told of have passed, and the next is near again.
    scene.now_ns += 130 * S
    assert scene.desk.outlook.retry_after_s(a_refused(), num_free=0) < waits[0]
    told = [scene.desk.outlook.retry_after_s(a_refused(), num_free=0) for _ in range(400)]
    assert 0.9 * RETRY_AFTER_S_MAX < max(told) <= RETRY_AFTER_S_MAX


def test_before_anything_has_run_a_time_is_told_all_the_same() -> None:
    assert 1 <= Scene().desk.retry_after_s(a_refused()) <= 15


def test_the_expected_wait_follows_what_runs_and_what_is_ahead() -> None:
    """Of ten tokens each takes a second; who runs has four to go, and one is ahead."""
    scene = Scene()
    for number in range(4):
        scene.submit(Told())
        if number == 0:
            scene.turn()
    (handle,) = scene.core.take(0)
    assert scene.desk.eta_s(scene.submit(Told())) is None
    for second in range(1, 4):
        scene.core.emit(handle, b"x")
        scene.turn(second * S)
    waiting = scene.submit(Told())
    scene.turn(3 * S)
    # One runs and has 4 of its 7 tokens to make, four that take 7 each are ahead.
    assert scene.desk.position(waiting) == 5
    assert scene.desk.eta_s(waiting) == pytest.approx(4 + 4 * 7)


@pytest.mark.parametrize(("patience_s", "least_s", "most_s"), [(5, 27, 40), (60, 0, 20)])
def test_nobody_is_told_to_come_back_and_wait_in_vain_again(patience_s: int, least_s: int, most_s: int) -> None:
    """There is a place in the queue, but who takes it now waits 32 s for its start."""
    scene = Scene()
    for number in range(5):
        scene.submit(Told())
        if number == 0:
            scene.turn()
    (handle,) = scene.core.take(0)
    for second in range(1, 4):
        scene.core.emit(handle, b"x")
        scene.turn(second * S)
    request = a_refused()
    request.arrival_ns, request.expire_ns = 3 * S, (3 + patience_s) * S
    told_s = scene.desk.retry_after_s(request)
    assert least_s <= told_s <= most_s


def test_what_was_foretold_is_held_against_what_came() -> None:
    scene = Scene()
    first, second = scene.submit(Told()), Told()
    scene.turn()
    (handle,) = scene.core.take(0)
    for moment in (1, 2):
        scene.core.emit(handle, b"x")
        scene.turn(moment * S)
    waiting = scene.enter()
    waiting.arrival_ns = 2 * S
    scene.desk.submit(waiting, Work(), second, model=0)
    scene.core.finish(handle, num_completion_tokens=7, first_token_ns=1 * S, finished_ns=7 * S)
    scene.turn(7 * S)
    scene.turn(7 * S)
    # Five tokens were to come, a second each; and so it was.
    assert ("foretold", 5 * S, 5 * S) in scene.seen.events
    assert first.state is RequestState.FINISHED


def test_everything_is_cancelled_with_a_reason_at_the_end_of_a_drain() -> None:
    scene, running, waiting = Scene(), Told(), Told()
    first = scene.submit(running)
    scene.turn()
    second = scene.submit(waiting)
    scene.turn()
    (handle,) = scene.core.take(0)
    scene.desk.cancel_all("draining")
    assert scene.core.is_cancelled(handle)
    scene.core.finish(handle, FINISH_CANCELLED)
    scene.turn()
    assert first.reason == second.reason == "draining"
    assert waiting.events == [("ended", "cancelled"), "settled"]
    assert running.events[-2:] == [("finished", FINISH_CANCELLED), "settled"]


def test_idle_is_when_nobody_is_inside() -> None:
    async def wait() -> None:
        scene = Scene()
        assert await scene.desk.wait_idle(0)
        entering = scene.enter()
        request = scene.submit(Told())
        assert not await scene.desk.wait_idle(0)
        scene.desk.leave(entering)
        assert not await scene.desk.wait_idle(0)
        scene.desk.cancel(request)
        scene.turn()
        assert await scene.desk.wait_idle(0)

    asyncio.run(wait())


def test_events_wake_the_loop() -> None:
    class Heard(Told):
        def started(self, queue_ns: int) -> None:
            heard.set()

    heard = asyncio.Event()

    async def hear() -> None:
        scene = Scene()
        scene.desk.start(asyncio.get_running_loop())
        scene.submit(Heard())
        scene.core.round(1)
        scene.core.end_step()
        await asyncio.wait_for(heard.wait(), 10)
        assert scene.desk.close(0)
        assert scene.desk.close(0)

    asyncio.run(hear())


class Thread:
    """A scheduler's thread that does nothing until it is stopped, if it can be."""

    def __init__(self, *, can_stop: bool) -> None:
        import threading

        self.can_stop = can_stop
        self.ended = threading.Event()

    def run(self) -> None:
        self.ended.wait(10)

    def stop(self) -> None:
        if self.can_stop:
            self.ended.set()


@pytest.mark.parametrize("can_stop", [True, False])
def test_a_thread_that_does_not_end_is_reported(can_stop: bool) -> None:
    async def life() -> bool:
        body = Thread(can_stop=can_stop)
        scene = Scene(body=body)
        scene.desk.start(asyncio.get_running_loop())
        has_ended = scene.desk.close(0.05 if not can_stop else 5)
        body.ended.set()
        return has_ended

    assert asyncio.run(life()) is can_stop
