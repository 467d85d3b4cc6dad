"""Clients that pipeline and leave, or never read, on real sockets and both event loops."""

from __future__ import annotations

import asyncio
import contextlib
import io
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import uvloop

from lqs.config import LogConfig, ServerConfig
from lqs.listen import _NUM_CYCLES_MAX, HttpServer, make_http
from lqs.observe.log import Log
from lqs.sockets import bind

LIVEZ = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"
LONG = b"POST /long HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"
NUM_BIG_BYTES = 64_000_000


class House:
    """A server with a route that generates until its client leaves and one whose answer is too large."""

    def __init__(self) -> None:
        self.log = io.StringIO()
        self.num_running = 0
        self.paths: list[str] = []
        self.http: HttpServer
        self.address: tuple[str, int]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.paths.append(scope["path"])
        if scope["path"] == "/long":
            self.num_running += 1
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
            while (await receive())["type"] != "http.disconnect":
                pass
            await send({"type": "http.response.body", "body": b"last"})
            self.num_running -= 1
            return
        body = bytes(NUM_BIG_BYTES) if scope["path"] == "/big" else b"ok"
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def call(self, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self.address)
        writer.write(data)
        return reader, writer

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not is_so():  # noqa: ASYNC110 - what is waited for is the server's own state
                await asyncio.sleep(0.005)

    @contextlib.asynccontextmanager
    async def opened(self, config: ServerConfig) -> AsyncIterator[House]:
        self.http = make_http(self, config, Log(LogConfig(), self.log), close_s=1)
        with bind(config) as listening:
            self.address = listening.getsockname()[:2]
            task = asyncio.create_task(self.http.serve([listening]))
            try:
                await self.until(lambda: self.http.started)
                yield self
                await self.until(lambda: not self.http.server_state.connections and not self.http.server_state.tasks)
            finally:
                self.http.should_exit = True
                await task
        assert "Exception" not in self.log.getvalue()
        assert "error" not in self.log.getvalue().lower()


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def play(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Runs a scene in an open house."""

    def run(scene: Callable[[House], Awaitable[None]], **settings: Any) -> None:
        async def whole() -> None:
            async with House().opened(ServerConfig(port=0, **settings)) as house:
                await scene(house)

        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(whole())

    return run


@pytest.mark.parametrize("behind", [LIVEZ, LIVEZ * 5, LONG, LIVEZ[:20]], ids=["one", "five", "long", "half"])
def test_who_pipelines_and_leaves_is_noticed(play: Callable[..., None], behind: bytes) -> None:
    async def scene(house: House) -> None:
        _, writer = await house.call(LONG + behind)
        await house.until(lambda: house.num_running == 1)
        writer.close()
        await house.until(lambda: house.num_running == 0)
        assert house.paths == ["/long"]

    play(scene)


@pytest.mark.parametrize("num_body_bytes", [0, 200_000])
def test_who_asks_again_while_it_is_answered_and_leaves_is_noticed(
    play: Callable[..., None], num_body_bytes: int
) -> None:
    """What comes behind a running answer pauses uvicorn's reading, and with it the news of the end."""

    async def scene(house: House) -> None:
        reader, writer = await house.call(LONG)
        await reader.readuntil(b"first")
        writer.write(b"POST /livez HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % num_body_bytes + bytes(num_body_bytes))
        await writer.drain()
        writer.close()
        await house.until(lambda: house.num_running == 0)

    play(scene)


@pytest.mark.parametrize(
    "behind",
    [LIVEZ * _NUM_CYCLES_MAX, b"POST / HTTP/1.1\r\ncontent-length: 9000\r\n\r\n" + bytes(9000)],
    ids=["requests", "bytes"],
)
def test_what_waits_behind_an_answer_has_a_bound(play: Callable[..., None], behind: bytes) -> None:
    async def scene(house: House) -> None:
        reader, writer = await house.call(LONG)
        await reader.readuntil(b"first")
        writer.write(behind)
        with contextlib.suppress(ConnectionResetError):
            await reader.read()
        await house.until(lambda: house.num_running == 0)
        writer.close()

    play(scene, body_bytes_max=8192)


def test_pipelined_requests_are_answered_in_turn(play: Callable[..., None]) -> None:
    async def scene(house: House) -> None:
        reader, writer = await house.call(LIVEZ * (_NUM_CYCLES_MAX - 1))
        for _ in range(_NUM_CYCLES_MAX - 1):
            await reader.readuntil(b"ok")
        writer.close()

    play(scene)


@pytest.mark.parametrize("head", [b"GET /big HTTP/1.1\r\n\r\n", b"GET /big HTTP/1.1\r\nconnection: close\r\n\r\n"])
@pytest.mark.parametrize("has_ended", [False, True])
def test_who_never_reads_is_dropped(play: Callable[..., None], head: bytes, has_ended: bool) -> None:
    """Also where a close waits for the buffer: after the answer, at the keep-alive's end, at the client's end."""

    async def scene(house: House) -> None:
        with socket.create_connection(house.address) as client:
            client.sendall(head)
            if has_ended:
                client.shutdown(socket.SHUT_WR)
            await house.until(lambda: house.paths == ["/big"])
            await house.until(lambda: not house.http.server_state.connections)

    play(scene, write_stall_s=0.2, keep_alive_s=1)
