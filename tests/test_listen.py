"""What one connection may take, with a transport that only keeps what is written."""

from __future__ import annotations

import asyncio
import functools
import io
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from lqs import listen
from lqs.config import LogConfig, ServerConfig
from lqs.errors import StartError
from lqs.listen import HttpServer, make_http, url_of
from lqs.observe.log import Log
from lqs.sockets import bind


class Wire(asyncio.Transport):
    """A transport that keeps what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = self.ended = self.aborted = False
        self.num_unsent = 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("127.0.0.1", 9), "sockname": ("127.0.0.1", 8)}.get(name, default)

    def write(self, data: Any) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def abort(self) -> None:
        self.closed = self.aborted = True

    def get_write_buffer_size(self) -> int:
        return self.num_unsent

    def write_eof(self) -> None:
        self.ended = True

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


def in_a_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a coroutine test in an event loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **fixtures: Any) -> None:
        asyncio.run(test(*args, **fixtures))  # type: ignore[arg-type]

    return run


async def app(scope: Any, receive: Any, send: Any) -> None:
    assert callable(scope["extensions"]["lqs.abort"])
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def http_for(config: ServerConfig) -> HttpServer:
    http = make_http(app, config, Log(LogConfig(), io.StringIO()), close_s=1)
    http.config.load()
    return http


def connect(http: HttpServer) -> tuple[Any, Wire]:
    wire = Wire()
    protocol: Any = http.config.http_protocol_class
    connection = protocol(config=http.config, server_state=http.server_state, app_state={})
    connection.connection_made(wire)
    return connection, wire


def said(data: bytes, config: ServerConfig) -> bytes:
    """What a connection answers to these bytes."""

    async def scene() -> bytes:
        connection, wire = connect(http_for(config))
        connection.data_received(data)
        await asyncio.gather(*connection.tasks)
        connection.connection_lost(None)
        return wire.written

    return asyncio.run(scene())


def test_a_request_reaches_the_application() -> None:
    assert said(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", ServerConfig()).startswith(b"HTTP/1.1 204")


@pytest.mark.parametrize(
    "head",
    [b"GET /" + b"a" * 2000 + b" HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nx: " + b"b" * 2000 + b"\r\n\r\n"],
)
def test_headers_have_a_bound(head: bytes) -> None:
    answer = said(head, ServerConfig(header_bytes_max=1024))
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b'"error"' in answer
    assert b"connection: close" in answer


def test_what_is_not_http_is_told_so() -> None:
    assert said(b"\x16\x03\x01 hello\r\n\r\n", ServerConfig()).startswith(b"HTTP/1.1 400 ")


def test_more_connections_than_allowed_are_sent_away() -> None:
    async def scene() -> None:
        http = http_for(ServerConfig(num_connections_max=1))
        first, wire = connect(http)
        second, refused = connect(http)
        assert refused.written.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: 1\r\n" in refused.written
        assert (wire.closed, refused.closed) == (False, True)
        first.connection_lost(None)
        second.connection_lost(None)
        connection, fresh = connect(http)
        assert not fresh.closed
        connection.connection_lost(None)

    asyncio.run(scene())


def test_a_client_that_does_not_finish_its_headers_is_dropped() -> None:
    async def scene() -> None:
        connection, wire = connect(http_for(ServerConfig(keep_alive_s=9)))
        connection.data_received(b"GET / HTTP/1.1\r\nhost:")
        timer = connection._head_timer
        assert 8 < timer.when() - connection.loop.time() <= 9
        timer._run()
        assert wire.closed
        connection.connection_lost(None)
        assert timer.cancelled()

    asyncio.run(scene())


def test_who_is_refused_while_it_sends_may_read_why() -> None:
    """B21: our side ends first; what still comes is not looked at, and the time for it has a limit."""

    async def scene() -> None:
        connection, wire = connect(http_for(ServerConfig()))
        connection.data_received(b"POST / HTTP/1.1\r\nconnection: close\r\ncontent-length: 99\r\n\r\nabc")
        await asyncio.gather(*connection.tasks)
        assert wire.written.startswith(b"HTTP/1.1 204")
        assert (wire.ended, wire.closed) == (True, False)
        connection.data_received(b"\x00 not HTTP")
        timer = connection._linger_timer
        connection.shutdown()
        assert wire.closed
        connection.connection_lost(None)
        assert timer.cancelled()

    asyncio.run(scene())


def test_a_connection_that_is_gone_does_not_linger() -> None:
    async def scene() -> None:
        connection, wire = connect(http_for(ServerConfig()))
        wire.abort()
        connection.send_400_response("no")
        assert connection._linger_timer is None
        connection.connection_lost(None)

    asyncio.run(scene())


def test_a_client_that_takes_something_is_kept() -> None:
    """The buffer grows, but the client reads; then it stops, and a close under way does not save it."""

    async def scene() -> None:
        connection, wire = connect(http_for(ServerConfig(write_stall_s=1)))
        writer = connection._writer
        wire.num_unsent = 90
        connection.transport.write(bytes(100))
        for wire.num_unsent in (180, 270):
            connection.transport.write(bytes(100))
            writer._taken_at_s -= 5
            writer._check_stall()
            assert not wire.aborted
        connection.transport.close()
        writer._taken_at_s -= 5
        writer._check_stall()
        assert wire.aborted
        connection.connection_lost(None)

    asyncio.run(scene())


def test_a_taken_port_is_named_with_what_to_do() -> None:
    first = bind(ServerConfig(port=0))
    port = first.getsockname()[1]
    with first, pytest.raises(StartError, match="--port"):
        bind(ServerConfig(port=port))


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_an_ipv6_address_can_be_listened_on() -> None:
    with bind(ServerConfig(host="::1", port=0)) as listening:
        assert listening.family == socket.AF_INET6


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:1"),
        ("0.0.0.0", "http://127.0.0.1:1"),
        ("::", "http://[::1]:1"),
        ("lqs.example", "http://lqs.example:1"),
    ],
)
def test_the_address_that_is_shown_can_be_opened(host: str, url: str) -> None:
    assert url_of(host, 1) == url


def test_uvicorn_leaves_signals_alone() -> None:
    with http_for(ServerConfig()).capture_signals():
        pass


class Leaving:
    """A server with one connection, the first request of which is answered when the test says so."""

    def __init__(self) -> None:
        self.answer = asyncio.Event()
        self.http = make_http(self._make_app(), ServerConfig(), Log(LogConfig(), io.StringIO()), close_s=1)
        self.http.config.load()
        self.connection, self.wire = connect(self.http)

    def _make_app(self) -> Callable[..., Awaitable[None]]:
        async def answered(scope: Any, receive: Any, send: Any) -> None:
            await self.answer.wait()
            await app(scope, receive, send)

        return answered

    async def ask(self) -> None:
        self.connection.data_received(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.sleep(0)


@in_a_loop
async def test_a_server_that_leaves_ends_a_connection_with_its_answer() -> None:
    at = Leaving()
    await at.ask()
    at.http.leave()
    assert not at.wire.closed
    at.answer.set()
    await asyncio.gather(*at.connection.tasks)
    assert at.wire.written.startswith(b"HTTP/1.1 204")
    assert b"connection: close" in at.wire.written
    assert at.wire.closed


@in_a_loop
async def test_a_server_that_leaves_answers_once_more_on_an_idle_connection() -> None:
    at = Leaving()
    at.answer.set()
    await at.ask()
    await asyncio.gather(*at.connection.tasks)
    assert b"connection: close" not in at.wire.written
    at.http.leave()
    assert not at.wire.closed
    at.wire.written = b""
    at.answer.clear()
    await at.ask()
    # What it would have been closed for by now came to nothing.
    at.connection._close_if_idle()
    assert not at.wire.closed
    at.answer.set()
    await asyncio.gather(*at.connection.tasks)
    assert b"connection: close" in at.wire.written
    assert at.wire.closed


@in_a_loop
async def test_a_server_that_leaves_closes_what_stays_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "_LEAVE_S", 0)
    at = Leaving()
    at.http.leave()
    # Accepted before and announced after.
    other, wire = connect(at.http)
    await asyncio.sleep(0.01)
    assert (at.wire.closed, wire.closed) == (True, True)
    other.connection_lost(None)
    assert at.http.num_connections == 1


@in_a_loop
async def test_a_head_that_is_on_its_way_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "_LEAVE_S", 0)
    at = Leaving()
    at.answer.set()
    at.connection.data_received(b"GET / HTTP/1.1\r\nho")
    at.http.leave()
    at.connection._close_if_idle()
    assert not at.wire.closed
    at.connection.data_received(b"st: x\r\n\r\n")
    await asyncio.gather(*at.connection.tasks)
    assert b"connection: close" in at.wire.written
    at.connection.connection_lost(None)
