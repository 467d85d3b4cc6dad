"""Watches a load that runs in a thread: whether it gets on, and at the end whether it is over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from lqs.errors import DeviceError

_LOOK_S = 0.5


async def watch_load(
    loading: asyncio.Future[Any],
    stopping: asyncio.Event,
    *,
    progress: Callable[[], float],
    name: str,
    limit_s: float,
) -> bool:
    """Wait for a load; False if the server is to stop first.

    Raises DeviceError if nothing gets on for `limit_s`.
    """
    stop = asyncio.ensure_future(stopping.wait())
    seen, moved_s = progress(), time.monotonic()
    try:
        while not loading.done() and not stop.done():
            await asyncio.wait((loading, stop), timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            if progress() != seen:
                seen, moved_s = progress(), time.monotonic()
            elif not loading.done() and time.monotonic() - moved_s > limit_s:
                raise DeviceError(f"{name}: no progress in loading it for {limit_s:g} s.")
    finally:
        stop.cancel()
    return loading.done()


async def end_load(loading: asyncio.Future[Any], limit_s: float) -> bool:
    """Wait a while for a load, for nothing can break off a native one; False if it is left to its thread."""
    await asyncio.wait((loading,), timeout=limit_s)
    if not loading.done():
        loading.cancel()
        return False
    # It was told already where it failed before the stop. After it nobody needs it any more.
    loading.exception()
    return True
