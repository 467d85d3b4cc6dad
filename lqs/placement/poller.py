"""Reads the GPUs in a thread of its own, so that a driver that hangs keeps nobody waiting.

    poller thread                      any other thread
    read -> Snapshot                   latest        what was read last, at once
      |                                refresh       wait for a read that begins now, bounded
      +-- latest = snapshot
      +-- on_snapshot(snapshot)        in the poller's thread

A snapshot never changes; `latest` is one reference that is replaced whole, so it is read without a lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from lqs.placement.gpus import Snapshot

_THREAD = "lqs-nvml"


class Reads(Protocol):
    """What the poller reads with; see `Reader`."""

    def read(self, now_ns: int) -> Snapshot: ...
    def close(self) -> None: ...


class Poller:
    """Keeps `latest` up to date.

    `make_reader` is called in the poller's thread, which alone reads and closes. `on_snapshot` is called
    there after each read.

    Owner: whoever starts it; `latest` and `refresh` are for all threads.
    """

    def __init__(
        self,
        make_reader: Callable[[], Reads],
        *,
        interval_s: float = 1.0,
        on_snapshot: Callable[[Snapshot], None] = lambda _: None,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._make_reader = make_reader
        self._interval_s = interval_s
        self._on_snapshot = on_snapshot
        self._now_ns = now_ns
        self._is_wanted = threading.Event()
        self._is_stopping = False
        # Counts reads, so that `refresh` knows one that began after it was asked.
        self._turns = threading.Condition()
        self._num_begun = self._num_ended = 0
        # A daemon: a read that hangs in the driver must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=_THREAD, daemon=True)
        self.latest = Snapshot()

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def stop(self, limit_s: float) -> bool:
        """End the thread and its session with NVML; False if it hangs in the driver for longer than this."""
        with self._turns:
            self._is_stopping = True
            self._turns.notify_all()
        self._is_wanted.set()
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def refresh(self, limit_s: float) -> Snapshot:
        """What a read sees that begins now; the last there is, if that takes longer or the poller ends.

        Before memory is taken: what was free a second ago may be gone. Not for the event loop.
        """
        with self._turns:
            wanted = self._num_begun + 1
            self._is_wanted.set()
            self._turns.wait_for(lambda: self._num_ended >= wanted or self._is_stopping, limit_s)
        return self.latest

    def _run(self) -> None:
        reader = self._make_reader()
        try:
            while not self._is_stopping:
                self._turn(reader)
                self._is_wanted.wait(self._interval_s)
                self._is_wanted.clear()
        finally:
            reader.close()

    def _turn(self, reader: Reads) -> None:
        with self._turns:
            self._num_begun += 1
        self.latest = snapshot = reader.read(self._now_ns())
        with self._turns:
            self._num_ended += 1
            self._turns.notify_all()
        self._on_snapshot(snapshot)
