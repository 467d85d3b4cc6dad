"""Which models are in memory: the bound holds, nobody who is used leaves, nobody waits for ever."""

from __future__ import annotations

import random

import pytest

from lqs.engine.residents import Deed, Resident, Residents, Standing, Step
from lqs.request import NS_PER_S

S = NS_PER_S
PATIENCE = 10 * S


class Box:
    """Room for two of three models of one size; a fourth is there for good and takes none of it."""

    def __init__(self, room: int = 2, num: int = 3) -> None:
        models = {name: Resident({"m": 1}, is_pinned=False) for name in "abcdef"[:num]}
        self.residents = Residents(models | {"z": Resident({}, is_pinned=True)}, {"m": room}, PATIENCE)
        self.used: set[str] = set()
        self.now_ns = 0

    def step(self) -> Step | None:
        return self.residents.next(self.used.__contains__, self.now_ns)

    def run(self) -> list[str]:
        """Do all that is due; loads and unloads take no time."""
        deeds = []
        while (step := self.step()) is not None:
            deeds.append(f"{step.deed} {step.name}")
            if step.deed is Deed.LOAD:
                self.residents.loaded(step.name, self.now_ns)
            else:
                self.residents.gone(step.name, self.now_ns)
        return deeds

    def want(self, name: str) -> list[str]:
        self.now_ns += S
        self.residents.want(name, self.now_ns)
        return self.run()

    def standing(self, name: str) -> Standing:
        return self.residents.standing(name)


def test_a_model_comes_when_it_is_wanted_and_the_least_lately_used_leaves() -> None:
    box = Box()
    assert box.want("a") == ["load a"]
    assert box.want("b") == ["load b"]
    box.now_ns += S
    box.residents.use("a", box.now_ns)
    assert box.want("c") == ["unload b", "load c"]
    assert box.want("a") == []


def test_a_model_that_is_used_never_leaves() -> None:
    box = Box()
    box.want("a")
    box.want("b")
    box.used = {"a"}
    assert box.want("c") == ["unload b", "load c"]
    box.used = {"a", "c"}
    assert box.want("b") == []
    assert (box.standing("a"), box.standing("b")) == (Standing.READY, Standing.WAITING)


def test_one_that_leaves_another_memory_is_nobodys_hope() -> None:
    """Whose memory is lacking is what counts: x is on another card, and its stream never ends."""
    box = Box()
    models = {name: Resident({pool: 1}, is_pinned=False) for name, pool in (("a", "g0"), ("b", "g0"), ("x", "g1"))}
    box.residents = Residents(models, {"g0": 1, "g1": 1}, PATIENCE)
    box.want("x")
    box.want("a")
    box.used = {"x", "a"}
    box.residents.dismiss("x")
    assert box.want("b") == []
    box.now_ns += PATIENCE
    assert box.run() == []
    assert box.standing("a") is Standing.CLOSED
    box.used = {"x"}
    assert box.run() == ["unload a", "load b"]


def test_who_waits_too_long_has_one_closed_which_leaves_when_it_is_empty() -> None:
    box = Box()
    box.want("a")
    box.want("b")
    box.used = {"a", "b"}
    box.want("c")
    box.now_ns += PATIENCE - 1
    assert box.run() == []
    assert box.standing("a") is Standing.READY
    box.now_ns += 1
    assert box.run() == []
    assert box.standing("a") is Standing.CLOSED
    # Newcomers of the closed one wait behind.
    assert box.want("a") == []
    # Who waited for the other uses it as soon as it is there.
    box.used = {"b", "c"}
    assert box.run() == ["unload a", "load c"]
    assert box.standing("a") is Standing.WAITING


def test_a_model_stays_open_where_nobody_waits_for_its_memory_any_more() -> None:
    box = Box()
    box.want("a")
    box.want("b")
    box.used = {"a", "b"}
    box.want("c")
    box.now_ns += PATIENCE
    box.run()
    box.want("a")
    box.residents.forget("c")
    assert box.run() == []
    assert (box.standing("a"), box.standing("c")) == (Standing.READY, Standing.ABSENT)
    assert not box.residents.has_line


