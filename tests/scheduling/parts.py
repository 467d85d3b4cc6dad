"""A receiver for the tests of everything that hands requests on."""

from __future__ import annotations

from typing import Any

from lqs.request import Request


class Told:
    """A sink, and an observer, that keep what they are told."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def started(self, *args: Any) -> None:
        self.events.append("started")

    def foretold(self, expected_ns: int, queue_ns: int) -> None:
        self.events.append(("foretold", expected_ns, queue_ns))

    def output(self, *args: Any) -> None:
        self.events.append(("output", *args[-3:]))

    def finished(self, *args: Any) -> None:
        self.events.append(("finished", args[-1].finish))

    def ended(self, *args: Any) -> None:
        self.events.append(("ended", args[-1]))

    def event_lost(self, request: Request, error: Exception) -> None:
        self.events.append(("lost", type(error).__name__))

    def settled(self) -> None:
        self.events.append("settled")
