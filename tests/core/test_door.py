"""The door: who comes in, who waits for a place, who is sent away, and in which order; every time passed in."""

import pytest

from lqs import _core
from lqs._core import Breaker, Door, DoorSays

S = 10**9
IN, EVICT, WAIT, FULL, BROKEN, NOBODY = (DoorSays(number) for number in range(6))


def make(caps, total, *, num_sequences=0, kv_tokens=1000, **rules):
    """A door; without further rules it refuses, has no breaker and nobody waits for a place."""
    door = Door(len(caps))
    set_rules(door, caps, total, **rules)
    door.see(num_sequences=num_sequences, kv_tokens=kv_tokens)
    return door


def set_rules(door, caps, total, warn=0, clear=1, **rules):
    num = len(caps)
    door.set_rules(
        **{
            "caps": caps,
            "total": total,
            "demotes": [False] * num,
            "evicts": [False] * num,
            "place_waits_ns": [0] * num,
            "num_guests_max": 16,
            "warns": [0] * num + [warn],
            "clears": [1] * num + [clear],
            "full": 0,
            "open_ns": 5 * S,
            "num_probes": 3,
            **rules,
        }
    )


def says(door, level, now_ns=0, **given):
    return door.enter(level, now_ns, **given)[0]


def let_in(door, level, num, now_ns=0):
    """How many of `num` come in."""
    return sum(says(door, level, now_ns) == IN for _ in range(num))


def submitted(door, level, num):
    """Let as many in as come, and hand them to the scheduler; how many."""
    num_in = let_in(door, level, num)
    for _ in range(num_in):
        door.submit(level, 0)
    return num_in


def breakers(door, now_ns=0):
    return [level["breaker"] for level in door.figures(now_ns)["levels"]]


# --- room -------------------------------------------------------------------------------


@pytest.mark.parametrize("num_started", [0, 1])
def test_six_at_once_for_one_sequence_and_one_place_are_two(num_started):
    """B37: the same whether the first has started when the others come or not."""
    door = make([1], 1, num_sequences=1)
    num_in = let_in(door, 0, num_started)
    for _ in range(num_started):
        door.submit(0, 10)
        door.start(0)
    assert num_in + let_in(door, 0, 6 - num_started) == 2
    assert door.num_inside == 2


def test_a_class_without_places_lets_in_who_can_start_at_once():
    assert let_in(make([0], 1, num_sequences=2), 0, 5) == 2


def test_a_free_sequence_is_spoken_for_by_the_better_classes():
    door = make([5, 0], 10, num_sequences=1)
    assert (let_in(door, 0, 1), let_in(door, 1, 1)) == (1, 0)


def test_the_total_holds_for_all_classes():
    door = make([2, 2], 3)
    assert (let_in(door, 0, 9), let_in(door, 1, 9)) == (2, 1)


def test_a_free_sequence_is_no_room_while_somebody_waits_for_cells():
    door = make([1], 1, num_sequences=2, kv_tokens=100)
    assert says(door, 0) == IN
    door.submit(0, 100)
    door.start(0)
    assert let_in(door, 0, 3) == 1
    door.settle(0, 100, has_run=True)
    assert let_in(door, 0, 3) == 2


def test_of_five_for_three_places_of_a_class_two_are_refused():
    """S9: capacity 3 per class. The other classes have theirs all the same."""
    door = make([3, 3, 3], 9)
    assert [says(door, 0) for _ in range(5)] == [IN, IN, IN, FULL, FULL]
    assert (let_in(door, 1, 5), let_in(door, 2, 5)) == (3, 3)


def test_what_the_scheduler_has_that_lives_is_what_counts():
    scheduler = _core.Scheduler(table_capacity=8, level_caps=[8], total_cap=8)
    for _ in range(2):
        scheduler.add_device_slot(kv_tokens=100, num_sequences=2)
    door = make([0], 8)
    door.look(scheduler)
    assert let_in(door, 0, 9) == 4
    scheduler.report_dead(1)
    door.look(scheduler)
    door.leave(0)
    assert let_in(door, 0, 9) == 0


# --- on_full = demote -------------------------------------------------------------------


