"""The order of the backlog, case by case."""

import pytest

from lqs._core import Backlog

STEP = 60


def make(**kwargs):
    return Backlog(**{"capacity": 64, "aging_step_ns": STEP, **kwargs})


def drain(backlog):
    order = []
    while (index := backlog.pop()) is not None:
        order.append(index)
    return order


def test_one_key_without_deadlines_is_a_fifo():
    backlog = make()
    for index in (5, 3, 9, 1):
        backlog.push(index, arrival_ns=index)
    assert len(backlog) == 4
    assert drain(backlog) == [5, 3, 9, 1]
    assert len(backlog) == 0


def test_a_better_class_goes_first_while_nobody_is_due():
    backlog = make(aging_step_ns=1000)
    for index, level in enumerate((7, 2, 0, 5)):
        backlog.push(index, level=level, arrival_ns=index)
    assert drain(backlog) == [2, 1, 3, 0]


def test_inside_a_key_deadlines_go_first_then_arrival():
    backlog = make()
    for index, deadline_ns in enumerate((0, 900, 0, 300, 300, 600)):
        backlog.push(index, arrival_ns=index, deadline_ns=deadline_ns)
    assert drain(backlog) == [3, 4, 5, 1, 0, 2]


def test_the_order_of_deadlines_holds_when_one_leaves_whose_place_an_earlier_one_takes():
    """The last of the heap, which fills the hole, is ahead of the hole's parent and must rise."""
    backlog = make()
    for index, deadline_ns in enumerate((1, 10, 2, 20, 21, 11, 12, 13, 14, 3)):
        backlog.push(index, arrival_ns=index, deadline_ns=deadline_ns)
    assert backlog.remove(5)
    assert drain(backlog) == [0, 2, 9, 1, 6, 7, 8, 3, 4]


def test_keys_take_turns_by_what_they_were_given():
    backlog = make(num_keys=2)
    for index in range(6):
        backlog.push(index, key=0, cost=10)
    for index in range(6, 9):
        backlog.push(index, key=1, cost=20)
    assert drain(backlog) == [0, 6, 1, 2, 7, 3, 4, 8, 5]


def test_a_key_of_twice_the_weight_is_given_twice_as_much():
    backlog = make(num_keys=2, key_weights=[1, 2])
    for index in range(20):
        backlog.push(index, key=0, cost=10)
        backlog.push(32 + index, key=1, cost=10)
    first = [backlog.pop() for _ in range(12)]
    assert sum(index >= 32 for index in first) == 8


def test_a_key_that_comes_back_cannot_cash_in_its_absence():
    backlog = make(num_keys=2)
    for index in range(8):
        backlog.push(index, key=0, cost=100)
    assert [backlog.pop() for _ in range(4)] == [0, 1, 2, 3]
    for index in range(10, 14):
        backlog.push(index, key=1, cost=100)
    assert backlog.counter(0, 0, 1) == backlog.counter(0, 0, 0)
    assert drain(backlog) == [4, 10, 5, 11, 6, 12, 7, 13]


def test_a_key_that_comes_to_an_empty_level_starts_where_the_last_one_left():
    backlog = make(num_keys=2)
    backlog.push(0, key=0, cost=7)
    backlog.push(1, key=0, cost=7)
    assert drain(backlog) == [0, 1]
    backlog.push(2, key=1, cost=1)
    assert backlog.counter(0, 0, 1) == 7 * 65536


def test_settling_corrects_a_counter_to_what_was_used():
    backlog = make(num_keys=2)
    for index in range(2):
        backlog.push(index, key=0, cost=100)
        backlog.push(10 + index, key=1, cost=50)
    assert [backlog.pop(), backlog.pop()] == [0, 10]
    backlog.settle(0, 20)
    assert backlog.counter(0, 0, 0) == 20 * 65536
    assert backlog.pop() == 1
    backlog.settle(10, 50)
    assert backlog.pop() == 11


def test_the_due_request_itself_is_served_not_the_top_of_its_level():
    backlog = make(num_keys=2, aged_every=1)
    backlog.push(0, level=1, key=1, arrival_ns=0, cost=1)
    backlog.push(1, level=1, key=0, arrival_ns=1, cost=1, deadline_ns=5)
    backlog.push(2, level=1, key=1, arrival_ns=2, cost=1, deadline_ns=4)
    backlog.push(3, level=0, arrival_ns=STEP + 1)
    # Level 1 by itself would serve 2, which has the earlier deadline.
    assert backlog.peek() == (0, True)
    assert backlog.pop() == 0


