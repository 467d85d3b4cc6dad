"""The status line of a stream, and what is said before its answer begins.

It is held back while the request waits, so that a refusal is still a status. A request that waits for its model to be
loaded is not known to the scheduler yet; its stream opens after `queue.hold_s` all the same:

    answers     admit ------------- waits for its model ------------------> begins, goes on with the stream as it is
    tells                                hold_s is over: status line, `: queue position=2`, once a second
                                                                           or is refused: an error is the last event
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from lqs.api.watch import ClientWatch
from lqs.streaming.sse import waiting_comment

COMMENT_EVERY_S = 1.0
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Head:
    """Opens a stream, once.

    `headers` are what is known of the request's way, `place` its place among those that wait for its model, None
    where it waits for none.

    Owner: the task that answers.
    """

    def __init__(
        self,
        watch: ClientWatch,
        hold_s: float,
        headers: Callable[[], Sequence[tuple[bytes, bytes]]],
        place: Callable[[], int | None],
    ) -> None:
        self._watch = watch
        self._headers = headers
        self._place = place
        self._loop = asyncio.get_running_loop()
        self._due_s = self._loop.time() + hold_s
        self._timer = self._loop.call_later(hold_s, self._look)
        self._is_admitted = asyncio.Event()
        self._telling: asyncio.Task[None] | None = None
        self.is_open = False

    @property
    def hold_left_s(self) -> float:
        """Seconds for which the status is still held back."""
        return max(self._due_s - self._loop.time(), 0.0)

    async def open(self) -> None:
        """Send the status line."""
        self.is_open = True
        headers = [*_STREAM_HEADERS, *self._headers()]
        await self._watch.send({"type": "http.response.start", "status": 200, "headers": headers})

    async def comment(self, position: int | None, eta_s: float | None) -> None:
        """Say how far the request is."""
        body = waiting_comment(position, eta_s)
        await self._watch.send({"type": "http.response.body", "body": body, "more_body": True})

    async def admitted(self) -> None:
        """It has its model: from now on whoever answers says how far it is."""
        self._timer.cancel()
        self._is_admitted.set()
        if self._telling is not None:
            await self._telling

    async def close(self) -> None:
        """Say nothing more, however it came to its end."""
        self._timer.cancel()
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.wait([self._telling])

    def _look(self) -> None:
        """The time is over; what it waits for but its model does not take long, or is told by whoever answers."""
        if self._place() is None:
            self._timer = self._loop.call_later(COMMENT_EVERY_S, self._look)
        else:
            self._telling = self._loop.create_task(self._tell())

    async def _tell(self) -> None:
        await self.open()
        while not self._is_admitted.is_set():
            await self.comment(self._place(), None)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_admitted.wait(), COMMENT_EVERY_S)