def test_a_full_class_refuses_or_demotes_by_its_rule():
    """S12: 100 per class; the 101st is refused, or stands in the next lower class that has room."""
    door = make([100] * 5, 500, demotes=[True, False, True, True, True])
    assert let_in(door, 0, 100) == 100
    assert door.enter(0, 0)[:2] == (IN, 1)
    assert let_in(door, 1, 100) == 99
    assert door.enter(1, 0)[:2] == (FULL, 1)
    # 1 is full as well, so it is 2.
    assert door.enter(0, 0)[:2] == (IN, 2)
    figures = door.figures(0)["levels"]
    assert [level["num_pending"] for level in figures] == [100, 100, 1, 0, 0]
    assert (figures[0]["num_demoted"], figures[0]["num_overflows"], figures[1]["num_full"]) == (2, 2, 2)


def test_the_lowest_class_has_none_to_be_demoted_to_and_a_full_total_has_no_room_below():
    door = make([1, 1], 2, demotes=[True, True])
    assert [door.enter(1, 0)[:2] for _ in range(2)] == [(IN, 1), (FULL, 1)]
    assert says(door, 0) == IN
    assert door.enter(0, 0)[:2] == (FULL, 0)


def test_nobody_is_demoted_past_those_who_wait_in_that_class():
    door = make([0, 3, 3], 2, demotes=[True, False, False], evicts=[False, True, False])
    assert submitted(door, 2, 2) == 2
    assert says(door, 1) == EVICT
    door.settle(2, 0, has_run=False)
    assert door.enter(0, 0)[:2] == (IN, 2)


# --- eviction ---------------------------------------------------------------------------


def test_one_of_a_lower_class_leaves_when_only_the_total_is_full():
    door = make([3, 3], 3, evicts=[True, True])
    assert submitted(door, 1, 3) == 3
    assert says(door, 0, user=7) == EVICT
    door.settle(1, 0, has_run=False)
    assert door.answer(True, 0) == (IN, 7, 0)
    assert [level["num_pending"] for level in door.figures(0)["levels"]] == [1, 2]
    # Nobody is below the lowest class.
    assert says(door, 1) == FULL


def test_no_more_ask_than_their_class_has_places():
    door = make([1, 3], 3, evicts=[True, True])
    assert submitted(door, 1, 3) == 3
    assert [says(door, 0, user=user) for user in (1, 2)] == [EVICT, FULL]
    door.settle(1, 0, has_run=False)
    assert door.answer(True, 0)[:2] == (IN, 1)


def test_no_more_ask_than_there_are_to_leave():
    door = make([5, 5], 2, evicts=[True, True])
    assert submitted(door, 1, 2) == 2
    assert [says(door, 0) for _ in range(3)] == [EVICT, EVICT, FULL]


def test_where_nobody_could_leave_it_waits_for_a_place_or_asks_for_another():
    """The one below has started meanwhile, or was cancelled."""
    door = make([2, 2], 1, evicts=[True, True], place_waits_ns=[5 * S, 0])
    assert submitted(door, 1, 1) == 1
    assert door.enter(0, 0, user=1)[::3] == (EVICT, 5 * S)
    assert door.answer(False, 1 * S) == (WAIT, 1, 0)
    door.settle(1, 0, has_run=False)
    assert door.tend(2 * S) == [(IN, 1, 0)]
    hasty = make([2, 2], 1, evicts=[True, True])
    assert submitted(hasty, 1, 1) == 1
    assert says(hasty, 0, user=1) == EVICT
    hasty.settle(1, 0, has_run=False)
    # Another of that class was let in while this one still asked.
    assert says(hasty, 1) == IN
    assert hasty.answer(False, 0) == (WAIT, 1, 0)
    hasty.submit(1, 0)
    assert hasty.tend(0) == [(EVICT, 1, 0)]


