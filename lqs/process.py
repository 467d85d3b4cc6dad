"""What the server does with its process: threads to leave behind, open files, the end."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

T = TypeVar("T")


class Stoppable(Protocol):
    """A server: runs until it is stopped or replaced, and reads its config again when told."""

    async def run(self) -> int: ...
    def stop(self) -> None: ...
    def hand_over(self) -> None: ...
    def reload(self) -> object: ...


class Hangup:
    """Remembers a SIGHUP that comes before the server can heed it. Owner: the main thread."""

    def __init__(self) -> None:
        self.was_asked = False
        signal.signal(signal.SIGHUP, self._note)

    def _note(self, *_: object) -> None:
        self.was_asked = True


def leave(code: int) -> None:
    """End the process now, whatever its threads do."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


async def in_thread(function: Callable[[], T], name: str) -> T:
    """Call something slow in a thread that the process does not wait for at its end."""
    done: Future[T] = Future()
    # Who waits may give up; the thread goes on, and its result is then dropped.
    done.set_running_or_notify_cancel()

    def body() -> None:
        try:
            done.set_result(function())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=body, name=name, daemon=True).start()
    return await asyncio.wrap_future(done)


def raise_file_limit() -> None:
    """Allow as many open files as the system lets us: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def run_with_signals(server: Stoppable, hangup: Hangup | None = None) -> int:
    """Drain on the first SIGTERM or SIGINT, leave on the second, reload on SIGHUP, hand over on SIGUSR1."""
    loop = asyncio.get_running_loop()
    num_asked = 0

    def ask() -> None:
        nonlocal num_asked
        num_asked += 1
        if num_asked > 1:
            leave(1)
        server.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ask)
    loop.add_signal_handler(signal.SIGHUP, server.reload)
    loop.add_signal_handler(signal.SIGUSR1, server.hand_over)
    # A supervisor has them wait until there is somebody to heed them.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))
    if hangup is not None and hangup.was_asked:
        server.reload()
    try:
        return await server.run()
    finally:
        # There is nothing left to reload, and the loop's end would have it end the process.
        loop.remove_signal_handler(signal.SIGHUP)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
