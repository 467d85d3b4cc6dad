"""Counts who is inside, so that a request comes in exactly when there is room for it.

A class has places to wait, and so have all classes together. Who can start at once needs none: a
free sequence is room as well, even while the one that will take it is still having its prompt made.
So six at once for one sequence and one place are one that runs, one that waits and four refused,
whichever of them the scheduler sees first, and never more are inside than sequences and places.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from lqs.request import Request


class Seats(NamedTuple):
    """What the living device slots have in all, taken or not."""

    num_sequences: int
    kv_tokens: int


def living_seats(snapshot: Mapping[str, Any]) -> Seats:
    """The seats in the core's snapshot."""
    slots = [slot for slot in snapshot["slots"] if not slot["is_dead"]]
    return Seats(sum(slot["num_sequences"] for slot in slots), sum(slot["capacity"] for slot in slots))


class Places:
    """The bounds of the queue and who counts against them.

    A request is entered, then submitted, then started, then gone; each is told here when the event
    loop learns of it. `seats` is asked only where the places alone do not decide.

    Owner: the event loop.
    """

    def __init__(self, level_caps: Sequence[int], total_cap: int, seats: Callable[[], Seats]) -> None:
        self._level_caps = level_caps
        self._total_cap = total_cap
        self._seats = seats
        self._num_pending = [0] * len(level_caps)  # Not yet started, by class.
        self._num_running = 0
        self._kv_tokens = 0  # Promised to the running, and wanted by those who wait.

    @property
    def num_inside(self) -> int:
        """All that entered and are not gone."""
        return sum(self._num_pending) + self._num_running

    def num_free(self, level: int) -> int:
        """Places to wait that are free for the class."""
        return min(self._level_caps[level] - self._num_pending[level], self._total_cap - sum(self._num_pending))

    def has_room(self, level: int, num_held: int = 0) -> bool:
        """Whether one more may enter, beside so many places that are held for others.

        Nothing is held against one that can start at once.
        """
        num_pending = sum(self._num_pending)
        free_level = self._level_caps[level] - self._num_pending[level] - num_held
        free_total = self._total_cap - num_pending - num_held
        if free_level > 0 and free_total > 0:
            return True
        num_startable = self._num_startable()
        # The better classes start first.
        num_better = sum(self._num_pending[:level])
        return free_level + max(num_startable - num_better, 0) > 0 and free_total + num_startable > 0

    def enter(self, level: int) -> None:
        """It has come in; its prompt is not known yet."""
        self._num_pending[level] += 1

    def submit(self, request: Request) -> None:
        """It is in the core's hands."""
        self._kv_tokens += request.footprint_tokens

    def start(self, level: int) -> None:
        """It got a sequence."""
        self._num_pending[level] -= 1
        self._num_running += 1

    def leave(self, level: int) -> None:
        """It is gone before it was submitted."""
        self._num_pending[level] -= 1

    def settle(self, request: Request, *, has_run: bool) -> None:
        """It is gone after that."""
        self._kv_tokens -= request.footprint_tokens
        if has_run:
            self._num_running -= 1
        else:
            self._num_pending[request.level] -= 1

    def _num_startable(self) -> int:
        """Sequences that those who have not started can count on."""
        seats = self._seats()
        if self._kv_tokens >= seats.kv_tokens:
            # Free sequences are no use where somebody waits for cells.
            return 0
        return max(seats.num_sequences - self._num_running, 0)
