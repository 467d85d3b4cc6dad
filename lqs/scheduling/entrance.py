"""The event loop's side of the door: the clock, and the coroutines of those who wait at it.

Who may come in is decided by the core's `Door`. An arrival that has to wait, for a place or for
the scheduler to evict another, is a guest: a coroutine with a future that is resolved when there is
a place, or when its time is over. A guest that is cancelled leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lqs._core import Door, DoorSays, Scheduler
from lqs.config import Config
from lqs.request import NS_PER_S, Request
from lqs.scheduling.core import set_rules
from lqs.scheduling.outlook import Outlook

OnChange = Callable[[str, int | None, int], None]


class NoPlace(NamedTuple):
    """Why a request does not come in, as a refusal's code; and the time before which it will not, if there is one."""

    reason: str
    again_ns: int = 0


class _Guest(NamedTuple):
    """A request at the door, and what its coroutine waits for: None once it is in, else why not."""

    request: Request
    number: int
    told: asyncio.Future[NoPlace | None]


class Entrance:
    """Lets requests in, or has them wait at the door, by the rules of `door`.

    `on_change` hears of ("warning", class or None for all, whether it is up) and ("breaker", class, state).
    `outlook` knows who was promised a place. Bounds: the door's.

    Owner: the event loop.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        door: Door,
        outlook: Outlook,
        *,
        on_change: OnChange = lambda what, level, state: None,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._scheduler = scheduler
        self._door = door
        self._outlook = outlook
        self._on_change = on_change
        self._now_ns = now_ns
        self._guests: dict[int, _Guest] = {}
        self._num_guests_ever = 0
        self._timer: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    # At the door.

    async def enter(self, request: Request, now_ns: int) -> NoPlace | None:
        """Take a place in the request's class, or in one that it is demoted to; if there is none, why.

        Waits for a place if its class may, and while another is made to leave for it.
        """
        self.tend(now_ns)
        self._num_guests_ever += 1
        user = self._num_guests_ever
        num_held, is_promised = self._outlook.claim(request)
        says, level, guest, at_ns = self._door.enter(
            request.level,
            now_ns,
            expire_ns=request.expire_ns,
            user=user,
            num_held=num_held,
            is_promised=is_promised,
        )
        if says == DoorSays.DOOR_IN:
            self._let_in(request, level)
        self._tell_changes()
        if says == DoorSays.DOOR_IN:
            return None
        if guest is None:
            return NoPlace("breaker_open", at_ns) if says == DoorSays.DOOR_BROKEN else NoPlace("queue_full")
        if says == DoorSays.DOOR_EVICT:
            self._evict_for(level)
        return await self._wait(user, request, guest)

    async def _wait(self, user: int, request: Request, number: int) -> NoPlace | None:
        told: asyncio.Future[NoPlace | None] = asyncio.get_running_loop().create_future()
        self._guests[user] = _Guest(request, number, told)
        self._set_timer()
        try:
            return await told
        finally:
            # It is still there only if it was cancelled before anything was known. If it got a place
            # in the same moment, the request holds it and the caller gives it back.
            if self._guests.pop(user, None) is not None:
                self._door.give_up(number)

    def answered(self, was_evicted: bool) -> None:
        """The scheduler has answered the first eviction that was asked for; the one that left is settled."""
        says, user, _ = self._door.answer(was_evicted, self._now_ns())
        if says in (DoorSays.DOOR_IN, DoorSays.DOOR_FULL):
            self._tell(says, user)

    def tend(self, now_ns: int | None = None) -> None:
        """After anything that may have made room, and when a wait is over: tell the guests."""
        self._door.look(self._scheduler)
        if self._guests:
            for says, user, level in self._door.tend(self._now_ns() if now_ns is None else now_ns):
                if says == DoorSays.DOOR_EVICT:
                    self._evict_for(level)
                else:
                    self._tell(says, user)
            self._set_timer()
        self._tell_changes()

    def dismiss(self, reason: str) -> None:
        """Send away everybody who is not in yet."""
        for guest in self._guests.values():
            self._door.give_up(guest.number)
            if not guest.told.done():
                guest.told.set_result(NoPlace(reason))
        self._guests.clear()

    # Inside.

    def leave(self, request: Request) -> None:
        """It is gone before it was submitted, and so is its place."""
        self._scheduler.leave(request.level)
        self.lose(request)

    def lose(self, request: Request) -> None:
        """As `leave`, where the core has taken the permit back already."""
        self._door.leave(request.level)
        self._outlook.left(request)
        self._made_room()
        self.tend()

    def submit(self, request: Request) -> None:
        """It is in the core's hands."""
        self._door.submit(request.level, request.kv_tokens_counted)
        if self._guests:
            # Now it can be made to leave.
            self.tend()

    def start(self, request: Request) -> None:
        """It got a sequence. The caller tends when it has told all that happened."""
        self._door.start(request.level)

    def settle(self, request: Request, *, has_run: bool) -> None:
        """It is gone after it was submitted. The caller tends when it has told all that happened."""
        self._door.settle(request.level, request.kv_tokens_counted, has_run=has_run)
        self._made_room()

    def num_free(self, level: int) -> int:
        """Places to wait that are free for a class."""
        return self._door.num_free(level)

    @property
    def num_inside(self) -> int:
        """Requests with a place, whatever their state."""
        return self._door.num_inside

    async def wait_idle(self) -> None:
        """Wait until nobody is inside."""
        await self._idle.wait()

    # How it stands.

    def load(self) -> float:
        """How much is taken of the running KV or of the queue, whichever is more; 1 is all."""
        self._door.look(self._scheduler)
        return self._door.load

    def figures(self) -> Mapping[str, Any]:
        """What the door counts."""
        self._door.look(self._scheduler)
        return self._door.figures(self._now_ns())

    def reload(self, config: Config) -> None:
        """Take over new rules; who is in, or waits, stays."""
        set_rules(self._door, config)
        self._outlook.reload(config.level_caps)
        self.tend()

    def trip(self, num_classes: int) -> None:
        """Close the entry for so many of the lowest classes, as an overload would; never for the best."""
        self._door.trip(num_classes, self._now_ns())
        self._tell_changes()

    # Its own.

    def _let_in(self, request: Request, level: int) -> None:
        self._outlook.entered(request)
        request.is_clamped |= level != request.level
        request.level = level
        request.holds_permit = True
        self._idle.clear()
        has_permit = self._scheduler.try_enter(level)
        # The core counts the same requests, and hears sooner of those that leave.
        assert has_permit

    def _evict_for(self, level: int) -> None:
        is_asked = self._scheduler.evict(level)
        # The door asks for no more than the scheduler takes.
        assert is_asked

    def _tell(self, says: int, user: int) -> None:
        """What became of a guest."""
        request, _, told = self._guests.pop(user)
        no_place = None
        if says == DoorSays.DOOR_IN:
            self._let_in(request, request.level)
        else:
            is_late = 0 < request.expire_ns <= self._now_ns()
            no_place = NoPlace("queue_timeout" if is_late else "queue_full")
        if not told.done():
            told.set_result(no_place)

    def _made_room(self) -> None:
        if self._door.num_inside == 0:
            self._idle.set()

    def _tell_changes(self) -> None:
        for change in self._door.changes():
            self._on_change(*change)

    def _set_timer(self) -> None:
        """Come back when the next wait is over."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._guests and self._door.due_ns is not None:
            left_s = max(self._door.due_ns - self._now_ns(), 0) / NS_PER_S
            self._timer = asyncio.get_running_loop().call_later(left_s, self.tend)
