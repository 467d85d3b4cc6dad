"""What `lqs serve --chaos` breaks, on purpose and for drills only.

A drill is words in one string. `device_slot=N` names the device slot, each word after it says what happens
to it, and at which of its steps:

    device_slot=1 abort@step=40             an assert of llama.cpp in its worker
    device_slot=1 abort-helper@step=40      one in a thread that computes for it
    device_slot=1 hang@step=40 for=8s       a step that does not end, or only then
    device_slot=1 oom@step=40               no memory, from that step on
    device_slot=1 fail-load times=2         it cannot be opened, so often
    device_slot=0 card=GPU-5f8a             it counts as being on that GPU, and is lost with it
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from lqs.errors import ConfigError

FAIL_LOAD, ON_CARD = "fail-load", "card"
# What llama_decode's shim returns where it threw, as it does without memory.
_RC_THROWN = -100
# A hang without an end: longer than any drill.
_FOR_EVER_S = 1e6
_SLOT = re.compile(r"device_slot=(\d{1,3})")
_DEED = re.compile(r"(abort|abort-helper|hang|oom)@step=(\d{1,18})")
_FOR = re.compile(r"for=(\d{1,9})(ms|s)")
_TIMES = re.compile(r"times=(\d{1,6})")
_CARD = re.compile(r"card=(\S{1,100})")
_EXAMPLE = "one is device_slot=1 abort@step=40"


class Break(NamedTuple):
    """One thing that is to go wrong. `kind` is the worker's word for it, FAIL_LOAD or ON_CARD."""

    slot: int
    kind: str
    step: int = 0
    rc: int = -3
    times: int = 1
    for_s: float = 0.0
    card: str = ""


def parse_drill(text: str) -> tuple[Break, ...]:
    """The drill in `text`. Raises ConfigError."""
    slot: int | None = None
    breaks: list[Break] = []
    for word in text.split():
        if found := _SLOT.fullmatch(word):
            slot = int(found[1])
        elif found := _FOR.fullmatch(word):
            length_s = int(found[1]) / (1000 if found[2] == "ms" else 1)
            breaks[-1:] = [_last(breaks, "hang", word)._replace(for_s=length_s)]
        elif found := _TIMES.fullmatch(word):
            breaks[-1:] = [_last(breaks, FAIL_LOAD, word)._replace(times=int(found[1]))]
        elif slot is None:
            raise ConfigError(f"--chaos: {word!r} comes before the device slot that it is for; {_EXAMPLE}.")
        else:
            breaks.append(_deed(slot, word))
    if text.strip() and not breaks:
        raise ConfigError(f"--chaos: {text!r} does not say what happens; {_EXAMPLE}.")
    return tuple(breaks)


def _deed(slot: int, word: str) -> Break:
    if word == FAIL_LOAD:
        return Break(slot, FAIL_LOAD)
    if found := _CARD.fullmatch(word):
        return Break(slot, ON_CARD, card=found[1])
    found = _DEED.fullmatch(word)
    if found is None:
        raise ConfigError(f"--chaos: {word!r} is not part of a drill; {_EXAMPLE}.")
    what, step = found[1], int(found[2])
    if what == "oom":
        return Break(slot, "rc", step, rc=_RC_THROWN, times=-1)
    if what == "hang":
        return Break(slot, "hang", step, for_s=_FOR_EVER_S)
    return Break(slot, "assert" if what == "abort" else "helper", step)


def _last(breaks: list[Break], kind: str, word: str) -> Break:
    """The deed before the word, which says more of it; of that kind only."""
    if not breaks or breaks[-1].kind != kind:
        raise ConfigError(f"--chaos: {word!r} says more of a {kind!r}, and none comes before it.")
    return breaks[-1]


def check_slots(breaks: Iterable[Break], num_slots: int) -> None:
    """See that a drill names device slots that there are. Raises ConfigError."""
    for each in breaks:
        if each.slot >= num_slots:
            raise ConfigError(f"--chaos: there is no device slot {each.slot}; there are {num_slots}, from 0 on.")
