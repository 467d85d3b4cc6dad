"""The limiters again, in plain Python: each keeps all it was charged and computes from that.

This is the rule itself: a limiter stands as if every settled request had cost from the beginning
what it did cost in the end.
"""

from dataclasses import dataclass
from fractions import Fraction

NEVER, UNKNOWN = "never", "unknown"


@dataclass
class Paid:
    """One charge: when, and what it costs as far as is known."""

    at_ns: int
    cost: int


class Bucket:
    """A token bucket: full at the start, then `amount` per period."""

    def __init__(self, capacity, amount, period_ns):
        self.capacity = capacity
        self.ns_per_unit = Fraction(period_ns, amount)
        self.paid = []

    def used_ns(self, now_ns):
        """How long it takes until it is full."""
        level = Fraction(0)
        for one in self.paid:
            level = max(level, one.at_ns) + one.cost * self.ns_per_unit
        return max(level - now_ns, 0)

    def wait_ns(self, cost, now_ns):
        if cost > self.capacity:
            return NEVER
        excess = self.used_ns(now_ns) - (self.capacity - cost) * self.ns_per_unit
        return max(-(-excess // 1), 0)

    def charge(self, cost, now_ns):
        self.paid.append(Paid(now_ns, cost))
        return self.paid[-1]

    def settle(self, one, cost, now_ns):
        if cost > one.cost:
            self.charge(cost - one.cost, now_ns)
        else:
            one.cost = cost

    def state(self, now_ns):
        used_ns = self.used_ns(now_ns)
        used = -(-used_ns // self.ns_per_unit)
        return max(self.capacity - used, 0), -(-used_ns // 1)


class Line(Bucket):
    """A leaky bucket: those behind have their turn, so only the last can give back."""

    def turn_ns(self, now_ns):
        return -(-self.used_ns(now_ns) // 1)

    def settle(self, one, cost, now_ns):
        if cost > one.cost or one is self.paid[-1]:
            super().settle(one, cost, now_ns)


class Fixed:
    """`capacity` in each period."""

    def __init__(self, capacity, _amount, period_ns):
        self.capacity = capacity
        self.period_ns = period_ns
        self.paid = []

    def counts(self, one, now_ns):
        return one.at_ns // self.period_ns == now_ns // self.period_ns

    def leaves_ns(self, one):
        return (one.at_ns // self.period_ns + 1) * self.period_ns

    def used(self, now_ns):
        return sum(one.cost for one in self.paid if self.counts(one, now_ns))

    def wait_ns(self, cost, now_ns):
        if cost > self.capacity:
            return NEVER
        times = sorted({now_ns} | {self.leaves_ns(one) for one in self.paid if self.counts(one, now_ns)})
        return next(time_ns for time_ns in times if self.used(time_ns) + cost <= self.capacity) - now_ns

    charge = Bucket.charge
    settle = Bucket.settle

    def state(self, now_ns):
        left = [self.leaves_ns(one) for one in self.paid if one.cost and self.counts(one, now_ns)]
        used = self.used(now_ns)
        return max(self.capacity - used, 0), max(left) - now_ns if used else 0


class Sliding(Fixed):
    """`capacity` in any period."""

    def counts(self, one, now_ns):
        return now_ns - self.period_ns < one.at_ns <= now_ns

    def leaves_ns(self, one):
        return one.at_ns + self.period_ns


class Parallel:
    """`capacity` at once."""

    def __init__(self, capacity, _amount, _period_ns):
        self.capacity = capacity
        self.paid = []

    def used(self):
        return sum(one.cost for one in self.paid)

    def wait_ns(self, cost, _now_ns):
        if cost > self.capacity:
            return NEVER
        return 0 if self.used() + cost <= self.capacity else UNKNOWN

    charge = Bucket.charge
    settle = Bucket.settle

    def state(self, _now_ns):
        return max(self.capacity - self.used(), 0), 0


KINDS = [Bucket, Line, Fixed, Sliding, Parallel]
"""By the core's number."""


def ask(limiters, costs, now_ns):
    """(verdict, which one binds, how long) for all of them together."""
    waits = [one.wait_ns(cost, now_ns) for one, cost in zip(limiters, costs, strict=True)]
    if NEVER in waits:
        return "never", waits.index(NEVER), None
    if not any(waits):
        return "passed", None, 0
    timed = [-1 if wait == UNKNOWN else wait for wait in waits]
    longest = max((wait for wait in timed if wait), key=lambda wait: wait)
    return "refused", timed.index(longest), UNKNOWN if longest == -1 else longest
