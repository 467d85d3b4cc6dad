"""The rules of supervision, with the test as clock and as operating system."""

from __future__ import annotations

import signal

import pytest

from lqs.lineage import Lineage, Rules, how

LEAVE_S = 60.0


class Scene:
    """Children are numbered from 1; what they are sent and what the operator reads is kept."""

    def __init__(self, overlap: bool | None = True) -> None:
        self.num_started = 0
        self.sent: list[tuple[int, int]] = []
        self.told: list[str] = []
        rules = Rules(overlap, LEAVE_S, num_crashes_max=3, window_s=100, backoff_s=1, backoff_s_max=3)
        self.line = Lineage(rules, start=self.start, send=lambda pid, number: self.sent.append((pid, number)), log=self)
        self.line.begin()

    def start(self) -> int:
        self.num_started += 1
        return self.num_started

    def info(self, event: str, **fields: object) -> None:
        self.told.append(event)

    warning = error = info

    def ready(self, pid: int, may_overlap: bool = True) -> None:
        self.line.ready(pid, 0, may_overlap=may_overlap)

    def served(self) -> Scene:
        """The first one serves."""
        self.ready(1)
        return self


def test_a_successor_is_started_beside_and_the_old_one_leaves_when_it_is_ready() -> None:
    scene = Scene().served()
    scene.line.restart(0)
    assert (scene.num_started, scene.sent) == (2, [])
    scene.ready(2)
    assert scene.sent == [(1, signal.SIGUSR1)]
    scene.line.ended(1, 0, 1)
    assert scene.line.is_ready
    assert scene.line.code is None


@pytest.mark.parametrize(
    ("overlap", "may", "num"), [(None, True, 2), (None, False, 1), (False, True, 1), (True, False, 2)]
)
def test_whether_both_run_at_once_is_set_or_follows_the_memory(overlap: bool | None, may: bool, num: int) -> None:
    scene = Scene(overlap)
    scene.ready(1, may_overlap=may)
    scene.line.restart(0)
    assert scene.num_started == num


def test_without_room_for_two_the_next_one_starts_when_the_old_one_has_ended() -> None:
    """B49: what is waited for is the end of its process, with which its memory is free, and no figure of a card."""
    scene = Scene(overlap=False).served()
    scene.line.restart(0)
    assert scene.sent == [(1, signal.SIGUSR1)]
    scene.line.restart(0)
    assert (scene.num_started, scene.told[-1]) == (1, "no restart: a server is starting already")
    assert scene.line.successor == "starting"
    scene.line.ended(1, 0, 5)
    assert scene.num_started == 2
    assert not scene.line.is_ready
    scene.ready(2)
    assert scene.line.is_ready


def test_a_successor_that_does_not_come_up_leaves_the_old_one_alone() -> None:
    scene = Scene().served()
    scene.line.restart(0)
    assert scene.line.successor == "starting"
    scene.line.ended(2, 1, 1)
    assert scene.line.is_ready
    assert scene.sent == []
    assert scene.line.successor == "failed: exit code 1"
    scene.line.restart(2)
    assert scene.line.successor == "starting"
    assert scene.num_started == 3


def test_a_second_restart_waits_for_the_first() -> None:
    scene = Scene()
    assert scene.line.restart(0) == "a server is starting already"
    assert scene.num_started == 1
    scene.ready(1)
    assert scene.line.successor == "none"
    assert scene.line.restart(0) == ""
    assert scene.line.restart(0) == "a server is starting already"
    assert scene.num_started == 2


def test_the_memory_of_one_that_does_not_end_is_waited_for_until_the_limit_and_no_longer() -> None:
    """B49: it is killed then, and the next one begins as soon as its process is gone."""
    scene = Scene(overlap=False).served()
    scene.line.restart(0)
    assert scene.line.due_s() == LEAVE_S
    scene.line.tend(LEAVE_S)
    assert scene.sent == [(1, signal.SIGUSR1), (1, signal.SIGKILL)]
    assert scene.num_started == 1
    scene.line.ended(1, -signal.SIGKILL, LEAVE_S)
    assert scene.num_started == 2


def test_one_that_crashed_while_its_memory_was_waited_for_is_followed_at_once() -> None:
    """B49: its memory is free already."""
    scene = Scene(overlap=False).served()
    scene.line.restart(0)
    scene.line.ended(1, -signal.SIGSEGV, 1)
    assert scene.num_started == 2
    scene.line.tend(2 * LEAVE_S)
    assert scene.sent == [(1, signal.SIGUSR1)]
    scene.ready(2)
    assert scene.line.is_ready


def test_an_old_server_that_does_not_end_is_killed_once() -> None:
    scene = Scene().served()
    scene.line.restart(0)
    scene.ready(2)
    assert scene.line.due_s() == LEAVE_S
    scene.line.tend(LEAVE_S - 0.1)
    assert len(scene.sent) == 1
    for _ in range(2):
        scene.line.tend(LEAVE_S)
    assert scene.sent[1:] == [(1, signal.SIGKILL)]
    scene.line.ended(1, -signal.SIGKILL, LEAVE_S)
    assert scene.told[-1] == "the old server did not end well"
    assert scene.line.is_ready


