"""Which ASGI server should carry lqs: uvicorn or granian? Measured beside a busy engine.

    python -m bench.load.asgi [--seconds S] [--json FILE]

Each server runs the same Starlette routes in a process of its own while another process spins on a core,
as an engine would. Reported: streamed chunks and refusals per second, memory of an idle connection, and
what the application learns: does it hear that the client of an unfinished answer has left, and does a
reader that reads nothing hold its writer back?
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import uvloop
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from lqs.api.errors import send_error
from lqs.errors import RequestRefused
from lqs.streaming.outlet import Piece
from lqs.streaming.sse import DONE, ChatFrames

SERVERS = ("uvicorn", "granian", "granian-embedded")
NUM_CHUNKS = 256  # Of one stream.
NUM_STREAMS = 32
NUM_CALLERS = 32
NUM_IDLE = 1000
FLOOD_BYTES = 65_536


class App:
    """The routes that are measured, and what they have seen."""

    def __init__(self) -> None:
        self.seen = {"left": 0, "flood_bytes": 0}
        gets = {"/stream": self.stream, "/refuse": self.refuse, "/wait": self.wait, "/flood": self.flood}
        self.router = Router([Route(path, Endpoint(app)) for path, app in (gets | {"/seen": self.show}).items()])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self.router(scope, receive, send)

    async def stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        """NUM_CHUNKS chunks, each made after a turn of the loop, as text that comes from a worker is."""
        frames = ChatFrames("id", 1, "m")
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for _ in range(NUM_CHUNKS):
            await asyncio.sleep(0)
            body = frames.text(Piece(b" token", 1, b""))
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": DONE})

    async def refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_error(send, RequestRefused("queue_full", "The queue is full.", retry_after_s=2))

    async def wait(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Never answer; count the client's leaving."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.seen["left"] += 1

    async def flood(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send as long as the server takes it; count what it took."""
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(2048):
            await send({"type": "http.response.body", "body": b"x" * FLOOD_BYTES, "more_body": True})
            self.seen["flood_bytes"] += FLOOD_BYTES
            await asyncio.sleep(0)

    async def show(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = json.dumps(self.seen).encode()
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class Endpoint:
    """Keeps Starlette from wrapping a method: it is an ASGI app."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


def serve(server: str, port: int) -> None:
    """Be one server until the process is ended."""
    # granian takes no more connections at once than its backlog, unless told.
    limits: dict[str, Any] = {"backlog": 4096, "backpressure": 4096, "log_enabled": False}
    if server == "uvicorn":
        import uvicorn  # noqa: PLC0415 One of them is loaded, not all.

        uvicorn.run(App(), port=port, loop="uvloop", http="httptools", ws="none", lifespan="off", log_level="error")
    elif server == "granian":
        from granian import Granian  # noqa: PLC0415 One of them is loaded, not all.

        target = "bench.load.asgi:make_app"
        Granian(target, port=port, interface="asginl", loop="uvloop", factory=True, **limits).serve()  # type: ignore[arg-type]
    else:
        from granian.server.embed import Server  # noqa: PLC0415 One of them is loaded, not all.

        embedded = Server(App(), port=port, interface="asginl", **limits)  # type: ignore[arg-type]
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(embedded.serve())


def make_app() -> App:
    """For a server that imports its application."""
    return App()


# The client: one process, raw sockets, so that it costs little beside what it measures.


async def ask(port: int, path: str) -> bytes:
    """One request on a connection of its own; the whole answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return answer


async def chunks_per_s(port: int, seconds: float) -> float:
    """Chunks of NUM_STREAMS streams at once."""

    async def reads() -> int:
        num_chunks = 0
        while time.perf_counter() < end_s:
            num_chunks += (await ask(port, "/stream")).count(b"data: {")
        return num_chunks

    began_s = time.perf_counter()
    end_s = began_s + seconds
    counts = await asyncio.gather(*(reads() for _ in range(NUM_STREAMS)))
    return sum(counts) / (time.perf_counter() - began_s)


async def refusals_per_s(port: int, seconds: float) -> float:
    """Refusals over NUM_CALLERS kept connections, one after the other on each."""

    async def calls() -> int:
        num_calls = 0
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while time.perf_counter() < end_s:
            writer.write(b"GET /refuse HTTP/1.1\r\nhost: h\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            assert b" 429 " in head.split(b"\r\n")[0]
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            num_calls += 1
        writer.close()
        return num_calls

    began_s = time.perf_counter()
    end_s = began_s + seconds
    counts = await asyncio.gather(*(calls() for _ in range(NUM_CALLERS)))
    return sum(counts) / (time.perf_counter() - began_s)


async def idle_kib(port: int, pids: list[int]) -> float:
    """Memory of one connection that has had one answer and is kept, in KiB."""
    before_kib = sum(map(rss_kib, pids))
    writers = []
    for _ in range(NUM_IDLE):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /refuse HTTP/1.1\r\nhost: h\r\n\r\n")
        await reader.readuntil(b"}}")
        writers.append(writer)
    used_kib = (sum(map(rss_kib, pids)) - before_kib) / NUM_IDLE
    for writer in writers:
        writer.close()
    return used_kib


async def behaviour(port: int) -> dict[str, Any]:
    """What the application learns of clients that leave or do not read."""
    _, leaver = await asyncio.open_connection("127.0.0.1", port)
    leaver.write(b"GET /wait HTTP/1.1\r\nhost: h\r\n\r\n")
    await asyncio.sleep(0.3)
    leaver.close()
    stalled = socket.create_connection(("127.0.0.1", port))
    stalled.sendall(b"GET /flood HTTP/1.1\r\nhost: h\r\n\r\n")
    await asyncio.sleep(1.5)
    seen = json.loads((await ask(port, "/seen")).split(b"\r\n\r\n", 1)[1])
    stalled.close()
    return {"hears_leaving": seen["left"] == 1, "taken_unread_mib": seen["flood_bytes"] / 2**20}


async def measure(server: str, port: int, pids: list[int], seconds: float) -> dict[str, Any]:
    """One row of the table."""
    await refusals_per_s(port, 0.3)
    row: dict[str, Any] = {"server": server}
    row["chunks_per_s"] = await chunks_per_s(port, seconds)
    row["refusals_per_s"] = await refusals_per_s(port, seconds)
    row["idle_connection_kib"] = await idle_kib(port, pids)
    return row | await behaviour(port)


def rss_kib(pid: int) -> int:
    """Resident memory of a process."""
    with open(f"/proc/{pid}/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def family(pid: int) -> list[int]:
    """A process and its children."""
    with open(f"/proc/{pid}/task/{pid}/children") as children:
        return [pid, *map(int, children.read().split())]


@contextlib.contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process, ended at the end."""
    process = subprocess.Popen([sys.executable, *command])
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until_open(port: int) -> None:
    end_s = time.monotonic() + 20
    while time.monotonic() < end_s:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise TimeoutError(f"nothing listens on {port}")


def rows(seconds: float) -> Iterator[dict[str, Any]]:
    """Measure every server in turn, each beside the same busy core."""
    with running("-c", "while True: pass"):
        for server in SERVERS:
            port = free_port()
            with running("-m", "bench.load.asgi", "--serve", server, "--port", str(port)) as process:
                wait_until_open(port)
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    yield runner.run(measure(server, port, family(process.pid), seconds))


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.load.asgi", description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="for each rate")
    parser.add_argument("--json", help="also write the rows here, one a line")
    parser.add_argument("--serve", choices=SERVERS, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.port)
        return
    print(f"{'server':<18}{'chunks/s':>10}{'429/s':>10}{'KiB/idle':>10}{'hears leaving':>15}{'taken unread':>14}")
    lines = []
    for row in rows(args.seconds):
        print(
            f"{row['server']:<18}{row['chunks_per_s']:>10.0f}{row['refusals_per_s']:>10.0f}"
            f"{row['idle_connection_kib']:>10.1f}{row['hears_leaving']!s:>15}{row['taken_unread_mib']:>10.1f} MiB",
            flush=True,
        )
        lines.append(json.dumps(row) + "\n")
    if args.json:
        with open(args.json, "w") as file:
            file.writelines(lines)


if __name__ == "__main__":
    main()
