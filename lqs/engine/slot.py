"""One device slot: a native worker and the thread that runs it."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import Any, Protocol

from lqs.request import NS_PER_S

NS_PER_MS = 1_000_000
_STALL_STEPS = 10


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
    def break_at(self, kind: str, *, step: int, rc: int, times: int, for_s: float) -> None: ...
    def snapshot(self) -> dict[str, Any]: ...


class NoWorker:
    """Stands where a device slot could not be opened. `figures` are what a worker counts: nothing here.

    `is_parked`: libllama gave up in the thread that opened it, which stands there for good.
    """

    step_began_ns, budget = 0, 0

    def __init__(self, why: str, figures: dict[str, int] | None = None, *, is_parked: bool = False) -> None:
        self.death = why
        self.is_parked = is_parked
        # In a place of the core where somebody died no other worker can be.
        self.state = "dead" if is_parked else "failed"
        self.calibration: dict[int, float] = {}
        self.swapping: dict[str, float] = {}
        self.figures = figures or {}

    def run(self) -> None: ...
    def stop(self) -> None: ...
    def close(self) -> None: ...
    def break_at(self, kind: str, *, step: int, rc: int, times: int, for_s: float) -> None: ...
    def snapshot(self) -> dict[str, Any]:
        return self.figures


@dataclass(slots=True, eq=False)
class Slot:
    """One device slot and its thread. Owner: the event loop."""

    device: str
    worker: Worker
    kv_tokens: int
    number: int  # The core's; another one when it is opened anew.
    place: int = 0  # Among those of its model.
    cards: tuple[str, ...] = ()  # UUIDs of the GPUs that it runs on.
    lost: str = ""  # Why its GPU cannot be used any more.
    thread: threading.Thread | None = None
    token_bytes: int = 0  # A KV cell.
    num_sequences: int = 1
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

    def stall_ns(self, least_s: float) -> int:
        """A step that takes so long never ends: ten times the slowest that was measured, at least `least_s`."""
        return int(max(least_s * NS_PER_S, _STALL_STEPS * self.slowest_ns))

    @property
    def slowest_ns(self) -> float:
        """The longest step that was measured when it was opened; 0: none was."""
        return max(self.worker.calibration.values(), default=0.0) * NS_PER_MS

    def is_healthy(self, now_ns: int, stall_s: float) -> bool:
        """Whether it works: alive, and not inside one step for too long."""
        began_ns = self.worker.step_began_ns
        is_stalled = began_ns > 0 and now_ns - began_ns > self.stall_ns(stall_s)
        return self.worker.state == "ready" and not is_stalled

    @property
    def death(self) -> str:
        """What killed it; empty while it lives."""
        return self.lost or self.worker.death

    @property
    def state(self) -> str:
        """Its worker's state; "parked" if a thread stands inside libllama for good."""
        return "parked" if self.worker.is_parked else self.worker.state

    def close(self, limit_s: float) -> bool:
        """Stop and free it; False if its thread is parked or does not end, nothing is freed then."""
        self.worker.stop()
        if self.thread is not None and not self.worker.is_parked:
            self.thread.join(limit_s)
        if self.worker.is_parked or (self.thread is not None and self.thread.is_alive()):
            return False
        self.worker.close()
        return True