def test_a_large_model_is_not_passed_by_small_ones() -> None:
    """With room for it in parts only, those that come later wait behind it."""
    models = {name: Resident({"m": 1}, is_pinned=False) for name in "ab"} | {"L": Resident({"m": 2}, is_pinned=False)}
    residents = Residents(models, {"m": 2}, PATIENCE)
    used = {"a"}
    residents.want("a", 0)
    assert residents.next(used.__contains__, 0) == (Deed.LOAD, "a")
    residents.loaded("a", 0)
    residents.want("L", 1)
    residents.want("b", 2)
    assert residents.next(used.__contains__, 3) is None
    used.clear()
    assert residents.next(used.__contains__, 4) == (Deed.UNLOAD, "a")
    residents.gone("a", 4)
    assert residents.next(used.__contains__, 4) == (Deed.LOAD, "L")


def test_one_load_runs_at_a_time() -> None:
    """B49: two loads that are decided at one moment would count on the same memory."""
    box = Box()
    box.residents.want("a", 0)
    box.residents.want("b", 0)
    assert box.step() == (Deed.LOAD, "a")
    assert box.step() is None
    box.residents.loaded("a", 0)
    assert box.step() == (Deed.LOAD, "b")


def test_a_load_that_failed_leaves_the_model_absent() -> None:
    box = Box()
    box.residents.want("a", 0)
    box.step()
    box.residents.failed("a", 0)
    assert box.standing("a") is Standing.ABSENT
    assert box.want("a") == ["load a"]


@pytest.mark.parametrize("is_order", [False, True])
def test_a_load_that_failed_is_not_tried_again_for_who_wanted_it_when_it_was_to_leave(is_order: bool) -> None:
    box = Box()
    box.residents.want("a", 0)
    box.step()
    box.residents.dismiss("a")
    box.residents.want("a", 1, is_order=is_order)
    box.residents.failed("a", 2)
    assert box.run() == []
    assert (box.standing("a"), box.residents.has_line) == (Standing.ABSENT, False)


def test_one_that_leaves_for_long_and_is_wanted_again_holds_nobody_up_who_fits_beside_it() -> None:
    box = Box()
    box.want("a")
    box.used = {"a"}
    box.residents.dismiss("a")
    assert box.want("a") == []
    assert box.want("b") == ["load b"]
    # The next one lacks memory: what nobody uses leaves for it, and not what the first will have again.
    assert box.want("c") == ["unload b", "load c"]
    box.used = {"a", "c"}
    assert box.want("b") == []
    box.used = {"c"}
    # Its own life first; nobody uses it here, so it leaves for the other.
    assert box.run() == ["unload a", "load a", "unload a", "load b"]


def test_one_that_leaves_and_is_wanted_again_keeps_its_place_and_gives_nobody_its_memory() -> None:
    """The patience of who waits behind it closes another one."""
    box = Box()
    for name in "ab":
        box.want(name)
    box.used = {"a", "b"}
    box.residents.dismiss("a")
    for name in "ac":
        box.want(name)
    box.now_ns += PATIENCE
    assert box.run() == []
    assert [box.standing(name) for name in "abc"] == [Standing.CLOSED, Standing.CLOSED, Standing.WAITING]
    box.used = {"a"}
    assert box.run() == ["unload b", "load c"]
    box.used = {"c"}
    assert box.run() == ["unload a", "load a"]


def test_what_nobody_uses_leaves_at_once_though_one_that_is_used_was_told_to_leave() -> None:
    box = Box()
    for name in "ab":
        box.want(name)
    box.used = {"a"}
    box.residents.dismiss("a")
    assert box.want("c") == ["unload b", "load c"]


def test_what_an_admin_ordered_comes_though_a_client_that_waited_too_has_left() -> None:
    box = Box(room=1)
    box.want("a")
    box.used = {"a"}
    # It waits for memory, or for the end of what it is told to leave for.
    box.residents.want("b", 0, is_order=True)
    box.residents.want("b", 1)
    box.residents.forget("b")
    assert box.standing("b") is Standing.WAITING
    box.residents.dismiss("a")
    box.residents.want("a", 2)
    box.residents.want("a", 2, is_order=True)
    box.residents.forget("a")
    box.used = set()
    assert box.run() == ["unload a", "load b", "unload b", "load a"]
    # An order is done once: what is wanted later is forgotten as ever.
    box.used = {"a"}
    box.want("b")
    box.residents.forget("b")
    assert box.standing("b") is Standing.ABSENT


