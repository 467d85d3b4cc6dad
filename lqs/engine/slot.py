"""One device slot: a native worker and the thread that runs it."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import Any, Protocol

from lqs.request import NS_PER_S


class Worker(Protocol):
    """The native worker, as far as its life goes."""

    @property
    def state(self) -> str: ...
    @property
    def is_parked(self) -> bool: ...
    @property
    def death(self) -> str: ...
    @property
    def step_began_ns(self) -> int: ...
    @property
    def budget(self) -> int: ...
    @property
    def calibration(self) -> dict[int, float]: ...
    @property
    def swapping(self) -> dict[str, float]: ...
    def run(self) -> None: ...
    def stop(self) -> None: ...
    def close(self) -> None: ...
    def break_at(self, kind: str, *, step: int) -> None: ...
    def snapshot(self) -> dict[str, Any]: ...


@dataclass(slots=True)
class Slot:
    """One device slot and its thread. Owner: the event loop."""

    device: str
    worker: Worker
    kv_tokens: int
    number: int  # The core's.
    thread: threading.Thread | None = None
    cards: tuple[str, ...] = ()  # UUIDs of the GPUs that it runs on.
    token_bytes: int = 0  # A KV cell.
    cores: frozenset[int] = frozenset()  # Where its thread, and those that compute for it, run; empty: anywhere.

    def start(self) -> None:
        """Start the worker's thread."""
        self.thread = threading.Thread(target=self._run, name=f"lqs-{self.device}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        # Threads that libllama starts later to compute with stay on the same cores.
        if self.cores:
            os.sched_setaffinity(0, self.cores)
        self.worker.run()

    def is_healthy(self, now_ns: int, stall_s: float) -> bool:
        """Whether it works: alive, and not inside one step for too long."""
        began_ns = self.worker.step_began_ns
        is_stalled = began_ns > 0 and now_ns - began_ns > stall_s * NS_PER_S
        return self.worker.state == "ready" and not is_stalled

    @property
    def state(self) -> str:
        """Its worker's state; "parked" if a thread stands inside libllama for good."""
        return "parked" if self.worker.is_parked else self.worker.state

    def close(self, limit_s: float) -> bool:
        """Stop and free it; False if its thread is parked or does not end, nothing is freed then."""
        self.worker.stop()
        if self.thread is not None:
            self.thread.join(limit_s)
        if self.worker.is_parked or (self.thread is not None and self.thread.is_alive()):
            return False
        self.worker.close()
        return True
