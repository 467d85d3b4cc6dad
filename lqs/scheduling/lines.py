"""Which lanes wait for the same sequences, and what of a device slot is free for them.

A device slot is told as the core's figures of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Line:
    """When the sequences that some lanes wait for come free, as a heap, and the starts worked out from it so far."""

    free_at: list[float] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    mean_ns: float | None = None


def takes(slot: Mapping[str, Any]) -> bool:
    """Whether anybody may start on a device slot."""
    return not slot["is_dead"] and not slot["is_drained"]


def is_for(slot: Mapping[str, Any], lane: int) -> bool:
    """Whether a device slot serves a lane."""
    return bool(slot["lanes"] >> lane & 1)


def lines_of(slots: Sequence[Mapping[str, Any]], num_lanes: int) -> list[Line]:
    """A line for each lane; one for all that share device slots, be it through others."""
    lines = [Line() for _ in range(num_lanes)]
    for slot in slots:
        own = [lane for lane in range(num_lanes) if takes(slot) and is_for(slot, lane)]
        joined = [lines[lane] for lane in own]
        lines = [joined[0] if any(line is other for other in joined) else line for line in lines]
    return lines


def num_more(slot: Mapping[str, Any], num_sequences: int, tokens_each: int) -> int:
    """How many more requests of that size could start on a device slot that has so many sequences."""
    if not takes(slot):
        return 0
    num_running: int = slot["num_running"]
    num_fitting: int = slot["headroom"] // tokens_each
    return max(min(num_sequences - num_running, num_fitting), 0)
