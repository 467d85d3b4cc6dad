"""The door and its plain twin, fed alike: the same verdicts, the same counts, the same order of grants."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lqs._core import Door
from tests.core import reference_door as reference

NUM_LEVELS = 3


def by_class(strategy, num=NUM_LEVELS):
    return st.lists(strategy, min_size=num, max_size=num)


LEVELS = st.integers(0, NUM_LEVELS - 1)
# Small numbers, and mostly such that a queue is full and somebody below could leave.
CAPS = by_class(st.sampled_from([0, 1, 2, 2, 3, 4]))
TOTAL = st.sampled_from([0, 1, 2, 2, 3, 3, 5])
RULES = st.fixed_dictionaries(
    {
        "caps": CAPS,
        "total": TOTAL,
        "demotes": by_class(st.sampled_from([False, False, True])),
        "evicts": by_class(st.sampled_from([True, True, False])),
        "place_waits_ns": by_class(st.sampled_from([0, 3, 8])),
        "num_guests_max": st.sampled_from([0, 1, 2, 5]),
        "warns": by_class(st.integers(0, 4), NUM_LEVELS + 1),
        "full": st.sampled_from([0, 0, 1, 2, 3]),
        "open_ns": st.integers(1, 6),
        "num_probes": st.integers(1, 3),
    }
)


class DoorsAgree(RuleBasedStateMachine):
    """Requests arrive, wait at the door, come in, are submitted, start, leave; some are evicted for others."""

    @initialize(rules=RULES, num_sequences=st.sampled_from([0, 0, 1, 2]))
    def begin(self, rules, num_sequences):
        self.rules = rules | {"clears": [max(warn - 1, 1) for warn in rules["warns"]]}
        self.door = Door(NUM_LEVELS)
        self.door.set_rules(**self.rules)
        self.door.see(num_sequences=num_sequences, kv_tokens=30)
        self.twin = reference.Door(**self.rules, num_sequences=num_sequences, kv_tokens=30)
        self.now_ns = 0
        self.num_arrived = 0
        self.guests = {}  # By user: its number at the door.
        self.entering, self.waiting, self.running = [], [], []  # Classes; the latter two with tokens.
        self.num_places = rules["total"] + num_sequences

    def tend(self):
        told = self.door.tend(self.now_ns)
        assert told == self.twin.tend(self.now_ns)
        for says, user, level in told:
            if says != reference.EVICT:
                del self.guests[user]
            if says == reference.IN:
                self.entering.append(level)

    @rule(levels=st.lists(LEVELS, min_size=1, max_size=4), expire_in_ns=st.sampled_from([0, 0, 0, 2, 10]))
    def arrive(self, levels, expire_in_ns):
        for level in levels:
            self.arrive_one(level, expire_in_ns)

    def arrive_one(self, level, expire_in_ns):
        self.num_arrived += 1
        user = self.num_arrived
        expire_ns = self.now_ns + expire_in_ns if expire_in_ns else 0
        says, in_level, guest, at_ns = self.door.enter(level, self.now_ns, expire_ns=expire_ns, user=user)
        assert (says, in_level) == self.twin.enter(level, self.now_ns, expire_ns, user)
        assert (guest is not None) == (says in (reference.WAIT, reference.EVICT))
        if guest is not None:
            self.guests[user] = guest
        elif says == reference.IN:
            self.entering.append(in_level)
        elif says == reference.BROKEN:
            assert at_ns > self.now_ns
            assert level > 0

    @precondition(lambda self: self.twin.asks)
    @rule()
    def answer(self):
        # The scheduler knows nobody but those that were submitted and wait.
        level = self.twin.asks[0].level
        below = [one for one in self.waiting if one[0] > level]
        if below:
            victim = max(below)
            self.waiting.remove(victim)
            self.door.settle(*victim, has_run=False)
            self.twin.settle(*victim, has_run=False)
        says, user, in_level = self.door.answer(bool(below), self.now_ns)
        assert (says, user) == self.twin.answer(bool(below), self.now_ns)
        if says != reference.NOBODY:
            assert in_level == level
        if says in (reference.IN, reference.FULL):
            del self.guests[user]
        if says == reference.IN:
            self.entering.append(in_level)
        self.tend()

    @precondition(lambda self: self.guests)
    @rule(pick=st.integers(0, 100))
    def give_up(self, pick):
        user = sorted(self.guests)[pick % len(self.guests)]
        self.door.give_up(self.guests.pop(user))
        self.twin.give_up(user)

    @precondition(lambda self: self.entering)
    @rule(num=st.integers(1, 5), tokens=st.integers(1, 12))
    def submit(self, num, tokens):
        for level in self.entering[:num]:
            self.entering.remove(level)
            self.door.submit(level, tokens)
            self.twin.submit(level, tokens)
            self.waiting.append((level, tokens))
            self.tend()

    @precondition(lambda self: self.entering)
    @rule(pick=st.integers(0, 100))
    def leave(self, pick):
        level = self.entering.pop(pick % len(self.entering))
        self.door.leave(level)
        self.twin.leave(level)
        self.tend()

    @precondition(lambda self: self.waiting)
    @rule(pick=st.integers(0, 100))
    def start(self, pick):
        if len(self.running) >= self.twin.num_sequences:
            return
        one = self.waiting.pop(pick % len(self.waiting))
        self.running.append(one)
        self.door.start(one[0])
        self.twin.start(one[0])
        self.tend()

    @precondition(lambda self: self.running or self.waiting)
    @rule(pick=st.integers(0, 100), has_run=st.booleans())
    def settle(self, pick, has_run):
        has_run = bool(self.running) if has_run else not self.waiting
        ones = self.running if has_run else self.waiting
        one = ones.pop(pick % len(ones))
        self.door.settle(*one, has_run=has_run)
        self.twin.settle(*one, has_run=has_run)
        self.tend()

    @rule(passed_ns=st.integers(0, 5))
    def pass_time(self, passed_ns):
        self.now_ns += passed_ns
        due_ns = self.door.due_ns
        if self.guests and due_ns is not None and due_ns > self.now_ns:
            # Nobody's time is over before that.
            assert all(g.until_ns > self.now_ns for g in self.twin.guests)
        self.tend()

    @rule(num=st.integers(0, 4))
    def trip(self, num):
        self.door.trip(num, self.now_ns)
        self.twin.trip(num, self.now_ns)

    @rule(caps=CAPS, total=TOTAL)
    def change_rules(self, caps, total):
        twin = self.twin
        twin.caps, twin.total = caps, total
        self.door.set_rules(**self.rules | {"caps": caps, "total": total})
        if not twin.full:
            for breaker in twin.breakers:
                breaker.state = reference.CLOSED
        twin.ease()
        # Who is inside stays.
        self.num_places = max(total + twin.num_sequences, self.door.num_inside)
        self.tend()

    @invariant()
    def figures_agree(self):
        if not hasattr(self, "door"):
            return
        figures = self.door.figures(0)
        assert [level["num_pending"] for level in figures["levels"]] == self.twin.pending
        assert sum(self.twin.pending) == len(self.entering) + len(self.waiting)
        assert figures["num_running"] == len(self.running)
        assert self.door.num_inside == len(self.entering) + len(self.waiting) + len(self.running) <= self.num_places
        assert self.door.num_guests == len(self.guests)
        assert figures["num_asks"] == len(self.twin.asks)
        warned = [*(level["is_warned"] for level in figures["levels"]), figures["is_warned"]]
        assert warned == self.twin.warned
        assert [level["breaker"] for level in figures["levels"]] == [b.state for b in self.twin.breakers]
        assert figures["levels"][0]["breaker"] == reference.CLOSED
        for level in range(NUM_LEVELS):
            assert figures["levels"][level]["num_place_waiting"] == len(self.twin.of_class(level))

    def teardown(self):
        """Everybody leaves, and nothing is left."""
        if not hasattr(self, "door"):
            return
        for user in sorted(self.guests):
            self.door.give_up(self.guests[user])
        while self.door.figures(0)["num_asks"]:
            assert self.door.answer(False, self.now_ns)[0] == reference.NOBODY
        for level in self.entering:
            self.door.leave(level)
        for one in self.waiting:
            self.door.settle(*one, has_run=False)
        for one in self.running:
            self.door.settle(*one, has_run=True)
        assert (self.door.num_inside, self.door.num_guests) == (0, 0)
        assert self.door.tend(10**9) == []
        assert self.door.load == 0


TestDoors = DoorsAgree.TestCase
TestDoors.settings = settings(max_examples=200, stateful_step_count=80, deadline=None)