def test_an_order_is_taken_back_by_an_unload() -> None:
    box = Box(room=1)
    box.want("a")
    box.used = {"a"}
    box.residents.want("b", 0, is_order=True)
    box.residents.dismiss("b")
    assert (box.standing("b"), box.residents.has_line) == (Standing.ABSENT, False)


def test_who_waits_for_one_that_is_told_to_leave_keeps_its_place() -> None:
    box = Box(room=1)
    box.want("a")
    box.used = {"a"}
    for name in "bc":
        box.want(name)
    box.residents.dismiss("b", is_wanted=True)
    box.used = set()
    assert box.run() == ["unload a", "load b", "unload b", "load c"]
    box.residents.dismiss("c", is_wanted=True)
    assert box.run() == ["unload c", "load c"]


def test_an_admin_may_send_any_model_away_and_bring_it_back() -> None:
    box = Box()
    box.residents.loaded("z", 0)
    box.used = {"z"}
    box.residents.dismiss("z")
    assert box.run() == []
    assert box.standing("z") is Standing.CLOSED
    box.used = set()
    assert box.run() == ["unload z"]
    assert box.want("z") == ["load z"]


def test_one_that_is_sent_away_while_it_loads_leaves_after_it() -> None:
    box = Box()
    box.residents.want("a", 0)
    box.step()
    box.residents.dismiss("a")
    box.residents.loaded("a", 0)
    assert box.run() == ["unload a"]


@pytest.mark.parametrize("seed", range(20))
def test_in_any_order_of_things_the_bound_holds_and_everybody_has_a_turn(seed: int) -> None:
    """Six models want room for two, each used for up to 30 s at a time, without end."""
    rng = random.Random(seed)
    box = Box(room=2, num=6)
    names = "abcdef"
    until: dict[str, int] = {}
    wanted_ns: dict[str, int] = {}
    longest_ns = 0
    for _ in range(3000):
        box.now_ns += rng.randrange(1, 2 * S)
        for name in [name for name, end_ns in until.items() if end_ns <= box.now_ns]:
            del until[name]
            box.used.discard(name)
        name = rng.choice(names)
        if box.standing(name) is Standing.READY:
            box.used.add(name)
            until[name] = max(until.get(name, 0), box.now_ns + rng.randrange(30 * S))
            box.residents.use(name, box.now_ns)
        else:
            wanted_ns.setdefault(name, box.now_ns)
            box.residents.want(name, box.now_ns)
        for deed in box.run():
            word, _, moved = deed.partition(" ")
            assert word == "load" or moved not in box.used
            if word == "load" and moved in wanted_ns:
                longest_ns = max(longest_ns, box.now_ns - wanted_ns.pop(moved))
        there = [each for each in names if box.standing(each) in (Standing.READY, Standing.CLOSED)]
        assert len(there) <= 2
    # Each of those before it is waited for, at most: its patience, and the longest use of the one that leaves.
    assert longest_ns <= 6 * (PATIENCE + 32 * S)
    assert all(box.now_ns - since_ns <= 6 * (PATIENCE + 32 * S) for since_ns in wanted_ns.values())