def test_who_waits_for_a_place_asks_when_one_below_comes_to_the_scheduler():
    door = make([2, 2, 2], 2, evicts=[True, True, True], place_waits_ns=[5 * S, 5 * S, 0])
    assert [says(door, 2) for _ in range(2)] == [IN, IN]
    # Their prompts are still being made.
    assert [says(door, level, user=10 + level) for level in (1, 0)] == [WAIT, WAIT]
    assert door.tend(0) == []
    door.submit(2, 0)
    assert door.tend(0) == [(EVICT, 10, 0)]
    door.submit(2, 0)
    assert door.tend(0) == [(EVICT, 11, 1)]
    for user in (10, 11):
        door.settle(2, 0, has_run=False)
        assert door.answer(True, 0)[:2] == (IN, user)
    assert door.tend(0) == []


def test_who_may_not_wait_for_a_place_stands_there_while_somebody_below_has_its_prompt_made():
    door = make([2, 2], 1, evicts=[True, True])
    assert says(door, 1) == IN
    assert [says(door, 0, user=user) for user in (1, 2)] == [WAIT, WAIT]
    assert (door.due_ns, door.tend(60 * S)) == (None, [])
    door.submit(1, 0)
    assert door.tend(61 * S) == [(EVICT, 1, 0)]
    door.settle(1, 0, has_run=False)
    assert door.answer(True, 61 * S)[:2] == (IN, 1)
    # For the other nobody is left who could leave.
    assert door.tend(61 * S) == [(FULL, 2, 0)]


def test_a_place_that_comes_free_is_kept_for_the_one_that_asked():
    """If nobody could be made to leave, it has it; if one was, the next of the others has it."""
    door = make([3] * 3, 2, evicts=[True] * 3, place_waits_ns=[S] * 3)
    assert submitted(door, 2, 2) == 2
    assert [says(door, level, user=level) for level in (2, 1)] == [WAIT, EVICT]
    door.settle(2, 0, has_run=False)
    assert door.tend(0) == []
    assert door.answer(False, 0)[:2] == (IN, 1)
    assert door.tend(0) == []
    door.leave(1)
    assert door.tend(0) == [(IN, 2, 2)]


def test_one_that_left_while_it_asked_gets_nothing_and_its_place_is_free():
    door = make([2, 2], 1, evicts=[True, True], place_waits_ns=[0, 5 * S])
    assert submitted(door, 1, 1) == 1
    says_0, _, guest, _ = door.enter(0, 0, user=1)
    assert (says_0, says(door, 1, user=2)) == (EVICT, WAIT)
    door.give_up(guest)
    with pytest.raises(IndexError):
        door.give_up(guest)
    door.settle(1, 0, has_run=False)
    assert door.answer(True, 0)[0] == NOBODY
    assert door.tend(0) == [(IN, 2, 1)]


# --- waiting for a place ----------------------------------------------------------------


def test_overflow_with_the_figures_of_the_source():
    """S17: capacity 30, 40 arrivals of class i % 3, consumers held, eviction off; only class 0 may wait, 5 s.

    30 are in; 31, 32, 34, 35, 37 and 38 are refused at once; 30, 33, 36 and 39 wait up to 5 s.
    """
    door = make([30] * 3, 30, place_waits_ns=[5 * S, 0, 0], warn=24, clear=21, full=30)
    said = {i: door.enter(i % 3, i, user=i) for i in range(40)}
    assert [i for i in said if said[i][0] == IN] == list(range(30))
    assert [i for i in said if said[i][0] in (FULL, BROKEN)] == [31, 32, 34, 35, 37, 38]
    assert {i: said[i][3] for i in said if said[i][0] == WAIT} == {i: 5 * S + i for i in (30, 33, 36, 39)}
    # One place comes free after 3 s, and the first that waits has it.
    door.leave(1)
    assert door.tend(3 * S) == [(IN, 30, 0)]
    assert door.due_ns <= 5 * S + 33
    assert door.tend(5 * S + 32) == []
    assert door.tend(5 * S + 33) == [(FULL, 33, 0)]
    assert [user for _, user, _ in door.tend(6 * S)] == [36, 39]
    figures = door.figures(6 * S)
    assert (figures["num_pending"], figures["levels"][0]["num_place_waiting"]) == (30, 0)
    assert (figures["levels"][0]["num_place_waits"], figures["levels"][0]["num_place_waits_lost"]) == (4, 3)


