"""A client that keeps hold of its socket: it can stop reading, close in the middle, or say nothing."""

from __future__ import annotations

import http.client
import json
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

HOST = "127.0.0.1"
LIMIT_S = 60.0


@dataclass
class Answer:
    """A whole answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """The code of an error, its shape checked."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error["code"]

    @property
    def usage(self) -> tuple[int, int]:
        """Prompt and completion tokens."""
        usage = self.json["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        return usage["prompt_tokens"], usage["completion_tokens"]

    @property
    def text(self) -> str:
        choice = self.json["choices"][0]
        return choice["text"] if "text" in choice else choice["message"]["content"]

    @property
    def finish(self) -> str:
        return self.json["choices"][0]["finish_reason"]


def head_of(method: str, path: str, headers: dict[str, str]) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "".join(line + "\r\n" for line in [*lines, ""]).encode("latin-1")


class Call:
    """A request on a connection of its own; its answer is read when it is asked for.

    `raw` is sent as it is, in place of everything. `receive_bytes` makes the socket's buffer small.
    """

    def __init__(
        self,
        port: int,
        method: str = "GET",
        path: str = "/",
        body: Any = None,
        *,
        key: str | None = None,
        headers: dict[str, str] | None = None,
        raw: bytes | None = None,
        receive_bytes: int = 0,
    ) -> None:
        self.sock = socket.socket()
        if receive_bytes:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.sock.settimeout(LIMIT_S)
        self.sock.connect((HOST, port))
        if raw is None:
            payload = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
            sent = {"host": "lqs", "content-type": "application/json", "content-length": str(len(payload))}
            if key is not None:
                sent["authorization"] = f"Bearer {key}"
            raw = head_of(method, path, sent | (headers or {})) + payload
        self.sock.sendall(raw)
        self._method = method
        self._response: http.client.HTTPResponse | None = None

    def again(self, method: str, path: str, headers: dict[str, str] | None = None, body: bytes = b"") -> None:
        """Make another request on the connection, after an answer that was read to its end."""
        assert self._response is not None
        assert self._response.isclosed()
        self._response, self._method = None, method
        self.sock.sendall(head_of(method, path, {"host": "lqs", "content-length": str(len(body))} | (headers or {})))
        self.sock.sendall(body)

    def begin(self) -> http.client.HTTPResponse:
        """Wait for the status line and the headers."""
        if self._response is None:
            self._response = http.client.HTTPResponse(self.sock, method=self._method)
            self._response.begin()
        return self._response

    def answer(self) -> Answer:
        """Wait for the whole answer and close."""
        try:
            response = self.begin()
            headers = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, headers, response.read())
        finally:
            self.close()

    def lines(self) -> Iterator[str]:
        """What a stream says, an event or a comment at a time. Every one is valid UTF-8. At its end it closes."""
        response = self.begin()
        assert response.status == 200, response.read()
        assert response.getheader("content-type") == "text/event-stream; charset=utf-8"
        while line := response.readline():
            text = line.decode()
            assert text.endswith("\n")
            assert response.readline() == b"\n"
            yield text.rstrip("\n")
        self.close()

    def events(self) -> Iterator[Any]:
        """The events of a stream; the last of one that went well is "[DONE]"."""
        for line in self.lines():
            if not line.startswith(":"):
                data = line.removeprefix("data: ")
                yield data if data == "[DONE]" else json.loads(data)

    def close(self) -> None:
        """Leave as a program that ends does."""
        if self._response is not None:
            self._response.close()
        self.sock.close()

    def reset(self) -> None:
        """Leave as a machine that is switched off does."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()


@dataclass
class Streamed:
    """What a stream came to."""

    text: str = ""
    finish: str | None = None
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    is_done: bool = False


def collect(call: Call) -> Streamed:
    """Read a stream to its end."""
    told = Streamed()
    for event in call.events():
        assert not told.is_done
        if event == "[DONE]":
            told.is_done = True
        elif "error" in event:
            told.error = event["error"]
        else:
            _add(told, event)
    return told


def _add(told: Streamed, event: dict[str, Any]) -> None:
    told.usage = event.get("usage") or told.usage
    for choice in event["choices"]:
        told.text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
        told.finish = choice["finish_reason"] or told.finish
