"""How many threads a CPU device slot computes with, under a clock that the test holds."""

from lqs._engine import GovernorProbe

MS = 1_000_000
S = 1_000_000_000


class Steps:
    """A worker's steps: each takes its time, and may have lost a core."""

    def __init__(self, width: int = 2) -> None:
        self.governor = GovernorProbe(width)
        self.now_ns = 0
        self.preemptions = 0

    def take(self, ms: int, *, lost_core: bool = False, num_tokens: int = 8) -> bool:
        self.now_ns += ms * MS
        self.preemptions += lost_core
        return self.governor.note(num_tokens, ms * MS, self.now_ns, self.preemptions)

    def learn(self, ms: int = 50) -> None:
        for _ in range(10):
            assert not self.take(ms)


def test_undisturbed_steps_keep_all_threads():
    steps = Steps()
    steps.learn()
    assert steps.governor.current == 2


def test_two_disturbed_steps_in_a_row_take_one_thread_away():
    steps = Steps()
    steps.learn()
    assert not steps.take(200, lost_core=True)
    assert steps.take(200, lost_core=True)
    assert steps.governor.current == 1


def test_a_slow_step_that_lost_no_core_is_a_long_context_and_changes_nothing():
    steps = Steps()
    steps.learn()
    for _ in range(5):
        assert not steps.take(200)
    assert steps.governor.current == 2


def test_a_lost_core_that_cost_nothing_changes_nothing():
    steps = Steps()
    steps.learn()
    for _ in range(5):
        assert not steps.take(55, lost_core=True)
    assert steps.governor.current == 2


def test_one_disturbed_step_between_good_ones_is_forgiven():
    steps = Steps()
    steps.learn()
    for _ in range(4):
        assert not steps.take(200, lost_core=True)
        assert not steps.take(50)
    assert steps.governor.current == 2


def test_all_threads_are_tried_again_after_a_while_that_doubles_as_tries_fail():
    steps = Steps()
    steps.learn()
    steps.take(200, lost_core=True)
    steps.take(200, lost_core=True)
    holds = []
    for _ in range(3):
        left_ns = steps.now_ns
        while steps.governor.current == 1:
            steps.take(90)
        holds.append(round((steps.now_ns - left_ns) / S))
        assert steps.governor.current == 2
        # The try fails at its first step.
        assert steps.take(300, lost_core=True)
        assert steps.governor.current == 1
    assert holds == [1, 2, 4]


def test_a_try_that_goes_well_ends_the_narrowness():
    steps = Steps()
    steps.learn()
    steps.take(200, lost_core=True)
    steps.take(200, lost_core=True)
    while steps.governor.current == 1:
        steps.take(90)
    for _ in range(20):
        assert not steps.take(50)
    assert steps.governor.current == 2


def test_steps_are_held_against_steps_of_their_size():
    steps = Steps()
    for _ in range(10):
        steps.take(50, num_tokens=4)
        steps.take(400, num_tokens=48)
    assert not steps.take(400, lost_core=True, num_tokens=48)
    assert not steps.take(400, lost_core=True, num_tokens=40)
    assert steps.governor.current == 2


def test_one_thread_stays_one():
    steps = Steps(width=1)
    steps.learn()
    for _ in range(3):
        assert not steps.take(500, lost_core=True)
    assert steps.governor.current == 1