def test_the_best_class_gets_the_next_place_and_a_full_class_is_passed_by():
    door = make([1, 2, 2], 3, place_waits_ns=[S, S, S])
    for level in (0, 1, 2):
        assert says(door, level) == IN
    users = [says(door, level, user=10 + level) for level in (2, 0, 1)]
    assert users == [WAIT] * 3
    # Class 0 is full by itself.
    door.leave(2)
    assert door.tend(0) == [(IN, 11, 1)]
    door.leave(0)
    assert door.tend(0) == [(IN, 10, 0)]
    door.leave(1)
    assert door.tend(0) == [(IN, 12, 2)]


def test_nobody_passes_those_of_its_class_who_wait():
    door = make([1], 1, place_waits_ns=[S])
    assert [says(door, 0), says(door, 0, user=1)] == [IN, WAIT]
    door.leave(0)
    assert says(door, 0, user=2) == WAIT
    assert door.tend(0) == [(IN, 1, 0)]


def test_a_wait_for_a_place_ends_with_the_time_in_the_queue():
    door = make([0], 1, place_waits_ns=[5 * S])
    assert door.enter(0, 0, expire_ns=2 * S, user=1)[3] == 2 * S
    assert door.tend(2 * S - 1) == []
    assert door.tend(2 * S) == [(FULL, 1, 0)]


def test_guests_are_bounded_by_class():
    door = make([0, 0], 1, place_waits_ns=[S, S], num_guests_max=2)
    assert [says(door, 0, user=user) for user in range(3)] == [WAIT, WAIT, FULL]
    assert says(door, 1) == WAIT
    assert door.tend(S)[:2] == [(FULL, 0, 0), (FULL, 1, 0)]
    assert says(door, 0, S) == WAIT


# --- warning and breaker ----------------------------------------------------------------


def breaking(**rules):
    """The door of S18: 30 places, warning at 24, breaker at 30, three classes."""
    return make([30] * 3, 30, warn=24, clear=21, full=30, **rules)


def test_24_of_30_warn_and_the_warning_does_not_flicker():
    """S18: >= 80 %."""
    door = breaking()
    assert let_in(door, 1, 23) == 23
    assert door.changes() == []
    assert let_in(door, 1, 1) == 1
    assert door.changes() == [("warning", None, 1)]
    for _ in range(3):
        door.leave(1)
        assert door.changes() == []
    assert let_in(door, 1, 3) == 3
    assert door.changes() == []
    for _ in range(4):
        door.leave(1)
    assert door.changes() == [("warning", None, 0)]


def test_a_class_that_is_nearly_full_by_itself_has_a_warning_of_its_own():
    """And no breaker opens for it: the others have room."""
    door = make([10, 10], 100, num_sequences=1, warns=[8, 8, 80], clears=[7, 7, 70], full=100)
    assert let_in(door, 0, 1) == 1
    # The free sequence is the better class's.
    assert let_in(door, 1, 8) == 8
    assert door.changes() == [("warning", 1, 1)]
    assert breakers(door) == [0, 0]
    door.leave(0)
    # Now it is theirs, so 7 are left without one.
    assert door.changes() == []
    door.leave(1)
    assert door.changes() == [("warning", 1, 0)]


def test_who_starts_at_once_does_not_fill_the_queue():
    door = make([30] * 3, 30, num_sequences=24, warn=24, clear=21, full=30)
    assert let_in(door, 1, 47) == 47
    assert not door.figures(0)["is_warned"]
    assert let_in(door, 1, 1) == 1
    assert door.figures(0)["is_warned"]


def test_at_100_percent_the_lowest_class_is_closed_then_the_next_and_never_the_best():
    """S18: opens at 30 of 30 from the lowest upward, one more for each 5 s of the same overload."""
    door = breaking(place_waits_ns=[60 * S, 0, 0])
    assert let_in(door, 2, 29) == 29
    assert breakers(door) == [0, 0, 0]
    assert let_in(door, 2, 1) == 1
    assert breakers(door) == [0, 0, Breaker.BREAKER_OPEN]
    assert door.enter(2, 1 * S)[::3] == (BROKEN, 5 * S)
    assert (says(door, 1, 4 * S), breakers(door, 4 * S)) == (FULL, [0, 0, 2])
    assert door.enter(1, 5 * S)[::3] == (BROKEN, 10 * S)
    assert says(door, 0, 100 * S) == WAIT
    assert breakers(door, 100 * S) == [0, 2, 2]


