"""Limiters and their plain-Python twins, fed alike by hypothesis, must never differ."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from lqs._core import Charge, Limits, LimitSays

from . import reference_limits as reference

# Small numbers that share no factor, so that most moments fall between whole units.
SHAPES = st.tuples(
    st.integers(0, 4),
    st.integers(1, 12),
    st.sampled_from([1, 2, 3, 7]),
    st.sampled_from([1, 5, 10, 64]),
)
VERDICTS = {"passed": LimitSays.PASSED, "refused": LimitSays.REFUSED, "never": LimitSays.NEVER}


def made(limits, shape, unit):
    kind, capacity, amount, period_ns = shape
    number = limits.add(kind, capacity=capacity, amount=amount, period_ns=period_ns, unit=unit)
    return number, reference.KINDS[kind](capacity, amount, period_ns)


class LimitsAgree(RuleBasedStateMachine):
    """Requests are charged, settled, refunded, taken at too little, in any order; and the clock steps back."""

    charged = Bundle("charged")

    @initialize(shapes=st.lists(SHAPES, min_size=4, max_size=4), begin_ns=st.sampled_from([0, 3, 10**18]))
    def begin(self, shapes, begin_ns):
        self.limits = Limits()
        self.twins = dict(made(self.limits, shape, unit) for unit, shape in enumerate(shapes))
        # What the caller says, and what has really passed.
        self.told_ns = self.now_ns = begin_ns

    @rule(passed_ns=st.integers(0, 40))
    def wait(self, passed_ns):
        self.told_ns += passed_ns
        self.now_ns += passed_ns
        # Told by whoever asks next.
        self.limits.state(0, self.told_ns)

    @rule(back_ns=st.integers(1, 10**9))
    def step_back(self, back_ns):
        self.told_ns -= back_ns
        self.limits.state(0, self.told_ns)

    @rule(
        target=charged,
        chosen=st.lists(st.integers(0, 3), unique=True, max_size=4),
        costs=st.tuples(*[st.integers(0, 13)] * 4),
        num_asked=st.integers(0, 4),
    )
    def reserve(self, chosen, costs, num_asked):
        charge = Charge()
        num_charged = max(len(chosen) - num_asked, 0)
        verdict = self.limits.reserve(charge, tuple(chosen), costs, self.told_ns, num_charged)
        twins = [self.twins[number] for number in chosen]
        said, binding, wait_ns = reference.ask(twins, [costs[number] for number in chosen], self.now_ns)
        assert verdict == VERDICTS[said]
        if said == "refused":
            assert charge.binding == chosen[binding]
            assert charge.wait_ns == (-2 if wait_ns == reference.UNKNOWN else wait_ns)
        elif said == "never":
            assert charge.binding == chosen[binding]
        if said != "passed":
            assert len(charge) == 0
            return charge, {}
        paying = chosen[:num_charged]
        turns = [self.twins[number].turn_ns(self.now_ns) for number in paying if hasattr(self.twins[number], "turn_ns")]
        assert charge.turn_ns == max(self.told_ns + max([0, *turns]), 0)
        return charge, {number: self.twins[number].charge(costs[number], self.now_ns) for number in paying}

    @rule(charged=consumes(charged), costs=st.tuples(*[st.integers(0, 13)] * 4))
    def settle(self, charged, costs):
        charge, paid = charged
        for _ in range(2):
            self.limits.settle(charge, costs, self.told_ns)
        for number, one in paid.items():
            self.twins[number].settle(one, costs[number], self.now_ns)

    @rule(charged=consumes(charged))
    def refund(self, charged):
        self.settle(charged, (0, 0, 0, 0))

    @invariant()
    def states_agree(self):
        for number, twin in self.twins.items() if hasattr(self, "limits") else ():
            assert self.limits.state(number, self.told_ns)[1:] == twin.state(self.now_ns)


TestLimits = LimitsAgree.TestCase
TestLimits.settings = settings(max_examples=130, stateful_step_count=60, deadline=None)


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from([0, 3]),
    capacity=st.integers(50, 4000),
    steps=st.lists(
        st.tuples(st.integers(1, 9), st.integers(0, 20), st.integers(0, 20), st.integers(0, 400)),
        min_size=150,
        max_size=300,
    ),
)
def test_with_hundreds_of_moments_a_bucket_is_exact_and_a_window_never_lax(kind, capacity, steps):
    """A sliding window tells 64 moments apart; beyond them it is stricter than the rule."""
    limits, now_ns = Limits(), 0
    number, twin = made(limits, (kind, capacity, 3, 64 if kind == 0 else 2_000), 0)
    held = []
    for passed_ns, cost, actual, which in steps:
        now_ns += passed_ns
        charge = Charge()
        if limits.reserve(charge, (number,), (cost, 0, 0, 0), now_ns) == LimitSays.PASSED:
            assert twin.wait_ns(cost, now_ns) == 0
            held.append((charge, twin.charge(cost, now_ns)))
        if held and which < 120:
            charge, one = held.pop(which % len(held))
            limits.settle(charge, (actual, 0, 0, 0), now_ns)
            twin.settle(one, actual, now_ns)
        state, by_rule = limits.state(number, now_ns)[1:], twin.state(now_ns)
        assert state == by_rule or (kind == 3 and state[0] <= by_rule[0] and state[1] >= by_rule[1])
    # And all of it comes back.
    for charge, one in held:
        limits.settle(charge, (0, 0, 0, 0), now_ns)
        twin.settle(one, 0, now_ns)
    assert limits.state(number, now_ns)[1] <= twin.state(now_ns)[0]
    assert limits.state(number, now_ns + 10**9) == (capacity, capacity, 0)


@settings(max_examples=100, deadline=None)
@given(kind=st.integers(0, 4), costs=st.lists(st.integers(0, 5), max_size=30), order=st.randoms())
def test_what_is_refunded_at_once_leaves_no_trace_in_any_order(kind, costs, order):
    if kind == 1:
        # A turn in a line goes to nobody else, but the last one's.
        costs = costs[:1]
    limits = Limits()
    number, _ = made(limits, (kind, 200, 3, 64), 0)
    charges = []
    for cost in costs:
        charges.append(Charge())
        assert limits.reserve(charges[-1], (number,), (cost, 0, 0, 0), 5) == LimitSays.PASSED
    order.shuffle(charges)
    for charge in charges:
        limits.settle(charge, (0, 0, 0, 0), 5)
    assert limits.state(number, 5) == (200, 200, 0)
