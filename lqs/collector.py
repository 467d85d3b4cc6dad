"""Keeps Python's garbage collector from stopping the event loop.

A full collection looks at every object there is: with 4,000 requests waiting that takes 0.3 s, and while
they come in Python starts one after another; no probe is answered meanwhile. But hardly anything of a
request hangs in a cycle (40 objects in 4,000 requests outlived the young generations), so full collections
can wait until few requests are inside. The young generations are collected as ever, in a few milliseconds.
"""

from __future__ import annotations

import gc

from lqs.request import NS_PER_S

# So few requests that a full collection of what they hold is not noticed.
NUM_INSIDE_QUIET = 64
EVERY_NS = 60 * NS_PER_S
# A server that is never quiet pays the pause now and then, rather than grow for ever.
AT_LATEST_NS = 3600 * NS_PER_S
# So many collections of the middle generation do not happen.
_NEVER = 1 << 30


class Collector:
    """Decides when a full collection is made.

    Owner: the event loop.
    """

    def __init__(self) -> None:
        self._last_ns = 0
        self._thresholds = gc.get_threshold()

    def start(self, now_ns: int) -> None:
        """Take over, once everything is loaded: what lives now stays, and is never looked at again."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(*self._thresholds[:2], _NEVER)
        self._last_ns = now_ns

    def tend(self, num_inside: int, now_ns: int) -> None:
        """Collect everything if it is time; `num_inside` counts the requests."""
        passed_ns = now_ns - self._last_ns
        if passed_ns >= AT_LATEST_NS or (passed_ns >= EVERY_NS and num_inside <= NUM_INSIDE_QUIET):
            gc.collect()
            self._last_ns = now_ns

    def stop(self) -> None:
        """Give the collector back to the interpreter."""
        gc.unfreeze()
        gc.set_threshold(*self._thresholds)
