"""The models that requests hold, from the moment they are let in until they are over."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import defaultdict
from typing import TYPE_CHECKING

from lqs.errors import RequestRefused
from lqs.request import NS_PER_S, Request, RequestState

if TYPE_CHECKING:
    from lqs.admission.fleet import Fleet
    from lqs.engine.served import Served


class Line:
    """Who waits for one model, in order. A place costs little however many wait: it is asked for again and again."""

    def __init__(self) -> None:
        self._tickets: list[int] = []  # Ascending.
        self._num_gone = 0  # Of those, from the beginning on, that have left already.
        self._next = 0

    def join(self) -> int:
        """A ticket, of the last place."""
        self._next += 1
        self._tickets.append(self._next)
        return self._next

    def leave(self, ticket: int) -> None:
        """Its place is free. Those at the head, who leave when the model comes, move nobody."""
        index = bisect_left(self._tickets, ticket, self._num_gone)
        if index > self._num_gone:
            del self._tickets[index]
            return
        self._num_gone += 1
        if 2 * self._num_gone >= len(self._tickets):
            del self._tickets[: self._num_gone]
            self._num_gone = 0

    def place(self, ticket: int) -> int:
        """Its place now, from 1."""
        return bisect_left(self._tickets, ticket, self._num_gone) - self._num_gone + 1


class Holds:
    """Takes and gives back. Without a fleet every model is there for good.

    Owner: the event loop.
    """

    def __init__(self, fleet: Fleet | None) -> None:
        self._fleet = fleet
        self._lines: defaultdict[int, Line] = defaultdict(Line)  # By the model's number.
        self._waiting: dict[int, tuple[Line, int]] = {}  # By the request's id: where it stands, with which ticket.

    def position(self, request: Request) -> int | None:
        """Its place, from 1, among those that wait for the same model; None when it does not."""
        if (stands := self._waiting.get(id(request))) is None:
            return None
        line, ticket = stands
        return line.place(ticket)

    async def take(self, request: Request, served: Served) -> None:
        """Hold a model for the request. One that comes on demand is waited for: that is time in the queue.

        Raises RequestRefused.
        """
        if self._fleet is None:
            return
        if self._fleet.try_have(served):
            request.models_held = (*request.models_held, served.index)
            return
        line, began_ns = self._lines[served.index], time.monotonic_ns()
        ticket = line.join()
        # The caller has the request until then, so its id is nobody else's.
        self._waiting[id(request)] = (line, ticket)
        try:
            await self._wait(request, served)
        finally:
            del self._waiting[id(request)]
            line.leave(ticket)
        request.model_wait_ns += time.monotonic_ns() - began_ns
        request.models_held = (*request.models_held, served.index)

    async def _wait(self, request: Request, served: Served) -> None:
        """Wait for the model, and hold it. Raises RequestRefused."""
        assert self._fleet is not None
        left_s = (request.expire_ns - time.monotonic_ns()) / NS_PER_S
        try:
            async with asyncio.timeout(left_s):
                await self._fleet.have(served)
        except TimeoutError:
            wait_s = served.load_time_left_s(time.monotonic_ns())
            message = "Its model was not loaded in time; nothing was computed."
            request.state, request.reason = RequestState.REFUSED, "queue_timeout"
            raise RequestRefused("queue_timeout", message, retry_after_s=wait_s) from None
        except RequestRefused as refused:
            request.state, request.reason = RequestState.REFUSED, refused.reason
            raise

    def give_back(self, request: Request) -> None:
        """All that it held. May be called again."""
        held, request.models_held = request.models_held, ()
        for index in held:
            assert self._fleet is not None
            self._fleet.release(index)
