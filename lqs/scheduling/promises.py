"""Who was sent away and told when to come back finds a place when it does.

Each refusal is a promise: the next place of its class that nobody was promised. So the refused stand in
a line behind the queue, in order, and are told times one service time apart.

    places that come free    |   |   |   |   |   |        one per service time
    promised to              a   b   c   d                the next refusal is told e's time
    held against newcomers   [a   b]                      what is due within a moment, or just was

A place is held only around its promised time. Who does not come by then loses it, and how many of the
promised come at all is learnt: where only half return, half as much is held and told.

A promise is kept to whoever comes with the same key and the same mark. The official SDK counts its
tries in `x-stainless-retry-count`, which is 0 for a newcomer; a client without that header comes back
as it came. So no client is known by name, and nobody can use the promises of another key.
"""

from __future__ import annotations

import random
from bisect import bisect_right, insort
from collections.abc import Callable
from heapq import heappop, heappush
from typing import NamedTuple

from lqs.errors import RETRY_AFTER_S_MAX, RETRY_AFTER_S_MIN
from lqs.request import NS_PER_S, Request

# A place is held from a moment before its time on, and for a moment after it: the header counts whole
# seconds, and a client needs time to come.
HELD_BEFORE_NS = 1 * NS_PER_S
HELD_AFTER_NS = 2 * NS_PER_S
# Clocks and timers of clients are not ours.
_EARLY_NS = 50_000_000
# Promises of one class; who is refused beyond that is told a time and promised nothing.
PROMISES_MAX = 4096
# At most this part of the places is held, so that a queue is never kept empty for those who do not come.
HELD_SHARE_MAX = 0.5
# Returns are learnt over about so many promises, and never taken to be rarer than this.
_MEMORY, _RETURN_MIN = 64, 0.125
# Places come free by chance: the k-th may be late by so many times the root of k.
_SLACK = 0.5
# What is told beyond the longest time is spread over its last part.
_SPREAD_FROM = 0.75


class _Holder(NamedTuple):
    """By what a promise is known again."""

    key_index: int
    is_marked: bool


class _Promise(NamedTuple):
    """A place at a time, in the class in which its holder was refused."""

    due_ns: int
    level: int


class _Awaited(NamedTuple):
    """A promise whose place has not come free yet."""

    number: int  # Of all places of the class that ever came free.
    made_ns: int
    told_ns: int


class _Line:
    """The promises of one class."""

    def __init__(self) -> None:
        self.due_ns: list[int] = []  # All, in order.
        self.by_holder: dict[_Holder, list[_Promise]] = {}
        self.return_share = 1.0
        self.num_freed = 0
        self.weight = 0.0  # Of the places that came free lately.
        self.awaited: list[_Awaited] = []  # A heap.

    def add(self, holder: _Holder, promise: _Promise) -> None:
        insort(self.due_ns, promise.due_ns)
        insort(self.by_holder.setdefault(holder, []), promise)

    def take(self, holder: _Holder) -> None:
        """Keep the first promise of a holder."""
        own = self.by_holder[holder]
        self.due_ns.pop(bisect_right(self.due_ns, own.pop(0).due_ns) - 1)
        if not own:
            del self.by_holder[holder]

    def learn(self, has_returned: bool) -> None:
        self.return_share += (has_returned - self.return_share) / _MEMORY

    @property
    def share(self) -> float:
        """How many of those who are waited for will come."""
        return max(self.return_share, _RETURN_MIN)

    def expire(self, now_ns: int) -> None:
        """Forget those who have not come in time."""
        num = bisect_right(self.due_ns, now_ns - HELD_AFTER_NS)
        if not num:
            return
        del self.due_ns[:num]
        for holder, own in list(self.by_holder.items()):
            del own[: bisect_right(own, now_ns - HELD_AFTER_NS, key=_due_of)]
            if not own:
                del self.by_holder[holder]
        for _ in range(num):
            self.learn(False)


