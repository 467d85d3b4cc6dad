"""Memory promised to loads that have begun and not yet taken what they will."""

from __future__ import annotations

from lqs.placement.gpus import Gpu, headroom_bytes


class Loads:
    """Keeps two loads that are decided at the same moment from counting on the same memory.

    What is free moves both ways while a load runs, since others use the card too. So nothing is expected of
    it: before a load begins it is read anew, and a promise counts in full until the load ends, though part
    of it is taken by then. That may refuse a load which would have fitted, never admit one that does not.

    Owner: the thread that decides about loads.
    """

    def __init__(self, margin_bytes: int) -> None:
        self._margin_bytes = margin_bytes
        self._promised: dict[str, int] = {}

    def headroom_bytes(self, gpu: Gpu) -> int | None:
        """What a load that begins now may take; None where the driver cannot tell."""
        free = headroom_bytes(gpu, self._margin_bytes)
        return None if free is None else max(free - self._promised.get(gpu.pool, 0), 0)

    def try_reserve(self, gpu: Gpu, num_bytes: int) -> bool:
        """Promise memory by a reading just made; False if it does not fit. Pairs with `release`.

        Where nobody can tell what is free, it is promised: then the load itself finds out.
        """
        headroom = self.headroom_bytes(gpu)
        if headroom is not None and num_bytes > headroom:
            return False
        self._promised[gpu.pool] = self._promised.get(gpu.pool, 0) + num_bytes
        return True

    def release(self, gpu: Gpu, num_bytes: int) -> None:
        """The load has ended, well or not: what it took shows in what is free."""
        left = self._promised[gpu.pool] - num_bytes
        assert left >= 0, "more was released than promised"
        self._promised[gpu.pool] = left
