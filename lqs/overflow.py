"""What an operator can set about a queue that fills up; a part of `[queue]`.

Apart from `config`, which takes it in, because it is long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, TypeVar

from msgspec import Meta, Struct

from lqs.describe import key

T = TypeVar("T")


def per_class(values: Sequence[T], num_levels: int) -> list[T]:
    """One value for each class; the last that is given stands for the rest."""
    return [*values[:num_levels], *[values[-1]] * (num_levels - len(values))]


class OverflowConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Who is moved down, who may make another leave, who may wait for a place, and when it is closed."""

    on_full: Annotated[
        tuple[Annotated[str, Meta(pattern="^(refuse|demote)$")], ...],
        key(
            "When a class is full: refuse, or demote to the next lower one with room. By class; the last stands "
            "for the rest.",
            min_length=1,
            max_length=8,
        ),
    ] = ("refuse",)
    evict: Annotated[
        tuple[bool, ...],
        key(
            "When all is full, the youngest waiting of the lowest class leaves for one of this class. By class; the "
            "last stands for the rest.",
            min_length=1,
            max_length=8,
        ),
    ] = (True,)
    place_wait_s: Annotated[
        tuple[Annotated[float, Meta(ge=0, le=3600)], ...],
        key(
            "How long an arrival may wait for a place. By class; the last stands for the rest.",
            "s",
            min_length=1,
            max_length=8,
        ),
    ] = (5.0, 0.0)
    place_waiters_max: Annotated[
        int, key("Most arrivals of a class that wait for a place.", "requests", ge=0, le=65_536)
    ] = 64
    warn_at: Annotated[
        float,
        key("Share of queue.total, or of a class's cap, at which a warning is given; 0: never.", ge=0, le=1),
    ] = 0.8
    warn_clear_at: Annotated[float, key("Below that share the warning is over.", ge=0, le=1)] = 0.7
    break_at: Annotated[
        float,
        key("At that share the breaker closes the entry for the lowest class; 0: never.", ge=0, le=1),
    ] = 1.0
    breaker_open_s: Annotated[
        float,
        key(
            "How long a class stays closed before probes are let in; so long an overload closes one more.",
            "s",
            gt=0,
            le=3600,
        ),
    ] = 5.0
    breaker_probes: Annotated[
        int, key("Probes in a row that must find no warning to open the entry again.", "requests", ge=1, le=1000)
    ] = 3
    high_load_at: Annotated[
        float,
        key(
            "Above that load (of the running KV, or of the queue) all but the best class come in one class lower; "
            "1: never.",
            gt=0,
            le=1,
        ),
    ] = 0.8
    urgent_below: Annotated[
        float,
        key(
            "A `timeout` of less than so many expected service times lifts a request by one class; 0: never.",
            "times",
            ge=0,
            le=1000,
        ),
    ] = 2.0

    def overflow_rules(self, num_levels: int) -> Iterator[tuple[bool, str]]:
        """Whether it holds, and what is wrong if not, of what no key alone can show."""
        usual = OverflowConfig()
        for name in ("on_full", "evict", "place_wait_s"):
            # What nobody set may be for more classes than there are.
            values, is_usual = getattr(self, name), getattr(self, name) == getattr(usual, name)
            yield is_usual or len(values) <= num_levels, f"queue.{name}: there are only {num_levels} classes."
        yield (
            self.warn_at == 0 or self.warn_clear_at <= self.warn_at,
            f"queue.warn_clear_at: {self.warn_clear_at:g} must not be above queue.warn_at, {self.warn_at:g}; set both.",
        )
