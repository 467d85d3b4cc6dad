"""Loads that failed: why, and when each may be tried again."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from lqs.engine.store import Stamp, stamp_of
from lqs.request import NS_PER_S

if TYPE_CHECKING:
    from lqs.engine.served import Served

# A load that failed is not tried again for so long, and twice as long after each further failure, unless its file
# has changed.
_AGAIN_S, _AGAIN_S_MAX = 5.0, 320.0


class Failures:
    """What is remembered of failed loads, by model. Owner: the event loop."""

    def __init__(self) -> None:
        self._not_before_ns: dict[str, int] = {}
        self._stamps: dict[str, Stamp | None] = {}  # Of the file when it was loaded last.
        self._num_failures: Counter[str] = Counter()  # In a row.
        self._num_ever: Counter[str] = Counter()
        self._reasons: dict[str, str] = {}

    def begin(self, served: Served) -> None:
        """A load begins. Before the file is read: what is written meanwhile is news."""
        self._stamps[served.name] = stamp_of(served.path)

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

    def has_changed(self, served: Served) -> bool:
        """Whether its file is another one than when it was loaded last."""
        return stamp_of(served.path) != self._stamps[served.name]

    def let_try(self, name: str) -> None:
        """It may be tried again now."""
        self._not_before_ns.pop(name, None)
