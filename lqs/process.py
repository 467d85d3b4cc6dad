"""What the server does with its process: threads to leave behind, open files, the end."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


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
