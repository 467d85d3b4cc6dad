"""Hands admitted requests to the scheduler and brings their events back to them.

The scheduler is native and has its own thread. The desk is its only counterpart in the event loop:
it submits, cancels and asks; and when the scheduler's or a worker's event arrives, it finds the
request that it is about. A request is known to the core as a `Ticket`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lqs._core import (
    EV_ANSWERED,
    EV_FINISHED,
    EV_OUTPUT,
    EV_SETTLED,
    EV_STARTED,
    Door,
    Scheduler,
    TableFull,
    Work,
)
from lqs.config import Config
from lqs.errors import RequestRefused
from lqs.request import Outcome, Request, RequestState, Sink
from lqs.scheduling.entrance import Entrance, NoPlace, OnChange
from lqs.scheduling.outlook import Outlook
from lqs.scheduling.pace import Pace
from lqs.scheduling.ports import ENDED, REASONS, Body, Observer
from lqs.scheduling.prefixes import Prefixes


@dataclass(slots=True, eq=False)
class Ticket:
    """A request at the desk, with the sink that wants its events."""

    request: Request
    sink: Sink
    pace: Pace
    expected_ns: int | None = None  # From arrival to start, as it looked when it came to wait.
    has_started: bool = False


class Desk:
    """The event loop's end of the scheduler, and of the door before it.

    `body` is what the scheduler's thread does; tests leave it out and drive the scheduler
    themselves. `on_door` hears of the door's warning and breakers, see `Entrance`.

    Owner: the event loop.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        observer: Observer,
        *,
        door: Door,
        outlook: Outlook,
        body: Body | None = None,
        prefixes: Prefixes | None = None,
        on_door: OnChange = lambda what, level, state: None,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.scheduler = scheduler
        self.outlook = outlook
        self.entrance = Entrance(scheduler, door, outlook, on_change=on_door, now_ns=now_ns)
        self._observer = observer
        self._body = body
        self._prefixes = prefixes or Prefixes(scheduler.slots)
        self._over: Callable[[Request, Outcome | None], None] = lambda request, outcome: None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._live: set[Ticket] = set()
        self._paces: defaultdict[int, Pace] = defaultdict(Pace)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Listen for events, and start the scheduler's thread. Device slots are added before."""
        self._loop = loop
        loop.add_reader(self.scheduler.loop_fd, self.drain_events)
        # Nobody writes to the descriptor before it was polled once.
        self.drain_events()
        if self._body is not None:
            self._thread = threading.Thread(target=self._body.run, name="lqs-scheduler", daemon=True)
            self._thread.start()

    def when_over(self, settle: Callable[[Request, Outcome | None], None]) -> None:
        """Have `settle` called once for each submitted request: with its outcome, or None if it never ran."""
        self._over = settle

    def close(self, limit_s: float) -> bool:
        """End the thread and listen no more; False if it did not end within the limit."""
        if self._loop is not None:
            self._loop.remove_reader(self.scheduler.loop_fd)
            self._loop = None
        if self._body is None or self._thread is None:
            return True
        self._body.stop()
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    async def enter(self, request: Request, now_ns: int) -> NoPlace | None:
        """Take a place for the request, waiting for it if it may; why not, if there is none."""
        return await self.entrance.enter(request, now_ns)

    def leave(self, request: Request) -> None:
        """Give back a place that was taken and not used."""
        if request.holds_permit:
            request.holds_permit = False
            self.entrance.leave(request)

    def abandon(self, request: Request) -> None:
        """The client left before its request was submitted."""
        self.leave(request)
        request.state = RequestState.CANCELLED
        self._observer.ended(request, "cancelled")

    def submit(self, request: Request, work: Work, sink: Sink, *, model: int) -> None:
        """Hand the request, with its place, to the scheduler. Raises RequestRefused."""
        ticket = Ticket(request, sink, self.pace(model))
        # From here on the place is the core's, also if it has no room in its table.
        request.holds_permit = False
        try:
            request.handle = self.scheduler.submit(
                work,
                ticket,
                key=request.tenant.key_index,
                model=model,
                level=request.level,
                lane=request.lane,
                arrival_ns=request.arrival_ns + request.model_wait_ns,
                expire_ns=request.expire_ns,
                stop_ns=request.stop_ns,
                deadline_ns=request.deadline_ns,
                num_prompt_tokens=request.num_prompt_tokens,
                max_tokens=request.max_tokens_granted,
                footprint_tokens=request.footprint_tokens,
                prefixes=self._prefixes.find(request, model),
            )
        except IndexError:
            # A key or a lane that the core has no room for: nothing of it may stay behind.
            self.entrance.lose(request)
            raise
        except TableFull:
            self.entrance.lose(request)
            request.state, request.reason = RequestState.REFUSED, "queue_full"
            wait_s = self.retry_after_s(request)
            message = "The server holds as many requests as it can."
            raise RequestRefused("queue_full", message, retry_after_s=wait_s) from None
        self.entrance.submit(request)
        request.model_index = model
        ticket.expected_ns = self.outlook.submitted(request)
        self._live.add(ticket)

    def cancel(self, request: Request) -> None:
        """Ask for the request to end, wherever it is; its sink hears of it. May be repeated."""
        if request.handle is not None:
            self.scheduler.cancel(request.handle)

    def pause(self, request: Request) -> None:
        """Leave its text with its worker, which pauses it when its buffer is full, until `resume` or `cancel`."""
        if request.handle is not None:
            self.scheduler.hold(request.handle)

    def resume(self, request: Request) -> None:
        """Let its text come again, what was held back first."""
        if request.handle is not None:
            self.scheduler.resume(request.handle)

    def cancel_all(self, reason: str, *, waiting_for: int | None = None) -> None:
        """Cancel everything that is left, or only who waits for a model; `reason` is what each is told."""
        for ticket in self._live:
            if waiting_for is None or (ticket.request.model_index == waiting_for and self._waits(ticket)):
                ticket.request.reason = reason
                self.cancel(ticket.request)

    async def wait_idle(self, limit_s: float) -> bool:
        """Wait until no request is left; False if some still were after the limit."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.entrance.wait_idle(), limit_s)
        return self.num_inside == 0

    def reload(self, config: Config) -> None:
        """Take over new bounds and rules of the queue."""
        self.entrance.reload(config)

    @property
    def num_inside(self) -> int:
        """Requests with a place, whatever their state."""
        return self.entrance.num_inside

    def pace(self, model: int) -> Pace:
        """How fast the model of that number has been of late."""
        return self._paces[model]

    def expected_completion(self, request: Request, model: int) -> int:
        """Tokens that its answer is taken to have: what it may have, unless it did not say or that is far off."""
        return self.scheduler.expected_completion(
            request.tenant.key_index, model, request.max_tokens or 0, request.max_tokens_granted
        )

    @property
    def border_tokens(self) -> int:
        """Up to that a request counts as short just now."""
        return self.scheduler.border_tokens

    def position(self, request: Request) -> int | None:
        """Its place in its lane, from 1, estimated; None when it does not wait."""
        return None if request.handle is None else self.scheduler.position(request.handle)

    def eta_s(self, request: Request) -> float | None:
        """Seconds until it starts, estimated; None when it does not wait or nothing is known."""
        position = self.position(request)
        return None if position is None else self.outlook.eta_s(request, position)

    def service_s(self, request: Request) -> float:
        """Seconds that it will run, as the latest did on the mean; 0 if nothing is known yet."""
        return max((pace.mean_service_s for pace in self._paces.values()), default=0.0)

    def retry_after_s(self, request: Request, not_before_ns: int = 0) -> float:
        """Seconds until there is a place for the request, who was refused; it is promised that place."""
        num_free = self.entrance.num_free(request.level)
        return self.outlook.retry_after_s(request, num_free=num_free, not_before_ns=not_before_ns)

    def drain_events(self) -> None:
        """Give every event that is there to the request it is about.

        A receiver that fails loses its event and no other: the rest still get theirs, and what the
        request held is still given back.
        """
        for kind, ticket, *rest in self.scheduler.poll():
            if kind == EV_ANSWERED:
                self.entrance.answered(*rest)
                continue
            try:
                self._deliver(kind, ticket, rest)
            except Exception as error:
                self._observer.event_lost(ticket.request, error)
        self.entrance.tend()

    def _waits(self, ticket: Ticket) -> bool:
        """Whether it waits for a device slot: its first, or another one as its own has died."""
        return not ticket.has_started or self.scheduler.is_lost(ticket.request.handle or 0)

    def _deliver(self, kind: int, ticket: Ticket, rest: list[Any]) -> None:
        request, sink = ticket.request, ticket.sink
        if kind == EV_OUTPUT:
            self.outlook.output(request, rest[1])
            self._observer.output(request, rest[1])
            sink.output(*rest)
        elif kind == EV_STARTED:
            queue_ns = rest[0] + request.model_wait_ns
            self._start(ticket, queue_ns)
            sink.started(queue_ns)
        elif kind == EV_FINISHED:
            request.state = RequestState.FINISHED
            ticket.pace.note(request, rest[0])
            self.outlook.finished(request, rest[0])
            self._prefixes.note(request, rest[0])
            self._over(request, rest[0])
            self._observer.finished(request, rest[0])
            sink.finished(rest[0])
        elif kind == EV_SETTLED:
            self._settle(ticket)
        else:
            self._end(ticket, ENDED[kind])

    def _start(self, ticket: Ticket, queue_ns: int) -> None:
        """It left the queue for a device slot."""
        request = ticket.request
        request.state, ticket.has_started = RequestState.RUNNING, True
        self.entrance.start(request)
        self.outlook.started(request, queue_ns)
        self._observer.started(request, queue_ns)
        if ticket.expected_ns is not None:
            self._observer.foretold(ticket.expected_ns, queue_ns)

    def _end(self, ticket: Ticket, reason: str) -> None:
        """It left the queue and never ran."""
        request = ticket.request
        is_cancelled = reason == "cancelled"
        request.reason = request.reason or REASONS.get(reason)
        request.state = RequestState.CANCELLED if is_cancelled else RequestState.REFUSED
        self._over(request, None)
        self.outlook.ended(request)
        self._observer.ended(request, reason)
        ticket.sink.ended(reason)

    def _settle(self, ticket: Ticket) -> None:
        self._live.discard(ticket)
        self.entrance.settle(ticket.request, has_run=ticket.has_started)
        ticket.request.handle = None
        ticket.sink.settled()