class Promises:
    """The promised places of all classes.

    `observe` is told, for each promise, the time it named over the time after which its place came free.

    Owner: the event loop.
    """

    def __init__(
        self,
        num_levels: int,
        *,
        rng: random.Random | None = None,
        observe: Callable[[float], None] = lambda ratio: None,
    ) -> None:
        self._lines = [_Line() for _ in range(num_levels)]
        self._rng = rng or random.Random()
        self._observe = observe
        self.num_made = self.num_kept = 0

    def refused(self, request: Request, *, num_free: int, service_ns: float, now_ns: int, least_ns: int = 0) -> int:
        """Nanoseconds after which there is a place for one more, which is promised to the request.

        `service_ns` is the time in which its class frees one place, `num_free` those that are free
        already; nothing below `least_ns` is told.
        """
        line = self._lines[request.class_asked]
        line.expire(now_ns)
        num_before = max(len(line.due_ns) * line.share - num_free, 0.0)
        wait_ns = int(service_ns * (num_before + 1 + _SLACK * (num_before + 1) ** 0.5))
        drawn_ns = int(self._rng.random() * min(service_ns, NS_PER_S))
        wait_ns = max(wait_ns, least_ns, int(RETRY_AFTER_S_MIN * NS_PER_S)) + drawn_ns
        if wait_ns > RETRY_AFTER_S_MAX * NS_PER_S or len(line.due_ns) >= PROMISES_MAX:
            return int(self._rng.uniform(_SPREAD_FROM, 1.0) * RETRY_AFTER_S_MAX * NS_PER_S)
        line.add(_holder_of(request), _Promise(now_ns + wait_ns, request.level))
        self.num_made += 1
        if len(line.awaited) < PROMISES_MAX:
            heappush(line.awaited, _Awaited(line.num_freed + int(num_before) + 1, now_ns, wait_ns))
        return wait_ns

    def num_held(self, level: int, now_ns: int, places: int) -> int:
        """Places of a class, out of `places`, that newcomers may not have just now."""
        line = self._lines[level]
        if not line.due_ns:
            return 0
        line.expire(now_ns)
        num_due = bisect_right(line.due_ns, now_ns + HELD_BEFORE_NS)
        return min(round(num_due * line.share), int(places * HELD_SHARE_MAX))

    def level_due(self, request: Request, now_ns: int) -> int | None:
        """The class in which the request was promised a place that it comes for; None: it was not."""
        if request.retry_count == 0:
            return None
        line = self._lines[request.class_asked]
        line.expire(now_ns)
        own = line.by_holder.get(_holder_of(request))
        return own[0].level if own and own[0].due_ns <= now_ns + _EARLY_NS else None

    def entered(self, request: Request, now_ns: int) -> None:
        """It has come in; its promise is kept, if it had one."""
        if self.level_due(request, now_ns) is not None:
            line = self._lines[request.class_asked]
            line.take(_holder_of(request))
            line.learn(True)
            self.num_kept += 1

    def freed(self, request: Request, now_ns: int) -> None:
        """The request's place came free."""
        line = self._lines[request.class_asked]
        line.num_freed += 1
        for each in self._lines:
            each.weight *= 1 - 1 / _MEMORY
        line.weight += 1 / _MEMORY
        while line.awaited and line.awaited[0].number <= line.num_freed:
            promise = heappop(line.awaited)
            # Nothing below the least wait could have been told.
            self._observe(promise.told_ns / max(now_ns - promise.made_ns, int(RETRY_AFTER_S_MIN * NS_PER_S)))

    def share_freed(self, level: int) -> float:
        """How many of the places that come free are of this class, lately."""
        total = sum(line.weight for line in self._lines)
        return self._lines[level].weight / total if total else 1.0

    def num_promised(self, level: int, now_ns: int) -> int:
        """Promises of the class that may still be claimed."""
        self._lines[level].expire(now_ns)
        return len(self._lines[level].due_ns)

    def return_share(self, level: int) -> float:
        """How many of the promised came back, lately."""
        return self._lines[level].return_share


def _due_of(promise: _Promise) -> int:
    return promise.due_ns


def _holder_of(request: Request) -> _Holder:
    return _Holder(request.tenant.key_index, request.retry_count is not None)
