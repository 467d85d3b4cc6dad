"""What a client saw: takes chunked transfer, server-sent events and JSON apart after a run.

Tokens are counted from the server's own `usage`, never from events: servers are free to put
several tokens into one event, or none.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

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
