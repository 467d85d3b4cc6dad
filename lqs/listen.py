"""The HTTP server on the listening socket, with bounds on what one connection may take.

The only door to uvicorn. It answers from the moment the socket is bound; what it answers is the
application's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterator
from typing import cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from lqs.config import ServerConfig
from lqs.observe.log import Log
from lqs.transport import Transport


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

# How many requests one connection may have open: the one that is answered and those behind it.
_NUM_CYCLES_MAX = 32
# How long a server that leaves keeps a connection on which nothing comes: one that is closed in the moment in which
# its client uses it again loses that request, so who is busy gets an answer that says close first.
_LEAVE_S = 2.0


class _State(ServerState):
    """What uvicorn's connections share, and whether the server leaves."""

    is_leaving = False


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: the whole server has one way to end."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.server_state = _State()
        # Until it listens.
        self.servers = []

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    @property
    def num_connections(self) -> int:
        """Open connections."""
        return len(self.server_state.connections)

    def leave(self) -> None:
        """Accept no connection any more, and end each that is there after its next answer."""
        cast(_State, self.server_state).is_leaving = True
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            cast(Connection, connection).leave()


class Connection(HttpToolsProtocol):
    """A client's connection, with bounds that uvicorn's own lacks: number, header bytes and time.

    It goes on reading while it answers, since only a read says that the client has left.

    Owner: the event loop.
    """

    limits: ServerConfig
    _head_timer: asyncio.TimerHandle | None = None
    _linger_timer: asyncio.TimerHandle | None = None
    _leave_timer: asyncio.TimerHandle | None = None
    _num_head_bytes = 0
    _is_in_head = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        # Requests whose answers are not complete, in the order of their answers; the first one runs.
        self._cycles: deque[RequestResponseCycle] = deque()
        self._wire = transport
        self._writer = Transport(transport, self._close, self.loop, self.limits.write_stall_s)
        super().connection_made(self._writer)  # type: ignore[arg-type]
        if len(self.connections) > self.limits.num_connections_max:
            self.transport.write(_answer(503, "Too many connections.", "Retry-After: 1\r\n"))
            self.transport.close()
        else:
            self._start_head_timer()
            if self._is_leaving:
                # Accepted just before.
                self.leave()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        for timer in (self._linger_timer, self._leave_timer):
            if timer is not None:
                timer.cancel()
        self._writer.stop()
        # uvicorn tells only the last request, and that wakes who waits to write: all have to know before.
        self._disconnect_all()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._linger_timer is None:
            super().data_received(data)
            self._read_on()

    def on_message_begin(self) -> None:
        self._drop_complete()
        if len(self._cycles) >= _NUM_CYCLES_MAX:
            # As in _count_head.
            raise ValueError("too many requests at once")
        self._num_head_bytes = 0
        self._is_in_head = True
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
        self._is_in_head = False
        super().on_headers_complete()
        self._cycles.append(self.cycle)
        if self._is_leaving:
            self.cycle.keep_alive = False

    def send_400_response(self, msg: str) -> None:
        if len(self._cycles) >= _NUM_CYCLES_MAX:
            self._wire.abort()
            return
        if self._num_head_bytes > self.limits.header_bytes_max:
            self.transport.write(_answer(431, "The request's headers are too large."))
        else:
            self.transport.write(_answer(400, msg))
        self._linger()

    def leave(self) -> None:
        """Close after the last answer that is owed; where none is, after the next one or a while of silence."""
        self._drop_complete()
        if self._cycles:
            self._cycles[-1].keep_alive = False
        elif not self._is_in_head:
            self._leave_timer = self.loop.call_later(_LEAVE_S, self._close_if_idle)

    @property
    def _is_leaving(self) -> bool:
        return cast(_State, self.server_state).is_leaving

    def _close_if_idle(self) -> None:
        self._drop_complete()
        if not self._cycles and not self._is_in_head:
            self._wire.close()

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
        # It may still be answering requests before this one; nothing can be written any more.
        self._disconnect_all()
        self._linger_timer = self.loop.call_later(_LINGER_S, self._wire.close)
        self._wire.write_eof()
        self.flow.resume_reading()

    def _disconnect_all(self) -> None:
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._cycles.clear()

    def _drop_complete(self) -> None:
        while self._cycles and self._cycles[0].response_complete:
            self._cycles.popleft()

    def _read_on(self) -> None:
        """Undo uvicorn's pause behind a running answer: a client that leaves would not be noticed."""
        self._drop_complete()
        if len(self._cycles) < 2 or self._wire.is_closing():
            return
        if sum(len(cycle.body) for cycle in self._cycles) > self.limits.body_bytes_max:
            self._wire.abort()
        else:
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
