"""Limiters under a virtual clock, in nanoseconds: the figures that are known, and what must never happen."""

from itertools import pairwise

import pytest

from lqs._core import Charge, LimitKind, Limits, LimitSays

S = 10**9
MS = 10**6
MINUTE = 60 * S


class One:
    """One limiter and a clock."""

    def __init__(self, kind=LimitKind.TOKEN_BUCKET, **shape):
        self.limits = Limits()
        self.number = self.limits.add(kind, **shape)
        self.now_ns = 0

    def reserve(self, cost=1):
        """(verdict, charge)."""
        charge = Charge()
        return self.limits.reserve(charge, (self.number,), (cost, 0, 0, 0), self.now_ns), charge

    def passes(self, cost=1):
        return self.reserve(cost)[0] == LimitSays.PASSED

    def settle(self, charge, cost=0):
        self.limits.settle(charge, (cost, 0, 0, 0), self.now_ns)

    @property
    def remaining(self):
        return self.limits.state(self.number, self.now_ns)[1]

    @property
    def reset_ns(self):
        return self.limits.state(self.number, self.now_ns)[2]


def bucket():
    """S3's: capacity 5, 2 a second."""
    return One(capacity=5, amount=2, period_ns=S)


def calls(one, num, apart_ns, pass_ns):
    """Calls one after the other, each this long after the one before, and longer where that passed; who passes."""
    passed = []
    for _ in range(num):
        passed.append(one.passes())
        one.now_ns += apart_ns + (pass_ns if passed[-1] else 0)
    return passed


def test_of_twenty_at_once_a_bucket_of_five_lets_five_pass():
    """S3: bursts up to the capacity."""
    one = bucket()
    assert [one.passes() for _ in range(20)] == [True] * 5 + [False] * 15


def test_after_three_idle_seconds_six_of_eight_pass_and_numbers_6_and_7_do_not():
    """S3: emptied and idle 3 s, 5 whole tokens are back; 8 calls 0.05 s apart, a pass takes 0.05 s more."""
    one = bucket()
    calls(one, 5, 0, 0)
    assert (one.remaining, one.passes()) == (0, False)
    one.now_ns += 3 * S
    assert one.remaining == 5
    assert calls(one, 8, 50 * MS, 50 * MS) == [True] * 6 + [False] * 2


def test_of_twenty_at_a_little_over_the_rate_numbers_14_and_17_do_not_pass():
    """S3: 20 calls 0.3 s apart, 0.05 s more after each pass, from full."""
    passed = calls(bucket(), 20, 300 * MS, 50 * MS)
    assert [number for number, has_passed in enumerate(passed) if not has_passed] == [14, 17]


def test_who_is_refused_passes_after_the_wait_it_was_told_and_not_before():
    """B40: retrying after the wait succeeds when nothing else came."""
    shapes = [
        (LimitKind.TOKEN_BUCKET, {"capacity": 7, "amount": 3, "period_ns": S}),
        (LimitKind.LEAKY_BUCKET, {"capacity": 7, "amount": 3, "period_ns": S}),
        (LimitKind.FIXED_WINDOW, {"capacity": 7, "period_ns": S}),
        (LimitKind.SLIDING_WINDOW, {"capacity": 7, "period_ns": S}),
    ]
    for kind, shape in shapes:
        for cost in (1, 2, 7):
            for early_ns in (0, 1):
                one = One(kind, **shape)
                one.now_ns = 123_456_789
                assert one.passes(4)
                one.now_ns += 77_777_777
                assert one.passes(3)
                verdict, charge = one.reserve(cost)
                assert verdict == LimitSays.REFUSED
                assert charge.binding == one.number
                one.now_ns += charge.wait_ns - early_ns
                assert one.passes(cost) == (not early_ns), (kind, cost)


def test_a_cost_above_the_capacity_never_passes_and_costs_nothing():
    """B39: what cannot be fulfilled is told at once."""
    for kind in LimitKind:
        one = One(kind, capacity=5, amount=2, period_ns=S)
        assert one.reserve(6)[0] == LimitSays.NEVER
        assert (one.remaining, one.reset_ns) == (5, 0)
        assert one.passes(5)


