"""Starts the servers that are compared, each with the same settings in its own words."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

from bench.compare.gauge import DecodeClock
from bench.load.client import Client

START_S = 120.0
STOP_S = 20.0
KINDS = ("lqs", "llama-server")


class ServerFailed(Exception):
    """A server did not start or did not answer its warm-up. Blames the server or its flags."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What all servers of one comparison have in common. `ctx` counts tokens of all sequences."""

    model: Path
    threads: int
    parallel: int
    ctx: int
    unified: bool = True


@dataclass(frozen=True, slots=True)
class Server:
    """A server under comparison: the name in the table, how it is started, its own extra flags.

    `num_waiting_max` is the length of its queue, for servers that bound it.
    """

    name: str
    kind: str
    program: tuple[str, ...]
    extra: tuple[str, ...] = ()
    num_waiting_max: int = 512
    environment: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Server:
        """Read NAME=PATH; the name begins with the kind. Raises ValueError for another kind."""
        name, _, path = text.partition("=")
        kind = next((kind for kind in KINDS if name.startswith(kind)), None)
        if kind is None or not path:
            raise ValueError(f"{text!r}: write NAME=PATH, NAME one of {', '.join(KINDS)}")
        return cls(name, kind, tuple(shlex.split(path)))

    def with_flags(self, label: str, *flags: str) -> Server:
        """Return the same server with more flags under a name that says so."""
        return replace(self, name=f"{self.name} {label}", extra=self.extra + flags)

    def with_environment(self, label: str, **environment: str) -> Server:
        """Return the same server with these variables set, under a name that says so."""
        return replace(self, name=f"{self.name} {label}", environment=(*self.environment, *environment.items()))

    def command(self, setup: Setup, port: int, folder: Path) -> list[str]:
        """Return the command line; a config file it needs is written to `folder`."""
        make = _lqs_command if self.kind == "lqs" else _llama_server_command
        return make(self, setup, port, folder)

    def flags(self, setup: Setup) -> str:
        """Return the command line as the report shows it: without folders, with the config."""
        with tempfile.TemporaryDirectory() as folder:
            words = self.command(setup, 0, Path(folder))
            config = Path(folder, "lqs.toml")
            shown = " ".join(Path(word).name if "/" in word else word for word in words)
            if config.exists():
                shown += " {" + "; ".join(config.read_text().split("\n")).strip("; ") + "}"
        return " ".join([*(f"{name}={value}" for name, value in self.environment), shown])


def lqs_from_here() -> Server:
    """Return the lqs that this Python would import."""
    return Server("lqs", "lqs", (sys.executable, "-m", "lqs"))


def _llama_server_command(server: Server, setup: Setup, port: int, folder: Path) -> list[str]:
    """Write the setup in llama-server's words. Its context counts all sequences, as ours does."""
    return [
        *server.program,
        *("-m", str(setup.model), "--host", "127.0.0.1", "--port", str(port)),
        *("-t", str(setup.threads), "-tb", str(setup.threads)),
        *("-np", str(setup.parallel), "-c", str(setup.ctx)),
        "--kv-unified" if setup.unified else "--no-kv-unified",
        *("--metrics", "--no-ui"),
        *server.extra,
    ]


def _lqs_command(server: Server, setup: Setup, port: int, folder: Path) -> list[str]:
    """Write the setup in the words of lqs; what has no flag goes into a config file."""
    config = folder / "lqs.toml"
    config.write_text(
        "[engine]\n"
        f"kv_unified = {str(setup.unified).lower()}\n"
        "[queue]\n"
        f"caps = [{server.num_waiting_max}]\ntotal = {server.num_waiting_max}\n"
        "timeout_s = 600.0\nrequest_timeout_s = 1200.0\n"
        # No peer narrows its entry under load.
        "entry_per_s = 0\n"
        "[log]\naccess = false\n"
    )
    return [
        *(*server.program, "serve", str(setup.model), "--config", str(config)),
        *("--host", "127.0.0.1", "--port", str(port), "--threads", str(setup.threads)),
        *("--parallel", str(setup.parallel), "--ctx", str(setup.ctx)),
        *server.extra,
    ]


@dataclass(slots=True)
class Live:
    """A server that runs and answers."""

    server: Server
    setup: Setup
    client: Client
    process: subprocess.Popen[bytes]
    clock: DecodeClock

    @property
    def pid(self) -> int:
        """The server's process, which is the leader of its own session."""
        return self.process.pid


@contextlib.asynccontextmanager
async def running(server: Server, setup: Setup) -> AsyncIterator[Live]:
    """Start a server, wait until it is warm, and end it at the end.

    Raises ServerFailed with the end of its log when it does not come up.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        clock = DecodeClock.create(folder)
        port = _free_port()
        log = folder / "log"
        process = _start(server.command(setup, port, folder), log, clock.environment() | dict(server.environment))
        live = Live(server, setup, Client("127.0.0.1", port), process, clock)
        try:
            await _wait_until_warm(live, log)
            yield live
        finally:
            await _stop(process)


def _start(command: list[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a server in a session of its own, by which the watch knows what belongs to it."""
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=os.environ | environment,
            start_new_session=True,
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _wait_until_warm(live: Live, log: Path) -> None:
    """Wait for /health, then let it answer one request, so that nothing is measured cold."""
    async with asyncio.timeout(START_S):
        while (await live.client.get("/health", timeout_s=2.0)).status != 200:
            if live.process.poll() is not None:
                raise ServerFailed(f"{live.server.name} ended while starting:\n{_tail(log)}")
            await asyncio.sleep(0.1)
    body = {"prompt": "one two three", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    warm_up = live.client.payload("POST", "/v1/completions", body)
    exchange = await live.client.send(warm_up, START_S)
    if not exchange.pieces or b" 200 " not in exchange.pieces[0][1][:16]:
        raise ServerFailed(f"{live.server.name} failed its warm-up:\n{_tail(log)}")


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])


async def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask the server to end; after STOP_S end it and what it started."""
    if process.poll() is None:
        # Twice: the first asks for a drain, and nobody waits for an answer any more.
        process.terminate()
        await asyncio.sleep(0.2)
        process.terminate()
    try:
        await asyncio.to_thread(process.wait, STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        await asyncio.to_thread(process.wait)
