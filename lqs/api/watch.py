"""Notices that a client has left or reads no more, while its answer is being made.

One task per request waits for `http.disconnect`; another coroutine, the one that answers, is interrupted
when it comes, whatever it waits for: the pool, the queue, the first token, the next one or the socket.
"""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class ClientLeft(Exception):
    """Nobody is there to answer any more."""


class ClientLeftEarly(ClientLeft):
    """It left before its request was known, so nobody else counts it."""


class ClientWatch:
    """An async context around the making of one answer; the body has been read before.

    Left by the exception that `interrupt` was given, if it was called. `stall_s` is how long one
    send may take.

    Owner: the task that entered it.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, stall_s: float) -> None:
        self._abort = scope.get("extensions", {}).get("lqs.abort")
        self._receive = receive
        self._send = send
        self._stall_s = stall_s
        self._sending_since_s: float | None = None
        self._error: Exception | None = None

    async def __aenter__(self) -> ClientWatch:
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._listener = self._loop.create_task(self._listen())
        self._timer = self._loop.call_later(self._stall_s / 4, self._check_stall)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        self._listener.cancel()
        if self._error is None:
            return
        if kind is not asyncio.CancelledError:
            # The answer came to its own end first; the cancellation is still on its way.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
        # Our own cancellation ends here; one from outside goes on.
        if self._task.uncancel() <= 0 and kind is asyncio.CancelledError:
            raise self._error from None

    def interrupt(self, error: Exception) -> None:
        """End the making of the answer by `error`. Only the first call counts."""
        if self._error is None:
            self._error = error
            self._task.cancel()

    async def send(self, message: Message) -> None:
        """Send, and be interrupted if the client does not take it in time."""
        self._sending_since_s = self._loop.time()
        await self._send(message)
        self._sending_since_s = None

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.interrupt(ClientLeft())

    def _check_stall(self) -> None:
        since_s = self._sending_since_s
        if since_s is not None and self._loop.time() - since_s > self._stall_s:
            # A close would wait for the client to read what is already on its way.
            if self._abort is not None:
                self._abort()
            self.interrupt(ClientLeft())
            return
        self._timer = self._loop.call_later(self._stall_s / 4, self._check_stall)


class Watched:
    """An endpoint that reads no body and may take its time; it ends when its client leaves. Raises ClientLeft."""

    def __init__(self, app: ASGIApp, stall_s: float) -> None:
        self._app = app
        self._stall_s = stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with ClientWatch(scope, receive, send, self._stall_s) as watch:
            await self._app(scope, receive, watch.send)
