"""Looks after several things again and again, so that one that fails does not end the look at the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from lqs.errors import place_of
from lqs.observe.log import Log

T = TypeVar("T")


class Upkeep(Generic[T]):
    """What is to be done each time, by name, in order. Owner: the thread that calls `look`.

    A duty that fails is told once, and once more when it does well again; it is tried each time.
    """

    def __init__(self, duties: Mapping[str, Callable[[T], Any]], log: Log) -> None:
        self._duties = duties
        self._log = log
        self._failing: set[str] = set()

    def look(self, what: T) -> None:
        """Do all of it."""
        for name, duty in self._duties.items():
            try:
                duty(what)
            except Exception as error:
                self._failed(name, error)
            else:
                self._did_well(name)

    def _failed(self, name: str, error: Exception) -> None:
        if name in self._failing:
            return
        self._failing.add(name)
        self._log.error("unexpected error", looking_after=name, reason=place_of(error))

    def _did_well(self, name: str) -> None:
        if name in self._failing:
            self._failing.discard(name)
            self._log.info("looked after again", looking_after=name)
