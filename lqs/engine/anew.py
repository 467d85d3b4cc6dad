"""Device slots that are opened anew in threads of their own, while their model may come and go."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lqs.engine.served import Served
from lqs.engine.slot import Slot
from lqs.errors import DeviceError


class Anew:
    """Which are being opened, which are open and wait for somebody to take them up, and which are left for good.

    A lock, because a thread that opens one begins when it likes: once `close_off` has returned, none begins.
    Owner: the event loop; `opening` is for the thread that opens.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opening: defaultdict[str, set[int]] = defaultdict(set)  # Their numbers in the core.
        self._spare: defaultdict[str, list[Slot]] = defaultdict(list)
        self._left: defaultdict[str, list[Slot]] = defaultdict(list)

    @contextmanager
    def opening(self, served: Served, number: int) -> Iterator[list[Slot]]:
        """While the one of that number in the core is opened; it is put on the list.

        Raises DeviceError where its model leaves.
        """
        with self._lock:
            if served.is_absent:
                raise DeviceError(f"{served.name} leaves.")
            self._opening[served.name].add(number)
        opened: list[Slot] = []
        try:
            yield opened
        finally:
            with self._lock:
                self._opening[served.name].discard(number)
                self._spare[served.name] += opened

    def close_off(self, served: Served) -> None:
        """From now on none of the model's is opened anew."""
        with self._lock:
            served.is_loading = served.is_absent = True

    def is_opening(self, served: Served, is_dead: Callable[[int], bool]) -> bool:
        """Whether one of the model's is being opened; where one is dead libllama gave up, and its thread never ends."""
        with self._lock:
            return not all(is_dead(number) for number in self._opening[served.name])

    def take(self, served: Served, new: Slot, old: Slot) -> None:
        """The new one is taken up; the old one, which is dead, is left as it is."""
        with self._lock:
            self._spare[served.name].remove(new)
        self._left[served.name].append(old)

    def pop_spare(self, served: Served) -> list[Slot]:
        """Those of the model that nobody took up."""
        with self._lock:
            return self._spare.pop(served.name, [])

    def leave(self, served: Served, slot: Slot) -> None:
        """It cannot be freed."""
        self._left[served.name].append(slot)

    def pop_left(self, served: Served) -> list[Slot]:
        """Those of the model that could not be freed since it came, as a thread may stand in them."""
        return self._left.pop(served.name, [])
