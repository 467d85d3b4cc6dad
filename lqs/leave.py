"""How a server comes to its end: it drains, or it hands over to a successor on the same socket.

A drain refuses what is new and serves what is here. A hand-over refuses nobody: new connections are the
successor's, and who is here is served, on each connection once more; then it is closed.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

from lqs.api.services import Control, Reloaded, Services
from lqs.engine.plan import probe_machine
from lqs.listen import HttpServer
from lqs.parent import ask_restart, ask_successor, notify
from lqs.process import Stoppable, in_thread

# What is cancelled at the end still needs a step of the engine and a last write.
LAST_WORDS_S = 1
_LOOK_S = 0.05
# How much more than this process a second one may take.
_GROWTH = 1.25


def announce(environ: Mapping[str, str], devices: Iterable[str], more_bytes: int) -> None:
    """Tell who started this process that it serves, and whether a successor fits beside it.

    `devices` are those of all models, also of those on demand that are not there.
    """
    notify(environ, f"READY=1\nX_LQS_OVERLAP={fits_twice(devices, more_bytes):d}")


def make_control(
    server: Callable[[], Stoppable], reload: Callable[[], Reloaded], environ: Mapping[str, str]
) -> Control:
    """What an admin may ask of the process that `server` gives."""

    def end() -> None:
        # Before it begins: a successor may be on its way, and even replace one that drains.
        say_end(environ)
        server().stop()

    return Control(
        end,
        reload,
        lambda: in_thread(partial(ask_restart, environ), "lqs-restart"),
        lambda: in_thread(partial(ask_successor, environ), "lqs-restart"),
    )


def say_end(environ: Mapping[str, str]) -> None:
    """Tell who started this process that it was told to end, so that no successor takes its place."""
    notify(environ, "STOPPING=1\nX_LQS_DRAIN=1")


async def take_leave(services: Services, http: HttpServer | None, stop_wanted: asyncio.Event) -> None:
    """Serve what is here: drain if the server is to stop, else hand over."""
    if stop_wanted.is_set() or http is None:
        say_end(os.environ)
        await drain(services)
    else:
        notify(os.environ, "STOPPING=1")
        await hand_over(services, http, stop_wanted)


async def drain(services: Services) -> None:
    """Let nobody in, serve what is in until the limit, cancel the rest."""
    desk, limit_s = services.desk, services.config.server.drain_s
    services.gate.drain(time.monotonic_ns())
    services.log.info("draining", requests=desk.num_inside, limit_s=limit_s)
    if not await desk.wait_idle(limit_s):
        await _cut(services)


async def hand_over(services: Services, http: HttpServer, stop_wanted: asyncio.Event) -> None:
    """Accept nobody any more and serve who is connected until the limit; once a stop is wanted too, drain."""
    limit_s = services.config.server.drain_s
    http.leave()
    services.log.info(
        "handing over", connections=http.num_connections, requests=services.desk.num_inside, limit_s=limit_s
    )
    end_s = time.monotonic() + limit_s
    # Connections end by themselves; uvicorn tells nobody.
    while http.num_connections and time.monotonic() < end_s and not stop_wanted.is_set():  # noqa: ASYNC110
        await asyncio.sleep(_LOOK_S)
    if stop_wanted.is_set():
        await drain(services)
    elif http.num_connections:
        services.gate.drain(time.monotonic_ns())
        await _cut(services)


async def _cut(services: Services) -> None:
    """The limit is reached: end what is left, and tell it why."""
    services.log.warning("drain limit reached", requests=services.desk.num_inside)
    services.gate.shut()
    services.desk.cancel_all("draining")
    await services.desk.wait_idle(LAST_WORDS_S)


def fits_twice(devices: Iterable[str], more_bytes: int) -> bool:
    """Whether a successor may load beside this process: on CPUs, and what it takes is free.

    That is what this one takes, and `more_bytes` that it looks for at its start. Weights are mapped, so both have
    them once; what is not is taken to grow a little. What a GPU has free changes from one moment to the next, so
    nobody counts on it.
    """
    if not all(device.startswith("cpu") for device in devices):
        return False
    own = own_bytes(Path("/proc/self/status").read_text())
    return probe_machine().memory_free_bytes >= own * _GROWTH + more_bytes


def own_bytes(status: str) -> int:
    """Memory that is this process's alone, from the text of /proc/self/status."""
    lines = (line.split() for line in status.splitlines())
    return sum(int(words[1]) * 1024 for words in lines if words[0] in ("RssAnon:", "RssShmem:"))
