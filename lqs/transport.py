"""A connection's transport that lingers where it must, and that gives up on readers who have stalled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class Transport:
    """A connection's transport with another way to close, and an end to what nobody reads.

    Aborted once its buffer holds something of which the client takes nothing for `stall_s`, closing
    or not: a close waits for the buffer, for ever if need be.
    """

    def __init__(
        self, wire: asyncio.Transport, close: Callable[[], None], loop: asyncio.AbstractEventLoop, stall_s: float
    ) -> None:
        self._wire = wire
        self._close = close
        self._is_closing = False
        self._loop = loop
        self._stall_s = stall_s
        self._timer: asyncio.TimerHandle | None = None
        self._num_written = self._num_taken = 0
        self._taken_at_s = 0.0

    def write(self, data: bytes) -> None:
        self._wire.write(data)
        self._num_written += len(data)
        if self._timer is None and (num_bytes := self._wire.get_write_buffer_size()):
            self._num_taken = self._num_written - num_bytes
            self._taken_at_s = self._loop.time()
            self._timer = self._loop.call_later(self._stall_s / 4, self._check_stall)

    def stop(self) -> None:
        """The connection is gone."""
        if self._timer is not None:
            self._timer.cancel()

    def _check_stall(self) -> None:
        self._timer = None
        num_bytes = self._wire.get_write_buffer_size()
        if not num_bytes:
            return
        now_s = self._loop.time()
        # Not the buffer alone: it may grow while the client reads.
        if self._num_written - num_bytes > self._num_taken:
            self._num_taken, self._taken_at_s = self._num_written - num_bytes, now_s
        elif now_s - self._taken_at_s >= self._stall_s:
            self._wire.abort()
            return
        self._timer = self._loop.call_later(self._stall_s / 4, self._check_stall)

    def close(self) -> None:
        self._is_closing = True
        self._close()

    def is_closing(self) -> bool:
        return self._is_closing or self._wire.is_closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wire, name)