def test_probes_that_find_no_warning_close_the_breaker_again():
    """S18: half-open after 5 s, three probes."""
    door = breaking()
    assert let_in(door, 2, 30) == 30
    for _ in range(10):
        door.leave(2)
    assert says(door, 2, 5 * S - 1) == BROKEN
    assert breakers(door, 5 * S) == [0, 0, Breaker.BREAKER_HALF_OPEN]
    assert [says(door, 2, 5 * S) for _ in range(2)] == [IN, IN]
    assert breakers(door) == [0, 0, Breaker.BREAKER_HALF_OPEN]
    assert says(door, 2, 6 * S) == IN
    assert breakers(door) == [0, 0, Breaker.BREAKER_CLOSED]


def test_a_probe_that_finds_it_nearly_full_is_let_in_and_opens_the_breaker_again():
    door = breaking()
    assert let_in(door, 2, 30) == 30
    for _ in range(8):
        door.leave(2)
    # It finds 22, then 23, then 24.
    assert [says(door, 2, 6 * S) for _ in range(4)] == [IN, IN, IN, BROKEN]
    assert door.enter(2, 7 * S)[3] == 11 * S
    assert door.figures(7 * S)["levels"][2]["num_breaker_openings"] == 2


def test_a_breaker_that_is_tripped_by_hand_opens_and_closes_like_any_other():
    door = make([30] * 3, 30)
    door.trip(99, 0)
    assert breakers(door) == [0, 2, 2]
    assert [says(door, level, 1) for level in range(3)] == [IN, BROKEN, BROKEN]
    assert [says(door, 1, 5 * S) for _ in range(3)] == [IN] * 3
    assert breakers(door, 5 * S) == [0, 0, 1]


def test_what_fills_up_again_opens_the_lowest_class_first():
    door = breaking()
    assert let_in(door, 2, 30) == 30
    assert says(door, 1, 9 * S) == BROKEN
    for _ in range(30):
        door.leave(2)
    assert [says(door, level, 20 * S) for level in (1, 2) * 3] == [IN] * 6
    assert breakers(door, 20 * S) == [0, 0, 0]
    assert let_in(door, 1, 24, 21 * S) == 24
    assert breakers(door, 21 * S) == [0, 0, 2]


# --- rules and figures ------------------------------------------------------------------


def test_new_rules_keep_who_is_inside_and_let_in_who_waits():
    door = make([2], 2, place_waits_ns=[S])
    assert let_in(door, 0, 2) == 2
    assert says(door, 0, user=5) == WAIT
    set_rules(door, [1], 1, place_waits_ns=[S], num_guests_max=300)
    assert (door.num_inside, door.tend(0)) == (2, [])
    door.leave(0)
    assert door.tend(0) == []
    set_rules(door, [2], 2, place_waits_ns=[S])
    assert door.tend(0) == [(IN, 5, 0)]


def test_the_load_is_the_larger_of_kv_and_queue():
    door = make([10], 10)
    door.see(num_sequences=0, kv_tokens=1000, kv_reserved=300)
    assert door.load == 0.3
    assert let_in(door, 0, 4) == 4
    assert door.load == 0.4


def test_what_makes_no_sense_is_an_error():
    for rules in ({"caps": [1, 1]}, {"total": -1}, {"open_ns": 0}, {"num_probes": 0}, {"warn": -1}, {"warns": [1]}):
        with pytest.raises(ValueError, match=r"."):
            set_rules(Door(1), rules.pop("caps", [1]), rules.pop("total", 1), **rules)
    with pytest.raises(ValueError, match="levels"):
        Door(17)
    door = make([1], 1)
    for call in (lambda: door.enter(1, 0), lambda: door.leave(1), lambda: door.start(1), lambda: door.submit(1, 0)):
        with pytest.raises(IndexError):
            call()
    with pytest.raises(IndexError):
        door.give_up(0)
    assert door.answer(True, 0) == (NOBODY, 0, 0)
