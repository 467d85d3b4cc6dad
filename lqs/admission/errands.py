"""What goes on beside the turns of the event loop, and is waited for at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class Errands:
    """Tasks that nobody waits for until the end. Owner: the event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, deed: Coroutine[Any, Any, None]) -> None:
        """Begin one."""
        task = asyncio.get_running_loop().create_task(deed)
        # The loop itself keeps no task alive.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self, limit_s: float) -> bool:
        """Wait for all, for so long; what goes on then is broken off, and its thread left behind: False."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=limit_s)
        late = list(self._tasks)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)
        return not late
