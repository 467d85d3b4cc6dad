"""Watches that the box is quiet: who else took CPU time while something was measured."""

from __future__ import annotations

import asyncio
import os
import time
from collections import defaultdict
from pathlib import Path

from bench.compare.gauge import ticks_of

SHARE_MAX = 0.10
_INTERVAL_S = 0.5
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Watch:
    """Adds up the CPU time of foreign processes, by name: compilers come and go as many.

    Ours are this process and the session of the measured server. Owner: the event loop.
    """

    def __init__(self, session: int) -> None:
        self._session = session
        self._seen: dict[int, int] = {}
        self._ticks_by_name: defaultdict[str, int] = defaultdict(int)
        self._start_s = time.monotonic()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Watch:
        # What was used before the watch began is not counted.
        self._look()
        self._ticks_by_name.clear()
        self._start_s = time.monotonic()
        self._task = asyncio.create_task(self._look_on())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        self._look()

    async def _look_on(self) -> None:
        while True:
            await asyncio.sleep(_INTERVAL_S)
            self._look()

    def _look(self) -> None:
        own = os.getpid()
        for entry in os.scandir("/proc"):
            if entry.name.isdigit() and int(entry.name) != own:
                self._count(int(entry.name))

    def _count(self, pid: int) -> None:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return  # It has ended in between.
        name, fields = stat[stat.index("(") + 1 : stat.rindex(")")], stat.rpartition(")")[2].split()
        if int(fields[3]) == self._session:
            return
        ticks = ticks_of(stat)
        self._ticks_by_name[name] += ticks - self._seen.get(pid, 0)
        self._seen[pid] = ticks

    def disturbers(self) -> list[str]:
        """Return who took more than SHARE_MAX of a core, with their shares."""
        elapsed_s = time.monotonic() - self._start_s
        shares = {n: t / _TICKS_PER_S / elapsed_s for n, t in self._ticks_by_name.items()}
        loud = sorted((-share, name) for name, share in shares.items() if share > SHARE_MAX)
        return [f"{name} {-share:.0%}" for share, name in loud]
