"""Hands admitted requests to the scheduler and brings their events back to them.

The scheduler is native and has its own thread. The desk is its only counterpart in the event loop:
it submits, cancels and asks; and when the scheduler's or a worker's event arrives, it finds the
request that it is about. A request is known to the core as a `Ticket`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lqs._core import (
    EV_CANCELLED,
    EV_EXPIRED,
    EV_FINISHED,
    EV_NO_DEVICE,
    EV_OUTPUT,
    EV_SETTLED,
    EV_STARTED,
    Scheduler,
    TableFull,
    Work,
)
from lqs.errors import RequestRefused
from lqs.request import Outcome, Request, RequestState, Sink
from lqs.scheduling.outlook import Outlook
from lqs.scheduling.places import Places, living_seats

_ENDED = {EV_EXPIRED: "expired", EV_CANCELLED: "cancelled", EV_NO_DEVICE: "no_device"}
# What a client is told of those that it did not ask for.
_REASONS = {"expired": "queue_timeout", "no_device": "no_device"}


class Observer(Protocol):
    """Who counts what happens; all calls come from the event loop."""

    def started(self, request: Request, queue_ns: int) -> None: ...
    def foretold(self, expected_ns: int, queue_ns: int) -> None: ...
    def output(self, request: Request, num_tokens: int) -> None: ...
    def finished(self, request: Request, outcome: Outcome) -> None: ...
    def ended(self, request: Request, reason: str) -> None: ...
    def event_lost(self, request: Request, error: Exception) -> None: ...


class Body(Protocol):
    """The body of the scheduler's thread: `run` returns after `stop`."""

    def run(self) -> None: ...
    def stop(self) -> None: ...


@dataclass(slots=True, eq=False)
class Ticket:
    """A request at the desk, with the sink that wants its events."""

    request: Request
    sink: Sink
    expected_ns: int | None = None  # From arrival to start, as it looked when it came to wait.
    has_started: bool = False


