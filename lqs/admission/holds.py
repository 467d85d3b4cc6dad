"""The models that requests hold, from the moment they are let in until they are over."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from typing import TYPE_CHECKING

from lqs.errors import RequestRefused
from lqs.request import NS_PER_S, Request, RequestState

if TYPE_CHECKING:
    from lqs.admission.fleet import Fleet
    from lqs.engine.served import Served


class Holds:
    """Takes and gives back. Without a fleet every model is there for good.

    Owner: the event loop.
    """

    def __init__(self, fleet: Fleet | None) -> None:
        self._fleet = fleet
        # Who waits, in order, by model and id.
        self._waiting: defaultdict[int, dict[int, Request]] = defaultdict(dict)

    def position(self, request: Request) -> int | None:
        """Its place, from 1, among those that wait for the same model; None when it does not."""
        for waiting in self._waiting.values():
            if id(request) in waiting:
                return list(waiting).index(id(request)) + 1
        return None

    async def take(self, request: Request, served: Served) -> None:
        """Hold a model for the request. One that comes on demand is waited for: that is time in the queue.

        Raises RequestRefused.
        """
        if self._fleet is None:
            return
        if self._fleet.try_have(served):
            request.models_held = (*request.models_held, served.index)
            return
        waiting, began_ns = self._waiting[served.index], time.monotonic_ns()
        waiting[id(request)] = request
        try:
            await self._wait(request, served)
        finally:
            del waiting[id(request)]
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
