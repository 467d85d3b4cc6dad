"""Loads that failed: why, and when each may be tried again."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from lqs.engine.store import Stamp, stamp_of
from lqs.observe.log import Log
from lqs.request import NS_PER_S

if TYPE_CHECKING:
    from lqs.engine.served import Served

# A load that failed is not tried again for so long, and twice as long after each further failure, unless its file
# has changed.
_AGAIN_S, _AGAIN_S_MAX = 5.0, 320.0
# How often the file of one that is put off is looked at. One that is the same twice is not being copied any more.
_LOOK_NS = NS_PER_S

# Calls a function in a thread of its own, under a name.
InThread = Callable[[Callable[[], Any], str], Awaitable[Any]]


class Failures:
    """What is remembered of failed loads, by model.

    Files are looked at in threads: what they lie on may hang. Owner: the event loop.
    """

    def __init__(self, in_thread: InThread, log: Log) -> None:
        self._in_thread = in_thread
        self._log = log
        self._not_before_ns: dict[str, int] = {}
        self._stamps: dict[str, Stamp | None] = {}  # Of the file when it was loaded last.
        self._seen: dict[str, Stamp | None] = {}  # ... and when it was looked at last since then.
        self._looks: dict[str, asyncio.Task[None]] = {}  # Under way: one for each model at most.
        self._look_again_ns: dict[str, int] = {}
        self._num_failures: Counter[str] = Counter()  # In a row.
        self._num_ever: Counter[str] = Counter()
        self._reasons: dict[str, str] = {}

    async def begin(self, served: Served) -> None:
        """A load begins. Before the file is read: what is written meanwhile is news."""
        self._stamps[served.name] = await self._stamp(served)
        self._seen.pop(served.name, None)

    def end_well(self, name: str) -> None:
        """It is loaded."""
        self._num_failures[name] = 0
        self._reasons.pop(name, None)

    def end_badly(self, name: str, reason: str, now_ns: int) -> float:
        """It failed; seconds until it is tried again."""
        wait_s: float = min(_AGAIN_S * 2 ** self._num_failures[name], _AGAIN_S_MAX)
        self._num_failures[name] += 1
        self._num_ever[name] += 1
        self._not_before_ns[name] = now_ns + int(wait_s * NS_PER_S)
        self._reasons[name] = reason
        return wait_s

    def num_ever(self, name: str) -> int:
        """How many loads of it have failed."""
        return self._num_ever[name]

    def reason(self, name: str) -> str | None:
        """Why the last load failed; None if it did not."""
        return self._reasons.get(name)

    def left_s(self, name: str, now_ns: int) -> float:
        """Seconds until it may be tried again; 0 or less: now."""
        return (self._not_before_ns.get(name, 0) - now_ns) / NS_PER_S

    def look(self, find: Callable[[str], Served | None], now_ns: int) -> None:
        """Begin to look at the files of those that are put off and would come by themselves; called now and then.

        One whose file is another than when it was loaded, and stays so from one look to the next, may be tried again.
        """
        for name, not_before_ns in self._not_before_ns.items():
            served = find(name)
            is_due = not_before_ns > now_ns >= self._look_again_ns.get(name, 0) and name not in self._looks
            if is_due and served is not None and served.is_on_demand:
                self._look_again_ns[name] = now_ns + _LOOK_NS
                self._looks[name] = asyncio.get_running_loop().create_task(self._look(served))

    def close(self) -> None:
        """Look no more. A thread that hangs in it is left to itself."""
        for task in self._looks.values():
            task.cancel()

    async def _look(self, served: Served) -> None:
        name = served.name
        try:
            stamp = await self._stamp(served)
        finally:
            del self._looks[name]
        is_still = name in self._seen and self._seen[name] == stamp
        self._seen[name] = stamp
        # An admin may have let it try meanwhile.
        if is_still and stamp != self._stamps[name] and name in self._not_before_ns:
            self._log.info("model file has changed", model=name)
            self.let_try(name)

    async def _stamp(self, served: Served) -> Stamp | None:
        stamp: Stamp | None = await self._in_thread(partial(stamp_of, served.path), f"lqs-look-{served.name}"[:15])
        return stamp

    def let_try(self, name: str) -> None:
        """It may be tried again now."""
        self._not_before_ns.pop(name, None)
