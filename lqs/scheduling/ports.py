"""What the desk needs of others: who counts, and what the scheduler's thread does."""

from __future__ import annotations

from typing import Protocol

from lqs._core import EV_CANCELLED, EV_EVICTED, EV_EXPIRED, EV_NO_DEVICE, EV_NO_KV
from lqs.request import Outcome, Request

# Ends in the queue, by the core's number.
ENDED = {
    EV_EXPIRED: "expired",
    EV_NO_KV: "no_kv",
    EV_CANCELLED: "cancelled",
    EV_NO_DEVICE: "no_device",
    EV_EVICTED: "evicted",
}
# What a client is told of those that it did not ask for.
REASONS = {"expired": "queue_timeout", "no_kv": "kv_budget", "no_device": "no_device", "evicted": "evicted"}


class Observer(Protocol):
    """Who counts what happens; all calls come from the event loop."""

    def started(self, request: Request, queue_ns: int) -> None: ...
    def foretold(self, expected_ns: int, queue_ns: int) -> None: ...
    def output(self, request: Request, num_tokens: int) -> None: ...
    def finished(self, request: Request, outcome: Outcome) -> None: ...
    def ended(self, request: Request, reason: str) -> None: ...
    def event_lost(self, request: Request, error: Exception) -> None: ...


class Body(Protocol):
    """The body of the scheduler's thread: `run` returns after `stop`."""

    def run(self) -> None: ...
    def stop(self) -> None: ...
