"""A small HTTP/1.1 client for measuring: it notes when bytes came and reads them afterwards.

The client shares the machine's cores with the servers it measures, so while a run lasts it only
keeps each piece of a response with its time of arrival. `reply.read_reply` takes them apart when
the run is over.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from typing import Any

from bench.load.reply import HEAD_END, Exchange, Reply, read_reply

LAST_CHUNK = b"0\r\n\r\n"


class _Conversation(asyncio.Protocol):
    """One connection that carries one request. Owner: the event loop."""

    def __init__(self, payload: bytes, exchange: Exchange, done: asyncio.Future[None]) -> None:
        self._payload = payload
        self._exchange = exchange
        self._done = done
        self._transport: asyncio.Transport | None = None
        self._bytes_missing: int | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._payload)

    def data_received(self, data: bytes) -> None:
        pieces = self._exchange.pieces
        pieces.append((time.perf_counter(), data))
        if len(pieces) == 1:
            self._bytes_missing = body_bytes_missing(data)
        elif self._bytes_missing is not None:
            self._bytes_missing -= len(data)
        missing = self._bytes_missing
        if data.endswith(LAST_CHUNK) if missing is None else missing <= 0:
            self._finish(None)

    def connection_lost(self, exc: Exception | None) -> None:
        # A response may be delimited by the end of the connection; read_reply sees a cut one.
        failed = exc is not None or not self._exchange.pieces
        self._finish(f"connection lost: {exc or 'closed'}" if failed else None)

    def _finish(self, failure: str | None) -> None:
        if self._done.done():
            return
        self._exchange.end_s = time.perf_counter()
        self._exchange.failure = failure
        self._done.set_result(None)
        if self._transport is not None:
            self._transport.close()


def body_bytes_missing(first_piece: bytes) -> int | None:
    """Return how many bytes of a body of known length are still to come, or None.

    None means that the length is not known from the first piece: a chunked body, or a head that
    was cut; then the last chunk or the end of the connection says when it is over.
    """
    head, found, body = first_piece.partition(HEAD_END)
    if not found:
        return None
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value) - len(body)
    return None


class Client:
    """Sends requests to one server, each over a connection of its own.

    Owner: the event loop. The connection is part of what is measured, for every server alike.
    """

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port

    def payload(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        """Return the bytes of a request; made before a run, so that the run does not pay for it."""
        content = b"" if body is None else json.dumps(body).encode()
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        return head.encode() + content

    async def send(self, payload: bytes, timeout_s: float | None = None, exchange: Exchange | None = None) -> Exchange:
        """Send one request and wait for the whole response.

        Give an `exchange` to watch it while it is under way. A timeout or a cancellation closes
        the connection, as a client that leaves does. A timeout and a lost connection are told in
        `failure`; nothing is raised for them.
        """
        loop = asyncio.get_running_loop()
        exchange = exchange or Exchange(time.perf_counter())
        done: asyncio.Future[None] = loop.create_future()
        transport: asyncio.BaseTransport | None = None
        try:
            async with asyncio.timeout(timeout_s):
                transport, _ = await loop.create_connection(
                    lambda: _Conversation(payload, exchange, done), self.host, self.port
                )
                await done
        except TimeoutError:
            exchange.failure = "timeout"
        except OSError as error:
            exchange.failure = f"no connection: {error}"
        finally:
            if math.isnan(exchange.end_s):
                exchange.end_s = time.perf_counter()
            done.cancel()
            if isinstance(transport, asyncio.Transport):
                transport.abort()
        return exchange

    async def get(self, path: str, timeout_s: float = 5.0) -> Reply:
        """Get a path and return the reply with its body as text."""
        return read_reply(await self.send(self.payload("GET", path), timeout_s))
