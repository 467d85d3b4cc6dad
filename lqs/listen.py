"""The listening socket and the HTTP server on it, with bounds on what one connection may take.

The only door to uvicorn. It answers from the moment the socket is bound; what it answers is the
application's.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from lqs.config import ServerConfig
from lqs.errors import StartError
from lqs.observe.log import Log


def bind(config: ServerConfig) -> socket.socket:
    """A listening socket on the configured address. Raises StartError."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((config.host, config.port))
        listening.listen(config.backlog)
    except OSError as error:
        listening.close()
        raise StartError(
            f"cannot listen on {config.host}:{config.port}: {error.strerror}. Choose another with --host and --port."
        ) from None
    return listening


def url_of(host: str, port: int) -> str:
    """An address to open on this machine; one that stands for every interface is shown as loopback."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def make_http(app: object, config: ServerConfig, log: Log, close_s: int) -> HttpServer:
    """The HTTP server around the application."""
    log.take_over("uvicorn.error")
    protocol = type("LimitedConnection", (Connection,), {"limits": config})
    return HttpServer(
        uvicorn.Config(
            app,  # type: ignore[arg-type]
            http=protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=config.backlog,
            timeout_keep_alive=int(config.keep_alive_s),
            timeout_graceful_shutdown=close_s,
        )
    )


# How long a refused client may go on sending, unheard.
_LINGER_S = 3.0


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: the whole server has one way to end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Connection(HttpToolsProtocol):
    """A client's connection, with bounds that uvicorn's own lacks: number, header bytes and time.

    Owner: the event loop.
    """

    limits: ServerConfig
    _head_timer: asyncio.TimerHandle | None = None
    _linger_timer: asyncio.TimerHandle | None = None
    _num_head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._wire = transport
        super().connection_made(_Transport(transport, self._close))  # type: ignore[arg-type]
        if len(self.connections) > self.limits.num_connections_max:
            transport.write(_answer(503, "Too many connections.", "Retry-After: 1\r\n"))
            transport.close()
        else:
            self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._linger_timer is None:
            super().data_received(data)

    def on_message_begin(self) -> None:
        self._num_head_bytes = 0
        self._start_head_timer()
        super().on_message_begin()
        # For a reader that stalls: closing would wait for its buffer for ever.
        self.scope["extensions"] = {"lqs.abort": self.transport.abort}  # type: ignore[dict-item]

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_head_timer()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        if self._num_head_bytes > self.limits.header_bytes_max:
            self.transport.write(_answer(431, "The request's headers are too large."))
        else:
            self.transport.write(_answer(400, msg))
        self._linger()

    def _close(self) -> None:
        """Close for good, or linger first where an answer came before the end of its request."""
        cycle = self.cycle
        if cycle is not None and cycle.more_body and cycle.response_complete and self._linger_timer is None:
            self._linger()
        else:
            self._wire.close()

    def _linger(self) -> None:
        """End our side only, so that a client that still sends gets to read why it should not.

        A close with something unread resets the connection, and most clients then lose the answer.
        """
        if self._wire.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            # It is still answering a request before this one; nothing can be written any more.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._linger_timer = self.loop.call_later(_LINGER_S, self._wire.close)
        self._wire.write_eof()
        self.flow.resume_reading()

    def _count_head(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > self.limits.header_bytes_max:
            # The parser turns this into its own error, which ends in send_400_response.
            raise ValueError("headers too large")

    def _start_head_timer(self) -> None:
        """A client that says nothing, or its headers too slowly, loses its connection."""
        self._stop_head_timer()
        self._head_timer = self.loop.call_later(self.limits.keep_alive_s, self.transport.close)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class _Transport:
    """A connection's transport with another way to close."""

    def __init__(self, wire: asyncio.Transport, close: Callable[[], None]) -> None:
        self._wire = wire
        self.write = wire.write
        self._close = close
        self._is_closing = False

    def close(self) -> None:
        self._is_closing = True
        self._close()

    def is_closing(self) -> bool:
        return self._is_closing or self._wire.is_closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wire, name)


def _answer(status: int, message: str, headers: str = "") -> bytes:
    """An error in the API's form, for what never becomes a request."""
    body = f'{{"error":{{"message":"{message}","type":"invalid_request_error","param":null,"code":null}}}}'
    return (
        f"HTTP/1.1 {status} {_PHRASES[status]}\r\ncontent-type: application/json\r\n{headers}"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n{body}"
    ).encode("ascii")


_PHRASES = {
    400: "Bad Request",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}