def test_a_leaky_bucket_lets_out_at_a_constant_rate_and_is_bounded():
    """S4: ten come at once for a line of five at 2/s: five are let out half a second apart."""
    one = One(LimitKind.LEAKY_BUCKET, capacity=5, amount=2, period_ns=S)
    tries = [one.reserve() for _ in range(10)]
    assert [verdict for verdict, _ in tries] == [LimitSays.PASSED] * 5 + [LimitSays.REFUSED] * 5
    assert [charge.turn_ns for _, charge in tries[:5]] == [0, S // 2, S, 3 * S // 2, 2 * S]
    assert tries[5][1].wait_ns == S // 2
    # Over a long time, with arrivals in clumps, no two turns are nearer than that.
    turns = []
    for _ in range(200):
        one.now_ns += 1_700 * MS
        turns += [
            charge.turn_ns for verdict, charge in (one.reserve() for _ in range(9)) if verdict == LimitSays.PASSED
        ]
    assert min(later - earlier for earlier, later in pairwise(turns)) == S // 2
    assert len(turns) > 670


def test_a_turn_that_is_given_up_is_given_to_nobody_who_would_come_too_soon():
    one = One(LimitKind.LEAKY_BUCKET, capacity=5, amount=1, period_ns=S)
    first, second, third = (one.reserve()[1] for _ in range(3))
    one.settle(second)
    _, fourth = one.reserve()
    assert fourth.turn_ns == 3 * S
    one.settle(fourth)
    # The last place in the line is free again.
    assert one.reserve()[1].turn_ns == 3 * S
    assert (first.turn_ns, third.turn_ns) == (0, 2 * S)


def test_a_fixed_window_lets_a_double_burst_pass_around_its_border_and_a_sliding_one_does_not():
    """S5, B39: at most 100 in any minute, at t = 59.9 s and 60.1 s too, but for the fixed window."""
    passed = {}
    for kind in (LimitKind.FIXED_WINDOW, LimitKind.SLIDING_WINDOW):
        one = One(kind, capacity=100, period_ns=MINUTE)
        one.now_ns = 0
        counts = []
        for time_ns in (59_900 * MS, 60_100 * MS, 119_899 * MS, 119_900 * MS):
            one.now_ns = time_ns
            counts.append(sum(one.passes() for _ in range(150)))
        passed[kind.name] = counts
    assert passed == {"FIXED_WINDOW": [100, 100, 0, 0], "SLIDING_WINDOW": [100, 0, 0, 100]}


def test_a_sliding_window_never_lets_more_pass_in_any_period():
    """S5: 30,000 arrivals, far more than the moments it tells apart."""
    one = One(LimitKind.SLIDING_WINDOW, capacity=500, period_ns=S)
    times = []
    for number in range(30_000):
        one.now_ns += 311_111 + number % 7 * 100_003
        if one.passes():
            times.append(one.now_ns)
    assert min(times[i + 500] - times[i] for i in range(len(times) - 500)) >= S
    # And it wastes little: at most a 31st of each period.
    assert len(times) > 0.95 * 500 * one.now_ns / S


def test_of_five_at_once_that_may_cost_80_of_100_exactly_one_passes():
    """B39: what it can cost is reserved before anybody has been charged; at the end the rest comes back."""
    for kind in (LimitKind.TOKEN_BUCKET, LimitKind.FIXED_WINDOW, LimitKind.SLIDING_WINDOW):
        one = One(kind, capacity=100, amount=100, period_ns=MINUTE)
        tries = [one.reserve(80) for _ in range(5)]
        assert [verdict for verdict, _ in tries] == [LimitSays.PASSED] + [LimitSays.REFUSED] * 4
        one.settle(tries[0][1], 15)
        assert one.remaining == 85
        assert one.passes(80)


def test_several_limiters_are_charged_all_or_none_and_the_one_that_binds_is_named():
    limits = Limits()
    by_second = limits.add(LimitKind.TOKEN_BUCKET, capacity=10, amount=10, period_ns=S, unit=0)
    by_minute = limits.add(LimitKind.FIXED_WINDOW, capacity=100, period_ns=MINUTE, unit=1)
    at_once = limits.add(LimitKind.PARALLEL, capacity=1, unit=2)
    everything = (by_second, by_minute, at_once)

    def left():
        return [limits.state(number, 0)[1] for number in everything]

    charge = Charge()
    assert limits.reserve(charge, everything, (10, 30, 1, 0), 0) == LimitSays.PASSED
    assert left() == [0, 70, 0]
    refused = Charge()
    assert limits.reserve(refused, everything, (1, 80, 1, 0), 0) == LimitSays.REFUSED
    assert (refused.binding, refused.wait_ns, len(refused)) == (by_minute, MINUTE, 0)
    assert limits.reserve(refused, everything, (1, 1, 1, 0), 0) == LimitSays.REFUSED
    assert (refused.binding, refused.wait_ns) == (by_second, S // 10)
    assert limits.reserve(refused, (at_once,), (0, 0, 1, 0), 0) == LimitSays.REFUSED
    assert (refused.binding, refused.wait_ns) == (at_once, -2)
    assert limits.reserve(refused, everything, (11, 1, 1, 0), 0) == LimitSays.NEVER
    assert left() == [0, 70, 0]
    limits.settle(charge, (0, 20, 0, 0), 0)
    assert left() == [10, 80, 1]


def test_windows_of_requests_and_of_tokens_recover_each_at_its_own_time():
    """B39: in another server both shared one mark, so one of them was never reset."""
    limits = Limits()
    requests = limits.add(LimitKind.FIXED_WINDOW, capacity=2, period_ns=10 * S, unit=0)
    tokens = limits.add(LimitKind.FIXED_WINDOW, capacity=100, period_ns=MINUTE, unit=1)

    def come(now_ns, num_tokens):
        charge = Charge()
        verdict = limits.reserve(charge, (requests, tokens), (1, num_tokens, 0, 0), now_ns)
        return verdict == LimitSays.PASSED or (charge.binding, charge.wait_ns)

    assert [come(0, 40), come(S, 40)] == [True, True]
    assert come(2 * S, 1) == (requests, 8 * S)
    assert come(10 * S, 40) == (tokens, 50 * S)
    assert [come(10 * S, 10), come(10 * S, 10)] == [True, True]
    assert come(20 * S, 1) == (tokens, 40 * S)
    assert come(60 * S, 100) is True


def test_what_is_only_asked_is_not_charged():
    limits = Limits()
    first, second = (limits.add(LimitKind.TOKEN_BUCKET, capacity=5, unit=unit) for unit in (0, 1))
    assert limits.reserve(Charge(), (first, second), (1, 5, 0, 0), 0, 1) == LimitSays.PASSED
    assert [limits.state(number, 0)[1] for number in (first, second)] == [4, 5]
    assert limits.reserve(Charge(), (first, second), (1, 6, 0, 0), 0, 1) == LimitSays.NEVER
    assert limits.state(first, 0)[1] == 4


def test_a_cost_that_is_only_guessed_is_taken_as_the_capacity():
    limits = Limits()
    number = limits.add(LimitKind.TOKEN_BUCKET, capacity=5, amount=1, period_ns=S, is_clamped=True)
    charge = Charge()
    assert limits.reserve(charge, (number,), (10**6, 0, 0, 0), 0) == LimitSays.PASSED
    assert limits.state(number, 0)[1] == 0
    # What it did take is exact: here a debt of two.
    limits.settle(charge, (7, 0, 0, 0), 0)
    assert limits.state(number, 0)[1:] == (0, 7 * S)
    assert limits.reserve(charge, (number,), (1, 0, 0, 0), 2 * S) == LimitSays.REFUSED
    assert limits.reserve(charge, (number,), (1, 0, 0, 0), 3 * S) == LimitSays.PASSED


def test_what_time_has_given_back_is_not_given_back_again():
    """A bucket of 100 that is full again, although a request of 100 has not ended, is emptied by another;
    the first then ends and has cost 10. That is no reason to let 90 more pass."""
    one = One(capacity=100, amount=1, period_ns=S)
    _, long = one.reserve(100)
    one.now_ns += 100 * S
    assert one.passes(100)
    one.settle(long, 10)
    assert (one.remaining, one.passes()) == (0, False)


def test_a_request_that_runs_long_in_a_busy_bucket_gives_back_all_it_did_not_use():
    one = One(capacity=100, amount=1, period_ns=S)
    _, long = one.reserve(80)
    for _ in range(30):
        one.now_ns += 10 * S
        assert one.passes(10)
    assert one.remaining == 20
    one.settle(long, 10)
    assert one.remaining == 90


@pytest.mark.parametrize("num", [1_000, 6_000])
def test_hundreds_at_once_give_back_all_they_did_not_use_and_beyond_the_bound_never_too_much(num):
    """Each comes a moment after the one before, so none of their moments may be forgotten; up to 4,096 are kept."""
    one = One(capacity=10**6, amount=1, period_ns=S)
    charges = []
    for _ in range(num):
        one.now_ns += 1000
        charges.append(one.reserve(100)[1])
    assert one.remaining == 10**6 - 100 * num
    for charge in charges:
        one.settle(charge, 10)
    if num <= 4096:
        assert one.remaining == 10**6 - 10 * num
    else:
        assert 10**6 - 100 * num < one.remaining <= 10**6 - 10 * num
    one.now_ns += 10**6 * S
    assert one.remaining == 10**6


def test_a_year_of_odd_steps_loses_nothing():
    """7 in 3 s, asked at 100,000 odd moments: what is back is what the rate gives, to the unit."""
    one = One(capacity=10**9, amount=7, period_ns=3 * S)
    assert one.passes(10**9)
    for step in range(100_000):
        one.now_ns += 315_360_001_003 + step % 13
        assert one.reserve(0)[0] == LimitSays.PASSED
    assert one.now_ns > 365 * 86_400 * S
    assert one.remaining == one.now_ns * 7 // (3 * S)


def test_the_largest_numbers_do_not_overflow():
    one = One(capacity=1 << 40, amount=1 << 40, period_ns=1 << 54)
    one.now_ns = 1 << 61
    assert one.passes(1 << 40)
    assert one.remaining == 0
    assert one.reset_ns == 1 << 54
    for _ in range(100):
        charge = Charge()
        one.limits.settle(charge, (0, 0, 0, 0), one.now_ns)
        assert one.reserve(1)[0] == LimitSays.REFUSED
    one.now_ns += 1 << 54
    assert one.remaining == 1 << 40


@pytest.mark.parametrize("kind", list(LimitKind))
def test_a_clock_that_steps_back_stands_still_and_then_goes_on(kind):
    one = One(kind, capacity=4, amount=4, period_ns=S)
    one.now_ns = 10 * S
    _, charge = one.reserve(3)
    one.now_ns = 4 * S
    assert one.remaining == 1
    assert not one.passes(2)
    one.settle(charge, 1)
    assert one.remaining == 3
    one.now_ns = 5 * S
    assert one.remaining == (3 if kind == LimitKind.PARALLEL else 4)


def test_a_limiter_that_is_gone_is_left_alone_also_when_another_stands_in_its_place():
    limits = Limits()
    first = limits.add(LimitKind.PARALLEL, capacity=2)
    charge = Charge()
    limits.reserve(charge, (first,), (2, 0, 0, 0), 0)
    limits.remove(first)
    assert len(limits) == 0
    limits.settle(charge, (0, 0, 0, 0), 0)
    limits.reserve(charge, (limits.add(LimitKind.PARALLEL, capacity=2),), (1, 0, 0, 0), 0)
    limits.remove(first)
    again = limits.add(LimitKind.PARALLEL, capacity=2)
    assert again == first
    limits.settle(charge, (0, 0, 0, 0), 0)
    assert limits.state(again, 0) == (2, 2, 0)


def test_a_limiter_may_get_another_capacity_and_keeps_what_it_counts():
    one = One(LimitKind.PARALLEL, capacity=2)
    _, charge = one.reserve()
    one.limits.resize(one.number, 1)
    assert not one.passes()
    one.settle(charge)
    assert one.passes()


def test_a_hundred_limiters_stand_apart():
    limits = Limits()
    numbers = [limits.add(LimitKind.TOKEN_BUCKET, capacity=number + 1) for number in range(100)]
    assert len(limits) == 100
    charge = Charge()
    assert limits.reserve(charge, tuple(numbers[40:60]), (3, 0, 0, 0), 0) == LimitSays.PASSED
    assert len(charge) == 20
    assert [limits.state(number, 0)[1] for number in numbers[38:42]] == [39, 40, 38, 39]


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (lambda limits: limits.add(9, capacity=1), ValueError),
        (lambda limits: limits.add(0, capacity=1, unit=4), ValueError),
        (lambda limits: limits.add(0, capacity=0), ValueError),
        (lambda limits: limits.add(0, capacity=1, amount=0), ValueError),
        (lambda limits: limits.add(0, capacity=1, period_ns=(1 << 54) + 1), ValueError),
        (lambda limits: limits.add(0, capacity=1 << 40, period_ns=1 << 54), ValueError),
        (lambda limits: limits.remove(1), IndexError),
        (lambda limits: limits.resize(0, 0), ValueError),
        (lambda limits: limits.state(1, 0), IndexError),
        (lambda limits: limits.reserve(Charge(), (1,), (1, 0, 0, 0), 0), IndexError),
        (lambda limits: limits.reserve(Charge(), (0,), (1, 0, 0), 0), ValueError),
        (lambda limits: limits.reserve(Charge(), (0,), (-1, 0, 0, 0), 0), ValueError),
        (lambda limits: limits.reserve(Charge(), (0,) * 33, (1, 0, 0, 0), 0), ValueError),
        (lambda limits: limits.reserve(Charge(), (0,), (1, 0, 0, 0), 0, 2), ValueError),
    ],
)
def test_wrong_numbers_are_errors(wrong, error):
    limits = Limits()
    limits.add(LimitKind.TOKEN_BUCKET, capacity=1)
    with pytest.raises(error):
        wrong(limits)
    assert limits.state(0, 0) == (1, 1, 0)