class Desk:
    """The event loop's end of the scheduler.

    `body` is what the scheduler's thread does; tests leave it out and drive the scheduler
    themselves.

    Owner: the event loop.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        observer: Observer,
        *,
        level_caps: Sequence[int],
        total_cap: int,
        outlook: Outlook,
        body: Body | None = None,
    ) -> None:
        self.scheduler = scheduler
        self._observer = observer
        self._body = body
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.outlook = outlook
        self._places = Places(level_caps, total_cap, lambda: living_seats(scheduler.snapshot()))
        self._live: set[Ticket] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Listen for events, and start the scheduler's thread. Device slots are added before."""
        self._loop = loop
        loop.add_reader(self.scheduler.loop_fd, self.drain_events)
        # Nobody writes to the descriptor before it was polled once.
        self.drain_events()
        if self._body is not None:
            self._thread = threading.Thread(target=self._body.run, name="lqs-scheduler", daemon=True)
            self._thread.start()

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

    def try_enter(self, request: Request) -> bool:
        """Take a place in the request's class, if there is one or it can start at once.

        Who was promised a place and comes for it may have those that are held against newcomers.
        """
        has_room = self._places.has_room(request.level, self.outlook.num_held(request))
        if not has_room or not self.scheduler.try_enter(request.level):
            return False
        self.outlook.entered(request)
        request.holds_permit = True
        self._places.enter(request.level)
        self._idle.clear()
        return True

    def leave(self, request: Request) -> None:
        """Give back a place that was taken and not used."""
        if request.holds_permit:
            request.holds_permit = False
            self._places.leave(request.level)
            self.outlook.left(request)
            self.scheduler.leave(request.level)
            self._check_idle()

    def abandon(self, request: Request) -> None:
        """The client left before its request was submitted."""
        self.leave(request)
        request.state = RequestState.CANCELLED
        self._observer.ended(request, "cancelled")

    def submit(self, request: Request, work: Work, sink: Sink, *, model: int) -> None:
        """Hand the request, with its place, to the scheduler. Raises RequestRefused."""
        ticket = Ticket(request, sink)
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
                arrival_ns=request.arrival_ns,
                expire_ns=request.expire_ns,
                stop_ns=request.stop_ns,
                deadline_ns=request.deadline_ns,
                num_prompt_tokens=request.num_prompt_tokens,
                max_tokens=request.max_tokens_granted,
                footprint_tokens=request.footprint_tokens,
            )
        except TableFull:
            self._places.leave(request.level)
            self._check_idle()
            request.state, request.reason = RequestState.REFUSED, "queue_full"
            wait_s = self.retry_after_s(request)
            message = "The server holds as many requests as it can."
            raise RequestRefused("queue_full", message, retry_after_s=wait_s) from None
        self._places.submit(request)
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

    def cancel_all(self, reason: str) -> None:
        """Cancel everything that is left; `reason` is what each is told."""
        for ticket in self._live:
            ticket.request.reason = reason
            self.cancel(ticket.request)

    async def wait_idle(self, limit_s: float) -> bool:
        """Wait until no request is left; False if some still were after the limit."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), limit_s)
        return self.num_inside == 0

    @property
    def num_inside(self) -> int:
        """Requests with a place, whatever their state."""
        return self._places.num_inside

    def position(self, request: Request) -> int | None:
        """Its place in its lane, from 1, estimated; None when it does not wait."""
        return None if request.handle is None else self.scheduler.position(request.handle)

    def eta_s(self, request: Request) -> float | None:
        """Seconds until it starts, estimated; None when it does not wait or nothing is known."""
        position = self.position(request)
        return None if position is None else self.outlook.eta_s(request, position)

    def retry_after_s(self, request: Request) -> float:
        """Seconds until there is a place for the request, who was refused; it is promised that place."""
        return self.outlook.retry_after_s(request, num_free=max(self._places.num_free(request.level), 0))

    def drain_events(self) -> None:
        """Give every event that is there to the request it is about.

        A receiver that fails loses its event and no other: the rest still get theirs, and what the
        request held is still given back.
        """
        for kind, ticket, *rest in self.scheduler.poll():
            try:
                self._deliver(kind, ticket, rest)
            except Exception as error:
                self._observer.event_lost(ticket.request, error)

    def _deliver(self, kind: int, ticket: Ticket, rest: list[Any]) -> None:
        request, sink = ticket.request, ticket.sink
        if kind == EV_OUTPUT:
            self.outlook.output(request, rest[1])
            self._observer.output(request, rest[1])
            sink.output(*rest)
        elif kind == EV_STARTED:
            self._start(ticket, rest[0])
            sink.started(rest[0])
        elif kind == EV_FINISHED:
            request.state = RequestState.FINISHED
            self.outlook.finished(request, rest[0])
            self._observer.finished(request, rest[0])
            sink.finished(rest[0])
        elif kind == EV_SETTLED:
            self._settle(ticket)
        else:
            self._end(ticket, _ENDED[kind])

    def _start(self, ticket: Ticket, queue_ns: int) -> None:
        """It left the queue for a device slot."""
        request = ticket.request
        request.state = RequestState.RUNNING
        ticket.has_started = True
        self._places.start(request.level)
        self.outlook.started(request, queue_ns)
        self._observer.started(request, queue_ns)
        if ticket.expected_ns is not None:
            self._observer.foretold(ticket.expected_ns, queue_ns)

    def _end(self, ticket: Ticket, reason: str) -> None:
        """It left the queue and never ran."""
        request = ticket.request
        is_cancelled = reason == "cancelled"
        request.reason = request.reason or _REASONS.get(reason)
        request.state = RequestState.CANCELLED if is_cancelled else RequestState.REFUSED
        self.outlook.ended(request)
        self._observer.ended(request, reason)
        ticket.sink.ended(reason)

    def _settle(self, ticket: Ticket) -> None:
        self._live.discard(ticket)
        self._places.settle(ticket.request, has_run=ticket.has_started)
        ticket.request.handle = None
        self._check_idle()
        ticket.sink.settled()

    def _check_idle(self) -> None:
        if self.num_inside == 0:
            self._idle.set()
