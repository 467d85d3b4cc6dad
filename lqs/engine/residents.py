"""Which models are in memory: who may come, who has to leave for it, and when. Decides only, and knows no clock.

    absent --want--> waiting --load--> loading --loaded--> ready --unload--> absent
                        |                 |                  |  ^
                        |                 +--failed--> absent |  +--- nobody waits any more
                        +-- in order of coming               closed: no newcomers, who is in goes on

Those that are there from the start begin as loading, and are used as soon as a device slot takes work (`came`).
Who is told to leave meanwhile does so when its whole load has ended: nothing may be freed under it.

The models that wait for memory stand in one line and none passes another, so each comes to its turn. For the
first of them what is unused for longest leaves; a model that somebody uses never does. Where all are used,
the one that was used least lately is closed to newcomers once the first has waited for the patience: then it
runs empty, and leaves. Newcomers of a closed model wait at the end of the same line, so with more models in
use than memory for them each has its turn in rounds.

A model in the line that is still on its way out has its memory, and it keeps that for its next life: who comes
behind it is not held up by it, and loads where there is room beside it.

One load runs at a time: two that are decided at once would count on the same memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Standing(StrEnum):
    """Where a model is between file and memory."""

    ABSENT = "absent"
    WAITING = "waiting"
    LOADING = "loading"
    READY = "ready"
    CLOSED = "closed"
    UNLOADING = "unloading"


class Deed(StrEnum):
    """What is to be done next."""

    LOAD = "load"
    UNLOAD = "unload"


class Step(NamedTuple):
    """One deed; whoever does it says how it went."""

    deed: Deed
    name: str


@dataclass(slots=True)
class Resident:
    """What is known of one model. `takes` are bytes by pool; a pinned one leaves only when it is told to."""

    takes: Mapping[str, int]
    is_pinned: bool
    standing: Standing = Standing.ABSENT
    used_ns: int = 0
    waits_since_ns: int = 0
    is_leaving: bool = False  # It was told to.
    is_ordered: bool = False  # An admin wants it, whoever else waits for it.
    has_come: bool = False  # A device slot takes work, though its load may go on.


_IN_MEMORY = (Standing.LOADING, Standing.READY, Standing.CLOSED, Standing.UNLOADING)
# Those can be used, or at least are.
_THERE = (Standing.READY, Standing.CLOSED)


class Residents:
    """The models by name. `room` are bytes by pool that all together may take; a pool that is not in it has no bound.

    Owner: the event loop.
    """

    def __init__(self, models: Mapping[str, Resident], room: Mapping[str, int], patience_ns: int) -> None:
        self._models = dict(models)
        self._room = room
        self._patience_ns = patience_ns
        self._line: list[str] = []

    def standing(self, name: str) -> Standing:
        """Where it is."""
        return self._models[name].standing

    def may_use(self, name: str) -> bool:
        """Whether somebody new may use it now."""
        model = self._models[name]
        is_coming = model.standing is Standing.LOADING and model.has_come and not model.is_leaving
        return model.standing is Standing.READY or is_coming

    def want(self, name: str, now_ns: int, *, is_order: bool = False) -> None:
        """Somebody waits for it. Nothing happens if it is there, or comes already and stays.

        An admin's order stays until it is loaded, or told to leave.
        """
        model = self._models[name]
        if model.standing is Standing.ABSENT:
            model.standing, model.waits_since_ns = Standing.WAITING, now_ns
            self._line.append(name)
        elif self._is_going(model) and name not in self._line:
            model.waits_since_ns = now_ns
            self._line.append(name)
        model.is_ordered = model.is_ordered or (is_order and name in self._line)

    def use(self, name: str, now_ns: int) -> None:
        """Somebody uses it."""
        self._models[name].used_ns = now_ns

    def forget(self, name: str) -> None:
        """Nobody waits for it any more. It still comes if an admin ordered it."""
        model = self._models[name]
        if model.is_ordered:
            return
        self._drop(name)
        if model.standing is Standing.WAITING:
            model.standing = Standing.ABSENT

    def dismiss(self, name: str, *, is_wanted: bool = False) -> None:
        """It is to leave as soon as nobody uses it, pinned or not, and nobody new may use it.

        Those who wait for it, if it `is_wanted`, do so until it has come again.
        """
        model = self._models[name]
        model.is_ordered = False
        if not is_wanted:
            self.forget(name)
        elif name not in self._line:
            self._line.append(name)
        if model.standing in _THERE:
            model.standing = Standing.CLOSED
        model.is_leaving = model.standing in _IN_MEMORY

    def came(self, name: str) -> None:
        """The first of its device slots takes work."""
        self._models[name].has_come = True

    def loaded(self, name: str, now_ns: int) -> None:
        """Its whole load has ended well."""
        model = self._models[name]
        model.standing = Standing.CLOSED if model.is_leaving else Standing.READY
        model.used_ns = now_ns

    def gone(self, name: str, now_ns: int) -> None:
        """It is not in memory any more. Who wanted it meanwhile is in the line."""
        model = self._models[name]
        model.is_leaving = model.has_come = False
        model.standing = Standing.WAITING if name in self._line else Standing.ABSENT
        model.waits_since_ns = now_ns

    def failed(self, name: str, now_ns: int) -> None:
        """Its load has failed, for whoever wanted it, also for those who did when it was told to leave."""
        self._drop(name)
        self.gone(name, now_ns)

    def next(self, is_used: Callable[[str], bool], now_ns: int) -> Step | None:
        """What to do now, if anything. Asked again after each change, and now and then: somebody's patience ends."""
        for name, model in self._models.items():
            if model.standing is Standing.CLOSED and not is_used(name):
                return self._unload(name)
        self._reopen()
        # Those before it are on the way out: they have the memory for their next life.
        first = next((name for name in self._line if self._models[name].standing is Standing.WAITING), None)
        if first is None or self._is_loading:
            return None
        lacking = self._lacking(self._models[first])
        return self._make_room(first, lacking, is_used, now_ns) if lacking else self._load(first)

    @property
    def has_line(self) -> bool:
        """Whether anything is to come or go."""
        return bool(self._line) or any(model.standing is Standing.CLOSED for model in self._models.values())

    @property
    def _is_loading(self) -> bool:
        return any(model.standing is Standing.LOADING for model in self._models.values())

    @property
    def _used(self) -> Counter[str]:
        return _sum(model for model in self._models.values() if model.standing in _IN_MEMORY)

    def _is_going(self, model: Resident) -> bool:
        """Whether it is there no more for newcomers, or will not be when its load has ended."""
        is_loaded_in_vain = model.standing is Standing.LOADING and model.is_leaving
        return is_loaded_in_vain or model.standing in (Standing.CLOSED, Standing.UNLOADING)

    def _lacking(self, model: Resident) -> list[str]:
        """The pools in which there is no room for it beside those in memory."""
        used = self._used
        return [
            pool for pool, takes in model.takes.items() if pool in self._room and used[pool] + takes > self._room[pool]
        ]

    def _make_room(
        self, first: str, lacking: Sequence[str], is_used: Callable[[str], bool], now_ns: int
    ) -> Step | None:
        """One more leaves, or is closed, of those whose memory the first that waits lacks."""
        if any(each.standing is Standing.UNLOADING for each in self._models.values() if _takes_of(each, lacking)):
            # It may be enough.
            return None
        may_leave = sorted(
            (other.used_ns, name)
            for name, other in self._models.items()
            if other.standing is Standing.READY and not other.is_pinned and _takes_of(other, lacking)
        )
        unused = [name for _, name in may_leave if not is_used(name)]
        if unused:
            return self._unload(unused[0])
        is_over = now_ns - self._models[first].waits_since_ns >= self._patience_ns
        if may_leave and is_over and not self._is_one_closed_for(first, lacking):
            self._models[may_leave[0][1]].standing = Standing.CLOSED
        return None

    def _is_one_closed_for(self, first: str, lacking: Sequence[str]) -> bool:
        """Whether somebody runs empty whose memory it lacks and may have; those before it in the line keep theirs."""
        before = self._line[: self._line.index(first)]
        closed = [name for name, model in self._models.items() if model.standing is Standing.CLOSED]
        return any(name not in before and _takes_of(self._models[name], lacking) for name in closed)

    def _reopen(self) -> None:
        """Those that were closed stay after all where nobody waits for their memory before themselves."""
        for name in [*self._line, *self._models]:
            model = self._models[name]
            if model.standing is Standing.WAITING:
                return
            if model.standing is Standing.CLOSED and not model.is_leaving:
                model.standing = Standing.READY
                self._drop(name)

    def _drop(self, name: str) -> None:
        """It has no place in the line any more."""
        if name in self._line:
            self._line.remove(name)
        self._models[name].is_ordered = False

    def _load(self, name: str) -> Step:
        self._drop(name)
        self._models[name].standing = Standing.LOADING
        return Step(Deed.LOAD, name)

    def _unload(self, name: str) -> Step:
        self._models[name].standing = Standing.UNLOADING
        return Step(Deed.UNLOAD, name)


def _takes_of(model: Resident, pools: Sequence[str]) -> bool:
    return any(map(model.takes.get, pools))


def _sum(models: object) -> Counter[str]:
    total: Counter[str] = Counter()
    for model in models:  # type: ignore[attr-defined]
        total.update(model.takes)
    return total
