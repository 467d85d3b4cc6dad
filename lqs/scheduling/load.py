"""Whether the load is high: of what runs, and of what waits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_HIGH = 0.80
# A snapshot costs more than an admission; nothing that matters here changes within this time.
_FRESH_NS = 50_000_000


class Load:
    """Looks at the core's snapshot now and then.

    High is more than 0.80 of the KV that living device slots can promise, or of the places to wait.

    Owner: the event loop.
    """

    def __init__(self, snapshot: Callable[[], Mapping[str, Any]], total_cap: int, clock: Callable[[], int]) -> None:
        self._snapshot = snapshot
        self._total_cap = total_cap
        self._clock = clock
        self._looked_ns: int | None = None
        self._is_high = False

    def is_high(self) -> bool:
        """Whether it is, or was a moment ago."""
        now_ns = self._clock()
        if self._looked_ns is None or not 0 <= now_ns - self._looked_ns < _FRESH_NS:
            self._looked_ns = now_ns
            self._is_high = self._look() > _HIGH
        return self._is_high

    def _look(self) -> float:
        core = self._snapshot()
        living = [slot for slot in core["slots"] if not slot["is_dead"]]
        capacity = sum(slot["capacity"] for slot in living)
        reserved = sum(slot["reserved"] for slot in living)
        num_waiting = sum(level["num_waiting"] for level in core["levels"])
        kv_share: float = reserved / capacity if capacity else 0.0
        queue_share: float = num_waiting / self._total_cap
        return max(kv_share, queue_share)