def test_a_tie_in_virtual_time_goes_to_the_better_class():
    backlog = make(aged_every=1)
    backlog.push(0, level=1, arrival_ns=0)
    backlog.push(1, level=0, arrival_ns=STEP)
    assert backlog.peek() == (1, False)
    assert drain(backlog) == [1, 0]


def test_due_requests_get_at_most_one_start_in_aged_every():
    backlog = make(aged_every=4)
    for index in range(10):
        backlog.push(index, level=7, arrival_ns=0)
    for index in range(10, 40):
        backlog.push(index, level=0, arrival_ns=100_000)
    order = drain(backlog)
    aged = [place for place, index in enumerate(order) if index < 10]
    assert aged == [0, 4, 8, 12, 16, 20, 24, 28, 32, 36]
    assert order[0] == 0


def test_nothing_ages_when_the_step_is_zero():
    backlog = make(aging_step_ns=0, aged_every=1)
    backlog.push(0, level=7, arrival_ns=0)
    backlog.push(1, level=0, arrival_ns=10**15)
    assert drain(backlog) == [1, 0]


def test_the_most_overdue_of_several_due_levels_is_served():
    backlog = make(aged_every=1)
    backlog.push(0, level=1, arrival_ns=1000)
    backlog.push(1, level=3, arrival_ns=0)
    backlog.push(2, level=0, arrival_ns=2000)
    assert drain(backlog) == [1, 0, 2]


def test_a_lane_with_free_share_goes_before_a_better_class_of_a_full_lane():
    backlog = make(num_lanes=2, lane_weights=[3, 1], num_places=4, aging_step_ns=0)
    for index in range(6):
        backlog.push(index, lane=0, level=0)
    backlog.push(10, lane=1, level=2)
    assert [backlog.pop() for _ in range(5)] == [0, 1, 2, 10, 3]


def test_an_unused_share_is_lent_and_comes_back():
    backlog = make(num_lanes=2, lane_weights=[1, 1], num_places=4, aging_step_ns=0)
    for index in range(8):
        backlog.push(index, lane=0)
    assert [backlog.pop() for _ in range(4)] == [0, 1, 2, 3]
    backlog.push(10, lane=1, level=7)
    backlog.push(11, lane=1, level=7)
    backlog.push(12, lane=1, level=7)
    for index in range(2):
        backlog.settle(index, 0)
    assert [backlog.pop() for _ in range(3)] == [10, 11, 4]


def test_any_waiting_one_can_be_removed_and_only_once():
    backlog = make(num_keys=3)
    for index in range(30):
        backlog.push(index, key=index % 3, level=index % 2, deadline_ns=(index % 5) * 10)
    for index in (7, 0, 29, 15):
        assert backlog.remove(index)
        assert not backlog.remove(index)
    assert not backlog.remove(63)
    assert not backlog.remove(1000)
    assert sorted(drain(backlog)) == sorted(set(range(30)) - {7, 0, 29, 15})


def test_peeking_changes_nothing():
    backlog = make()
    assert backlog.peek() is None
    assert backlog.pop() is None
    backlog.push(3)
    assert backlog.peek() == backlog.peek() == (3, False)
    assert len(backlog) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_lanes": 0},
        {"num_lanes": 5},
        {"num_levels": 0},
        {"num_levels": 17},
        {"num_keys": 0},
        {"aging_step_ns": -1},
        {"aged_every": 0},
        {"capacity": 0},
        {"key_weights": [0]},
        {"key_weights": [1, 1]},
        {"lane_weights": [0]},
    ],
)
def test_a_backlog_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValueError, match=r"."):
        make(**wrong)


@pytest.mark.parametrize("wrong", [{"lane": 1}, {"level": 8}, {"key": 1}])
def test_a_push_to_nowhere_is_refused(wrong):
    backlog = make()
    with pytest.raises(ValueError, match="no such"):
        backlog.push(0, **wrong)
    with pytest.raises(ValueError, match="no such"):
        backlog.counter(**{"lane": 0, "level": 0, "key": 0, **wrong})
    assert len(backlog) == 0


def test_an_entry_waits_at_most_once():
    backlog = make()
    backlog.push(0)
    with pytest.raises(ValueError, match="no such entry"):
        backlog.push(0)
    with pytest.raises(ValueError, match="no such entry"):
        backlog.settle(0, 1)
    with pytest.raises(ValueError, match="no such entry"):
        backlog.push(64)


def test_cycling_keeps_what_waits():
    backlog = make()
    backlog.cycle(10)
    for index in range(20):
        backlog.push(index, deadline_ns=index + 1)
    backlog.cycle(1000)
    backlog.cycle(1000, 50)
    assert len(backlog) == 20
    assert sorted(drain(backlog)) == list(range(20))
