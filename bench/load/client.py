"""A small HTTP/1.1 client for measuring: it notes when bytes came, and reads them afterwards.

The client shares the machine's cores with the servers it measures, so while a run lasts it only
keeps each piece of a response with its time of arrival. Chunked transfer, server-sent events and
JSON are taken apart by `read_reply` when the run is over.

Tokens are counted from the server's own `usage`, never from events: servers are free to put
several tokens into one event, or none.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from dataclasses import dataclass, field
from typing import Any

LAST_CHUNK = b"0\r\n\r\n"
HEAD_END = b"\r\n\r\n"


@dataclass(slots=True)
class Exchange:
    """One request and the raw pieces of its response. Times are `time.perf_counter` seconds."""

    start_s: float
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    end_s: float = math.nan
    failure: str | None = None


@dataclass(slots=True)
class Reply:
    """What a client saw of one exchange.

    `token_times_s` are the arrivals of events that carried text; `ttft_s` is the first of them
    since the request was sent. Both are empty or NaN where no text came.
    """

    start_s: float
    end_s: float
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    token_times_s: list[float] = field(default_factory=list)
    text: str = ""
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    error: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the request was answered in full."""
        return self.status == 200 and self.error is None

    @property
    def ttft_s(self) -> float:
        """Time to the first text, in seconds."""
        return self.token_times_s[0] - self.start_s if self.token_times_s else math.nan

    @property
    def retry_after_s(self) -> float | None:
        """What a refusal told the client to wait, in seconds."""
        value = self.headers.get("retry-after")
        return float(value) if value is not None else None


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
        if self._bytes_missing is None:
            complete = data.endswith(LAST_CHUNK)
        else:
            complete = self._bytes_missing <= 0
        if complete:
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

    async def send(
        self, payload: bytes, timeout_s: float | None = None, exchange: Exchange | None = None
    ) -> Exchange:
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


def read_reply(exchange: Exchange) -> Reply:
    """Take a response apart: status, headers, and either its events or its body."""
    reply = Reply(exchange.start_s, exchange.end_s, error=exchange.failure)
    raw = b"".join(piece for _, piece in exchange.pieces)
    head, found, _ = raw.partition(HEAD_END)
    if not found:
        reply.error = reply.error or "no response"
        return reply
    reply.status, reply.headers = _read_head(head)
    body = _read_body(exchange, len(head) + len(HEAD_END), reply)
    if reply.headers.get("content-type", "").startswith("text/event-stream"):
        _read_events(body, reply)
    else:
        _read_json_body(body, reply)
    return reply


def _read_head(head: bytes) -> tuple[int, dict[str, str]]:
    """Return the status and the headers, names in lower case."""
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return int(first.split(" ", 2)[1]), headers


def _read_body(exchange: Exchange, offset: int, reply: Reply) -> list[tuple[float, bytes]]:
    """Return the body in pieces with their times, without head and chunk frames."""
    chunked = reply.headers.get("transfer-encoding", "").lower() == "chunked"
    decoder = ChunkDecoder() if chunked else None
    body = []
    for when_s, piece in exchange.pieces:
        skipped = min(offset, len(piece))
        offset -= skipped
        content = piece[skipped:]
        if decoder is not None:
            content = decoder.feed(content)
        if content:
            body.append((when_s, content))
    if decoder is not None and not decoder.finished and reply.error is None:
        reply.error = "response was cut"
    return body


class ChunkDecoder:
    """Takes the frames off a chunked body, in whatever pieces it comes."""

    def __init__(self) -> None:
        self._rest = b""
        self.finished = False

    def feed(self, data: bytes) -> bytes:
        """Return the content of all chunks that are complete by now."""
        rest = self._rest + data
        content = []
        while not self.finished:
            size_line, found, after = rest.partition(b"\r\n")
            if not found:
                break
            size = int(size_line.split(b";")[0], 16)
            if len(after) < size + 2:
                break
            content.append(after[:size])
            rest = after[size + 2 :]
            self.finished = size == 0
        self._rest = rest
        return b"".join(content)


class EventReader:
    """Cuts a stream of server-sent events into the contents of its `data:` lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of each event that ends in `data`; comments are left out."""
        *events, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        contents = []
        for event in events:
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                contents.append(b"\n".join(lines))
        return contents


def _read_events(body: list[tuple[float, bytes]], reply: Reply) -> None:
    """Fill in text, times, usage and errors from the events of a stream."""
    reader = EventReader()
    texts = []
    finished = False
    for when_s, piece in body:
        for data in reader.feed(piece):
            if data == b"[DONE]":
                finished = True
                continue
            event = json.loads(data)
            _read_counts(event, reply)
            text = event_text(event)
            if text:
                texts.append(text)
                reply.token_times_s.append(when_s)
    reply.text = "".join(texts)
    if not finished and reply.error is None:
        reply.error = "stream ended without [DONE]"


def _read_json_body(body: list[tuple[float, bytes]], reply: Reply) -> None:
    """Fill in usage and error from a body that came whole; its text is the body itself."""
    reply.text = b"".join(piece for _, piece in body).decode(errors="replace")
    if reply.headers.get("content-type", "").startswith("application/json"):
        try:
            content = json.loads(reply.text)
        except ValueError:
            reply.error = reply.error or "body is not JSON"
            return
        if isinstance(content, dict):
            _read_counts(content, reply)


def _read_counts(content: dict[str, Any], reply: Reply) -> None:
    """Take usage and error out of an event or a body, where it has them."""
    usage = content.get("usage")
    if usage:
        reply.num_prompt_tokens = int(usage["prompt_tokens"])
        reply.num_completion_tokens = int(usage["completion_tokens"])
    if content.get("error"):
        reply.error = json.dumps(content["error"])


def event_text(event: dict[str, Any]) -> str:
    """Return the text that an event of a chat or of a completion carries, or nothing."""
    choices = event.get("choices")
    if not choices:
        return ""
    choice = choices[0]
    if "delta" in choice:
        return choice["delta"].get("content") or ""
    return choice.get("text") or ""
