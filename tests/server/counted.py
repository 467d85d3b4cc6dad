"""Runs `lqs`, and at SIGUSR2 gives free memory back and writes what is alive in it, for a test that counts.

The first argument is the file to write to; the rest is lqs's own.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from lqs.cli import main
from lqs.request import Request
from lqs.scheduling.desk import Ticket
from lqs.streaming.outlet import Outlet


def write(path: Path) -> None:
    """Write the numbers in one move."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    alive = [type(thing) for thing in gc.get_objects()]
    counts = {kind.__name__: alive.count(kind) for kind in (Request, Ticket, Outlet)}
    draft = path.with_suffix(".new")
    draft.write_text(json.dumps(counts | {"tasks": len(asyncio.all_tasks())}))
    os.replace(draft, path)


if __name__ == "__main__":
    target = Path(sys.argv[1])

    def on_signal(_: int, __: FrameType | None) -> None:
        write(target)

    signal.signal(signal.SIGUSR2, on_signal)
    sys.exit(main(sys.argv[2:]))
