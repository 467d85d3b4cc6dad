"""One request's events, on their way from the desk to the coroutine that answers the client.

The desk calls in whenever something happens; the coroutine takes what has come together since it last
looked, so a slow client gets fewer and larger pieces and costs no more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import NamedTuple, Protocol

from lqs.request import Outcome, Request

PENDING_BYTES_MAX = 65_536


class Piece(NamedTuple):
    """Text that is new: whole characters, its number of tokens, and their logprob records."""

    text: bytes
    num_tokens: int
    logprobs: bytes


class Valve(Protocol):
    """Holds back a request's output at its source."""

    def pause(self, request: Request) -> None: ...
    def resume(self, request: Request) -> None: ...


class Outlet:
    """The sink of one request, read by one coroutine.

    With a `valve` no more than about `num_bytes_max` wait here: what comes after stays in the
    worker's own buffer and pauses its sequence. Without one the bound is the request's max_tokens.

    Owner: the event loop.
    """

    def __init__(self, request: Request, *, valve: Valve | None = None, num_bytes_max: int = PENDING_BYTES_MAX) -> None:
        self._request = request
        self._valve = valve
        self._num_bytes_max = num_bytes_max
        self._texts: list[bytes] = []
        self._logprobs: list[bytes] = []
        self._num_tokens = 0
        self._num_bytes = 0
        self._is_paused = False
        self._changed = asyncio.Event()
        self.queue_ns: int | None = None  # How long it waited; None before it starts.
        self.outcome: Outcome | None = None  # Set when it has run to an end.
        self.end_reason: str | None = None  # Set when it left the queue unserved.
        self.is_overdue = False  # Given up by who answers.
        self.is_settled = False

    @property
    def is_over(self) -> bool:
        """True once no more text can come."""
        return self.outcome is not None or self.end_reason is not None or self.is_overdue

    @property
    def has_begun(self) -> bool:
        """True once it is out of the queue, one way or the other."""
        return self.queue_ns is not None or self.is_over

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to take just now."""
        return not (self._num_tokens or self._num_bytes)

    # The desk's side.

    def started(self, queue_ns: int) -> None:
        self.queue_ns = queue_ns
        self._changed.set()

    def output(self, text: bytes, num_tokens: int, logprobs: bytes | None) -> None:
        if self.is_overdue:
            return
        self._texts.append(text)
        self._num_tokens += num_tokens
        self._num_bytes += len(text)
        if logprobs:
            self._logprobs.append(logprobs)
            self._num_bytes += len(logprobs)
        if self._valve is not None and not self._is_paused and self._num_bytes >= self._num_bytes_max:
            self._is_paused = True
            self._valve.pause(self._request)
        self._changed.set()

    def finished(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self._changed.set()

    def ended(self, reason: str) -> None:
        self.end_reason = reason
        self._changed.set()

    def settled(self) -> None:
        self.is_settled = True

    # The answering coroutine's side.

    def give_up(self) -> None:
        """Its time is over and nobody says so: what still comes is dropped."""
        if not self.is_over:
            self.is_overdue = True
            self._changed.set()

    async def wait_begun(self, limit_s: float | None = None) -> bool:
        """Wait until it is out of the queue; False if it still stands there after the limit."""
        try:
            async with asyncio.timeout(limit_s):
                while not self.has_begun:
                    await self._wait()
        except TimeoutError:
            return self.has_begun
        return True

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield the text as it comes, until the end; `outcome` or `end_reason` then says which."""
        while True:
            if not self.is_empty:
                yield self._take()
            elif self.is_over:
                return
            else:
                await self._wait()

    def _take(self) -> Piece:
        piece = Piece(b"".join(self._texts), self._num_tokens, b"".join(self._logprobs))
        self._texts.clear()
        self._logprobs.clear()
        self._num_tokens = self._num_bytes = 0
        if self._is_paused and self._valve is not None:
            self._is_paused = False
            self._valve.resume(self._request)
        return piece

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()