class Crowd(Box):
    """Clients that come and give up, admins that load and unload; deeds end when the test likes, loads also badly."""

    def __init__(self) -> None:
        super().__init__(room=5, num=6)
        self.models = {
            name: Resident({"m": size}, is_pinned=False)
            for name, size in zip("abcdef", (1, 1, 2, 2, 3, 5), strict=True)
        }
        self.residents = Residents(self.models, {"m": 5}, PATIENCE)
        self.waiting: set[str] = set()
        self.ordered: set[str] = set()
        self.busy: list[Step] = []

    def do(self, num: int, name: str) -> None:
        """One of the things that may come at any time."""
        if num < 2:
            self.waiting.add(name)
            self.residents.want(name, self.now_ns)
        elif num == 2:
            self.ordered.add(name)
            self.residents.want(name, self.now_ns, is_order=True)
        elif num == 3 and name in self.waiting:
            self.waiting.discard(name)
            self.residents.forget(name)
        elif num == 4:
            self.ordered.discard(name)
            self.residents.dismiss(name, is_wanted=name in self.waiting)
        elif num == 5:
            self.used.discard(name)

    def end(self, num: int, *, is_well: bool) -> None:
        """One of the deeds under way is done."""
        deed, name = self.busy.pop(num)
        if deed is Deed.UNLOAD:
            self.residents.gone(name, self.now_ns)
        elif is_well:
            self.residents.loaded(name, self.now_ns)
        else:
            self.residents.failed(name, self.now_ns)
            self.waiting.discard(name)
            self.ordered.discard(name)

    def go_on(self) -> None:
        """Let in who may, and begin what is due."""
        self.let_in()
        while (step := self.step()) is not None:
            assert step.deed is Deed.LOAD or step.name not in self.used
            self.busy.append(step)
            self.let_in()
        there = [each for each in self.models.values() if each.standing not in (Standing.ABSENT, Standing.WAITING)]
        assert sum(each.takes["m"] for each in there) <= 5
        assert sum(step.deed is Deed.LOAD for step in self.busy) <= 1

    def let_in(self) -> None:
        there = {name for name in self.models if self.residents.may_use(name)}
        self.used |= self.waiting & there
        self.waiting -= there
        self.ordered -= there


@pytest.mark.parametrize("seed", range(20))
def test_in_any_order_of_unloads_orders_and_failures_the_bound_holds_and_nobody_is_forgotten(seed: int) -> None:
    """At last nothing new comes, and all that is wanted still does."""
    rng, crowd = random.Random(seed), Crowd()
    for _ in range(2000):
        crowd.now_ns += rng.randrange(1, 3 * S)
        crowd.do(rng.randrange(8), rng.choice("abcdef"))
        if crowd.busy and rng.random() < 0.3:
            crowd.end(rng.randrange(len(crowd.busy)), is_well=rng.random() < 0.8)
        crowd.go_on()
    for _ in range(50):
        crowd.used.clear()
        while crowd.busy:
            crowd.end(0, is_well=True)
        crowd.go_on()
    assert (crowd.waiting, crowd.ordered, crowd.busy, crowd.residents.has_line) == (set(), set(), [], False)


def test_one_that_is_wanted_again_while_it_loads_only_to_leave_leaves_and_comes_again() -> None:
    box = Box()
    box.residents.want("a", 0)
    box.step()
    box.residents.dismiss("a")
    box.residents.want("a", 1)
    box.residents.want("a", 2)
    box.residents.loaded("a", 3)
    assert box.run() == ["unload a", "load a"]
    assert box.standing("a") is Standing.READY


def test_who_wanted_one_that_loads_only_to_leave_may_change_its_mind() -> None:
    box = Box()
    box.residents.want("a", 0)
    box.step()
    box.residents.dismiss("a")
    box.residents.want("a", 1)
    box.residents.forget("a")
    box.residents.loaded("a", 2)
    assert box.run() == ["unload a"]


def test_one_is_used_from_its_first_device_slot_on_and_leaves_only_when_its_load_has_ended() -> None:
    box = Box()
    box.residents.want("a", 0)
    box.step()
    assert not box.residents.may_use("a")
    box.residents.came("a")
    assert box.residents.may_use("a")
    box.residents.dismiss("a")
    assert not box.residents.may_use("a")
    assert box.run() == []
    box.residents.loaded("a", 0)
    assert box.run() == ["unload a"]
    box.want("a")
    box.residents.gone("a", 0)
    box.residents.want("a", 0)
    box.step()
    assert not box.residents.may_use("a"), "what came in an earlier life has not come in this one"


def test_what_loads_at_the_start_is_not_loaded_twice_and_nothing_else_loads_beside_it() -> None:
    residents = Residents(
        {"z": Resident({}, is_pinned=True, standing=Standing.LOADING), "a": Resident({"m": 1}, is_pinned=False)},
        {"m": 1},
        PATIENCE,
    )
    residents.want("z", 0)
    residents.want("a", 0)
    assert residents.next(lambda name: False, 0) is None
    residents.came("z")
    assert residents.next(lambda name: False, 0) is None
    residents.loaded("z", 0)
    assert residents.next(lambda name: False, 0) == (Deed.LOAD, "a")
    assert residents.next(lambda name: False, 0) is None
