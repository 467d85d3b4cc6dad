"""What `lqs serve --chaos` breaks, on purpose and for drills only.

A drill is words in one string: `device_slot=N` names the device slot, each word after it says what happens
to it and at which step: `abort@step=40`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from lqs.errors import ConfigError

# A drill's word -> the worker's.
_DEEDS = {"abort": "assert"}
_DEED = re.compile(r"([a-z]+)@step=(\d{1,18})")
_SLOT = re.compile(r"device_slot=(\d{1,3})")


class Break(NamedTuple):
    """One thing that is to go wrong."""

    slot: int
    kind: str
    step: int


def parse_drill(text: str) -> tuple[Break, ...]:
    """The drill in `text`. Raises ConfigError."""
    slot, breaks = 0, []
    for word in text.split():
        if found := _SLOT.fullmatch(word):
            slot = int(found[1])
        elif (found := _DEED.fullmatch(word)) and found[1] in _DEEDS:
            breaks.append(Break(slot, _DEEDS[found[1]], int(found[2])))
        else:
            raise ConfigError(f"--chaos: {word!r} is not part of a drill; one is device_slot=0 abort@step=40.")
    return tuple(breaks)