def test_a_crash_starts_it_again_later_each_time_and_in_the_end_no_more() -> None:
    """B49: nobody waits for the memory of a process that is gone; only crash after crash waits longer."""
    scene = Scene().served()
    now_s = 0.0
    for number, wait_s in enumerate((1, 2, 3), start=1):
        scene.line.ended(number, -signal.SIGSEGV, now_s)
        assert scene.line.due_s() == now_s + wait_s
        scene.line.tend(now_s + wait_s - 0.1)
        assert scene.num_started == number
        now_s += wait_s
        scene.line.tend(now_s)
        assert scene.num_started == number + 1
    scene.line.ended(4, 1, now_s)
    assert scene.line.code == 1
    assert scene.told[-1] == "gave up: the server died too often"


def test_crashes_that_are_long_ago_do_not_count() -> None:
    scene = Scene().served()
    for number in range(1, 8):
        scene.line.ended(number, -signal.SIGABRT, number * 101.0)
        assert scene.line.due_s() == number * 101.0 + 1
        scene.line.tend(number * 101.0 + 1)
    assert scene.line.code is None


def test_a_crash_while_the_successor_loads_makes_it_the_one() -> None:
    scene = Scene().served()
    scene.line.restart(0)
    scene.line.ended(1, -signal.SIGSEGV, 1)
    assert scene.num_started == 2
    scene.ready(2)
    assert scene.line.is_ready
    assert scene.sent == []


def test_a_first_start_that_fails_is_not_tried_again() -> None:
    scene = Scene()
    scene.line.ended(1, 2, 0)
    assert (scene.line.code, scene.num_started) == (2, 1)


def test_a_server_that_ends_well_by_itself_was_told_to() -> None:
    scene = Scene().served()
    scene.line.ended(1, 0, 0)
    assert (scene.line.code, scene.num_started) == (0, 1)


def test_one_that_was_told_to_end_takes_its_successor_along() -> None:
    scene = Scene().served()
    scene.line.restart(0)
    scene.line.ended(1, 0, 1)
    assert scene.sent == [(2, signal.SIGTERM)]
    scene.line.ended(2, -signal.SIGTERM, 2)
    assert (scene.line.code, scene.num_started) == (0, 2)
    assert "the new server did not come up, the old one goes on" not in scene.told


@pytest.mark.parametrize("is_replaced", [False, True])
def test_one_that_says_so_ends_all_even_where_its_successor_is_faster(is_replaced: bool) -> None:
    scene = Scene().served()
    scene.line.restart(0)
    if is_replaced:
        scene.ready(2)
    scene.sent.clear()
    for _ in range(2):
        scene.line.drains(1)
    # A second signal would end it at once.
    assert scene.sent == [(2, signal.SIGTERM)]
    assert scene.line.restart(1) == "the server is told to end"
    scene.line.ended(1, 0, 1)
    scene.line.ended(2, 0, 1)
    assert (scene.line.code, scene.num_started) == (0, 2)


def test_a_stranger_ends_nobody() -> None:
    scene = Scene().served()
    scene.line.drains(99)
    assert (scene.sent, scene.line.is_stopping) == ([], False)


@pytest.mark.parametrize(("code", "exit_code"), [(0, 0), (1, 1), (-signal.SIGTERM, 1)])
def test_a_stop_is_passed_on_and_over_when_all_have_ended(code: int, exit_code: int) -> None:
    scene = Scene().served()
    scene.line.restart(0)
    scene.ready(2)
    scene.line.restart(0)
    scene.sent.clear()
    scene.line.stop(signal.SIGTERM)
    assert scene.sent == [(2, signal.SIGTERM), (3, signal.SIGTERM), (1, signal.SIGTERM)]
    scene.line.restart(0)
    scene.line.ended(1, 0, 0)
    scene.line.ended(3, -signal.SIGTERM, 0)
    assert (scene.line.code, scene.num_started) == (None, 3)
    scene.line.ended(2, code, 0)
    assert scene.line.code == exit_code


def test_a_stop_while_nobody_runs_is_over_at_once() -> None:
    scene = Scene().served()
    scene.line.ended(1, -signal.SIGKILL, 0)
    assert scene.line.code is None
    scene.line.stop(signal.SIGTERM)
    scene.line.tend(100)
    assert (scene.line.code, scene.num_started) == (0, 1)


def test_a_stop_while_the_old_one_makes_room_starts_nobody() -> None:
    scene = Scene(overlap=False).served()
    scene.line.restart(0)
    scene.line.stop(signal.SIGINT)
    scene.line.ended(1, 0, 0)
    assert (scene.line.code, scene.num_started) == (0, 1)


def test_a_word_from_a_stranger_changes_nothing() -> None:
    scene = Scene()
    scene.ready(99)
    assert not scene.line.is_ready
    scene.line.ended(99, 1, 0)
    assert scene.line.code is None


@pytest.mark.parametrize(("code", "words"), [(3, "exit code 3"), (-11, "SIGSEGV"), (-500, "signal 500")])
def test_how_it_ended_is_told_in_words(code: int, words: str) -> None:
    assert how(code) == words
