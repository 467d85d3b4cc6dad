"""What `lqs serve --chaos` breaks, on purpose and for drills only.

A drill is words in one string. `device_slot=N` names the device slot, each word after it says what happens
to it, and at which of its steps:

    device_slot=1 abort@step=40             an assert of llama.cpp in its worker
    device_slot=1 abort-helper@step=40      one in a thread that computes for it
    device_slot=1 hang@step=40 for=8s       a step that does not end, or only then
    device_slot=1 oom@step=40               no memory, from that step on
    device_slot=1 fail-load times=2         it cannot be opened, so often
    device_slot=1 slow-load for=8s          opening it takes so long
    device_slot=0 lose-card@step=40         its GPU is lost, as if the driver had said so
    device_slot=0 card=GPU-5f8a             it counts as being on that GPU, and is lost with it

A device slot that is on no GPU loses one that is its alone, so this drill needs no driver.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from lqs.engine.slot import Slot, Worker
from lqs.errors import ConfigError

FAIL_LOAD, SLOW_LOAD, ON_CARD, LOSE_CARD = "fail-load", "slow-load", "card", "lost"
# What llama_decode's shim returns where it threw, as it does without memory.
_RC_THROWN = -100
_SLOW_S = 1.0
# A hang without an end: longer than any drill.
_FOR_EVER_S = 1e6
_SLOT = re.compile(r"device_slot=(\d{1,3})")
_DEED = re.compile(r"(abort|abort-helper|hang|oom|lose-card)@step=(\d{1,18})")
_FOR = re.compile(r"for=(\d{1,9})(ms|s)")
_TIMES = re.compile(r"times=(\d{1,6})")
_CARD = re.compile(r"card=(\S{1,100})")
_EXAMPLE = "one is device_slot=1 abort@step=40"


class Break(NamedTuple):
    """One thing that is to go wrong. `kind` is the worker's word for it, FAIL_LOAD, SLOW_LOAD or ON_CARD."""

    slot: int
    kind: str
    step: int = 0
    rc: int = -3
    times: int = 1
    for_s: float = 0.0
    card: str = ""

    def order(self, worker: Worker) -> None:
        """Have the worker break when its time comes, if it is a matter of the worker."""
        if self.kind not in (FAIL_LOAD, SLOW_LOAD, ON_CARD):
            worker.break_at(self.kind, step=self.step, rc=self.rc, times=self.times, for_s=self.for_s)


def parse_drill(text: str) -> tuple[Break, ...]:
    """The drill in `text`. Raises ConfigError."""
    slot: int | None = None
    breaks: list[Break] = []
    for word in text.split():
        if found := _SLOT.fullmatch(word):
            slot = int(found[1])
        elif found := _FOR.fullmatch(word):
            length_s = int(found[1]) / (1000 if found[2] == "ms" else 1)
            breaks[-1:] = [_last(breaks, ("hang", SLOW_LOAD), word)._replace(for_s=length_s)]
        elif found := _TIMES.fullmatch(word):
            breaks[-1:] = [_last(breaks, (FAIL_LOAD,), word)._replace(times=int(found[1]))]
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
    if word == SLOW_LOAD:
        return Break(slot, SLOW_LOAD, for_s=_SLOW_S)
    if found := _CARD.fullmatch(word):
        return Break(slot, ON_CARD, card=found[1])
    found = _DEED.fullmatch(word)
    if found is None:
        raise ConfigError(f"--chaos: {word!r} is not part of a drill; {_EXAMPLE}.")
    what, step = found[1], int(found[2])
    if what == "oom":
        return Break(slot, "rc", step, rc=_RC_THROWN, times=-1)
    if what == "lose-card":
        return Break(slot, LOSE_CARD, step)
    if what == "hang":
        return Break(slot, "hang", step, for_s=_FOR_EVER_S)
    return Break(slot, "assert" if what == "abort" else "helper", step)


def _last(breaks: list[Break], kinds: tuple[str, ...], word: str) -> Break:
    """The deed before the word, which says more of it; of those kinds only."""
    if not breaks or breaks[-1].kind not in kinds:
        raise ConfigError(f"--chaos: {word!r} says more of {' or '.join(kinds)}, and none comes before it.")
    return breaks[-1]


def cards_of(breaks: Iterable[Break], slot: int, cards: tuple[str, ...]) -> tuple[str, ...]:
    """The GPUs that a device slot counts as being on, which is on those in truth."""
    mine = [each for each in breaks if each.slot == slot]
    bound = tuple(each.card for each in mine if each.kind == ON_CARD) or cards
    if not bound and any(each.kind == LOSE_CARD for each in mine):
        return (f"of-device-slot-{slot}",)
    return bound


def lost_cards(breaks: Iterable[Break], slots: Iterable[Slot]) -> dict[str, str]:
    """Why, by UUID, for each GPU that a drill has taken away by now."""
    losing = {each.slot for each in breaks if each.kind == LOSE_CARD}
    # Its worker was given up in that step, or had died before.
    lost = [slot for slot in slots if slot.number in losing and slot.worker.state == "dead"]
    return {card: "a drill says so" for slot in lost for card in slot.cards}


def check_slots(breaks: Iterable[Break], num_slots: int) -> None:
    """See that a drill names device slots that there are. Raises ConfigError."""
    for each in breaks:
        if each.slot >= num_slots:
            raise ConfigError(f"--chaos: there is no device slot {each.slot}; there are {num_slots}, from 0 on.")
