"""The expected wait, from made-up pasts under a clock of the test's own."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import pytest

from lqs.request import NS_PER_S, Lane, Request, Tenant
from lqs.scheduling.forecast import Forecast
from tests.scheduling.rush import Rush

S = NS_PER_S


@dataclass
class Ended:
    """An outcome: started at 0, a second of prefill, then a second for each token."""

    num_completion_tokens: int
    finish: int = 1
    error_code: int = 0
    num_cached_tokens: int = 0
    assigned_ns: int = 0
    prefill_done_ns: int = 0
    first_token_ns: int = S

    @property
    def finished_ns(self) -> int:
        return self.num_completion_tokens * S


class Board:
    """A forecast for one device slot."""

    def __init__(self, num_sequences: int = 2, aging_step_ns: int = 60 * S, *, is_guaranteed: bool = True) -> None:
        self.slot: dict[str, Any] = {
            "num_sequences": num_sequences, "num_extra": 0, "num_running": 0, "headroom": 1000, "lanes": 3,
            "is_dead": False, "is_drained": False,
        }  # fmt: skip
        self.others: list[dict[str, Any]] = []
        self.num_made = 0
        self.forecast = Forecast(
            num_levels=3,
            lane_weights=(3, 1),
            aging_step_ns=aging_step_ns,
            slots=lambda: [self.slot, *self.others],
            is_guaranteed=is_guaranteed,
        )

    def come(
        self,
        now_ns: int = 0,
        *,
        level: int = 1,
        asked: int | None = None,
        lane: Lane = Lane.SHORT,
        max_tokens: int = 10,
    ) -> Request:
        self.num_made += 1
        tenant = Tenant("t", "normal", 1, 1, 1)
        request = Request(id="r", tenant=tenant, model="m", arrival_ns=now_ns, level=level, lane=lane)
        request.asked_level = asked
        request.prompt, request.max_tokens_granted, request.handle = array("i", [1]), max_tokens, self.num_made
        self.forecast.submitted(request, now_ns)
        return request

    def start(self, now_ns: int = 0, **given: Any) -> Request:
        request = self.come(now_ns, **given)
        self.forecast.started(request, 0)
        self.slot["num_running"] += 1
        return request

    def finish(self, request: Request, num_tokens: int) -> None:
        self.forecast.finished(request, Ended(num_tokens))
        self.slot["num_running"] -= 1

    def wait_s(self, now_ns: int, *, level: int = 1, lane: Lane = Lane.SHORT, ahead: int | None = None) -> float | None:
        ahead = self.forecast.num_ahead(lane, level) if ahead is None else ahead
        wait_ns = self.forecast.wait_ns(lane, level, ahead, now_ns)
        return None if wait_ns is None else wait_ns / S


def test_where_a_sequence_is_free_nobody_waits() -> None:
    board = Board()
    assert board.wait_s(S) == 0
    board.start()
    assert board.wait_s(2 * S) == 0
    board.start()
    # Both are taken, and nothing is known of how long they take.
    assert board.wait_s(3 * S) is None


def test_at_the_very_start_what_runs_says_how_fast_it_goes() -> None:
    board = Board(num_sequences=1)
    request = board.start()
    for second in range(1, 5):
        board.forecast.output(request, 1, second * S)
    # Four of ten tokens, one a second.
    assert board.wait_s(4 * S) == pytest.approx(6)
    board.come(4 * S)
    board.forecast.output(request, 1, 5 * S)
    # Who waits already takes ten.
    assert board.wait_s(5 * S) == pytest.approx(6 - 1 + 10)


def test_what_finished_says_how_long_the_next_takes() -> None:
    board = Board(num_sequences=2)
    # They made half of what they were granted.
    for _ in range(8):
        board.finish(board.start(max_tokens=20), 10)
    first = [board.start(100 * S, max_tokens=20) for _ in range(2)]
    waiting = [board.come(100 * S, max_tokens=20) for _ in range(3)]
    # A second to the first token, one for each of nine others: 10 s each, two at a time, three ahead.
    assert board.wait_s(100 * S) == pytest.approx(20, rel=0.05)
    assert board.wait_s(100 * S, ahead=0) == pytest.approx(10, rel=0.05)
    board.forecast.ended(waiting[0])
    board.finish(first[0], 10)
    assert board.wait_s(101 * S) == pytest.approx(10, abs=1.5)


def test_who_was_cut_off_says_nothing_about_how_long_its_kind_gets() -> None:
    board = Board(num_sequences=1)
    for finish in (1, 3, 4):
        request = board.start()
        board.forecast.finished(request, Ended(10 if finish == 1 else 2, finish))
        board.slot["num_running"] -= 1
    board.start(100 * S)
    assert board.wait_s(100 * S) == pytest.approx(1 + 10, rel=0.2)


def test_better_classes_that_still_come_are_reckoned_with_until_it_has_aged() -> None:
    board, old = Board(num_sequences=1), Board(num_sequences=1, aging_step_ns=S)
    for each in (board, old):
        for _ in range(8):
            each.finish(each.start(max_tokens=2), 2)
        for second in range(100, 140):
            each.come(second * S, level=0)
        each.start(140 * S, max_tokens=2)
    calm = board.wait_s(140 * S, ahead=10)
    assert calm is not None
    waits = [each.wait_s(140 * S, level=1, ahead=10) for each in (board, old)]
    best = board.wait_s(140 * S, level=0, ahead=10)
    assert best is not None
    assert waits[0] is not None
    assert waits[1] is not None
    assert best <= waits[1] < waits[0]


def test_the_other_lane_takes_its_share() -> None:
    board = Board(num_sequences=1)
    for _ in range(8):
        board.finish(board.start(), 10)
    board.start(100 * S)
    alone = board.wait_s(100 * S, ahead=6)
    for _ in range(50):
        board.come(100 * S, lane=Lane.LONG)
    shared = board.wait_s(101 * S, ahead=6)
    assert alone is not None
    assert shared is not None
    # Three short for one long.
    assert shared / alone == pytest.approx(8 / 6, rel=0.15)


def test_a_sequence_is_kept_for_who_is_better_than_one_that_runs() -> None:
    board = Board(num_sequences=1)
    request = board.start(level=1)
    for second in range(1, 5):
        board.forecast.output(request, 1, second * S)
    assert board.wait_s(4 * S, level=0) == pytest.approx(6)
    board.slot["num_extra"] = 1
    assert (board.wait_s(4 * S, level=0), board.wait_s(4 * S, level=1)) == (0, pytest.approx(6))


def test_cells_that_are_missing_make_a_free_sequence_useless() -> None:
    board = Board()
    board.slot["headroom"] = 5
    request = board.start()
    board.come()
    board.forecast.output(request, 5, S)
    board.forecast.output(request, 1, 5 * S)
    wait_s = board.wait_s(6 * S, ahead=0)
    assert wait_s is not None
    assert wait_s > 1


def test_where_kv_is_promised_by_how_long_answers_come_out_more_fit() -> None:
    waits = []
    for is_guaranteed in (True, False):
        board = Board(num_sequences=2, is_guaranteed=is_guaranteed)
        # They make a tenth of what they may.
        for _ in range(8):
            board.finish(board.start(max_tokens=100), 10)
        board.start(100 * S, max_tokens=100)
        board.slot["headroom"] = 50
        board.come(100 * S, max_tokens=100)
        waits.append(board.wait_s(101 * S, ahead=0))
    assert waits == [pytest.approx(10, rel=0.2), 0]


def test_a_lane_with_device_slots_of_its_own_waits_for_those() -> None:
    board = Board(num_sequences=1)
    board.slot["lanes"] = 1
    board.others = [{**board.slot, "lanes": 2, "num_running": 1}]
    running = board.start(lane=Lane.LONG, max_tokens=10)
    board.slot["num_running"] = 0
    for _ in range(3):
        board.come(lane=Lane.LONG)
    board.forecast.output(running, 1, S)
    board.forecast.output(running, 1, 2 * S)
    # One second a token: the long lane's only sequence is free in 8 s, the short lane's is free now.
    assert board.wait_s(2 * S, lane=Lane.SHORT, ahead=0) == 0
    assert board.wait_s(2 * S, lane=Lane.LONG, ahead=0) == pytest.approx(8)
    # With a device slot for both, both wait in one line again.
    board.others[0]["lanes"] = 3
    assert board.wait_s(4 * S, lane=Lane.LONG, ahead=0) == 0


def test_a_drained_device_slot_has_no_free_sequence() -> None:
    board = Board(num_sequences=2)
    request = board.start()
    board.forecast.output(request, 1, S)
    board.forecast.output(request, 1, 2 * S)
    assert board.wait_s(2 * S, ahead=0) == 0
    board.slot["is_drained"] = True
    board.forecast.output(request, 2, 4 * S)
    assert board.wait_s(4 * S, ahead=0) == pytest.approx(6)
    assert board.forecast.num_sequences == 0


def test_without_a_living_device_slot_nothing_is_known() -> None:
    board = Board()
    board.slot["is_dead"] = True
    assert board.wait_s(S) is None
    assert board.forecast.num_sequences == 0


def test_far_places_go_on_at_the_pace_of_the_near_ones() -> None:
    board = Board(num_sequences=2)
    for _ in range(8):
        board.finish(board.start(), 10)
    for _ in range(2):
        board.start(100 * S)
    near, far = board.wait_s(100 * S, ahead=1000), board.wait_s(100 * S, ahead=5000)
    assert near is not None
    assert far is not None
    assert far / near == pytest.approx(5, rel=0.05)


@pytest.mark.parametrize(("num_places", "times", "seconds"), [(200, 2.0, 20), (40, 5.0, 20), (40, 1.5, 90)])
def test_foretold_waits_are_near_the_real_ones(num_places: int, times: float, seconds: float) -> None:
    """Four sequences, lengths that scatter by half, more than the capacity for a while; the load moves who comes."""
    rush = Rush(num_places=num_places)
    rush.arrive(3, 0, 30)
    rush.arrive(4 * times, 30, seconds)
    rush.run()
    told = [event[1:] for event in rush.seen.events if event[0] == "foretold" and event[2] > S]
    errors = sorted(abs(expected / real - 1) for expected, real in told)
    assert len(errors) > 60
    assert errors[len(errors) // 2] <= 0.25
    assert errors[len(errors) * 9 // 10] <= 0.5


def test_classes_that_the_load_moves_do_not_pass() -> None:
    """Ten a second of the next better class came lately; now that the load is high, they would stand behind."""
    waits = []
    for is_high in (False, True):
        board = Board(num_sequences=1)
        for _ in range(8):
            board.finish(board.start(), 10)
        board.start(100 * S)
        for tenth in range(50):
            board.come(101 * S + tenth * S // 10, level=1, asked=1)
        for tenth in range(10):
            board.come(106 * S + tenth * S // 10, level=1 + is_high, asked=1)
        waits.append(board.wait_s(107 * S, level=2, ahead=60))
    plain, moved = waits
    assert plain is not None
    assert moved is not None
    # Sixty that take ten seconds each, and before them those of five seconds; or about a third of these.
    assert plain == pytest.approx(600 + 500, rel=0.05)
    assert moved == pytest.approx(600 + 500 * 0.37, rel=0.05)
